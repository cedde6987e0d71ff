// A call captured in a CUDA graph: replays follow the data and lengths on the device, and nothing
// but the data decides the bits.
#include <algorithm>

#include "support.h"

namespace flashcore::gpu_test {
namespace {

class CapturedGraph {
 public:
  template <typename Body>
  CapturedGraph(cudaStream_t stream, Body body) {
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
    const Status status = body();
    require(cudaStreamEndCapture(stream, &graph_), "end capture");
    require(status);
    require(cudaGraphInstantiate(&executable_, graph_, 0), "instantiate");
  }
  ~CapturedGraph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void replay(cudaStream_t stream) const {
    require(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
  }
  std::size_t nodes() const {
    std::size_t count = 0;
    require(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    return count;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

struct GraphCase {
  const char* name;
  verify::CaseSpec spec;
};

void PrintTo(const GraphCase& c, std::ostream* out) { *out << c.name; }

verify::CaseSpec plain() {
  verify::CaseSpec spec = dense(DType::f16, 1, 4, 4, 200, 200, 64);
  spec.options.causal = spec.lse = true;
  return spec;
}

verify::CaseSpec split() {
  verify::CaseSpec spec = dense(DType::f32, 2, 2, 2, 33, 700, 64);
  spec.options.num_splits = 5;
  spec.lse = true;
  return spec;
}

/// One step of a decode loop: the lengths change from replay to replay.
verify::CaseSpec decode() {
  verify::CaseSpec spec = dense(DType::bf16, 3, 8, 2, 1, 2000, 128);
  spec.used_k = true;
  spec.options.num_splits = 7;
  spec.sinks = true;
  return spec;
}

class GraphReplay : public GpuTest, public ::testing::WithParamInterface<GraphCase> {};

TEST_P(GraphReplay, FollowsTheData) {
  verify::CaseSpec spec = GetParam().spec;
  const verify::CaseMemory first(spec);
  spec.seed += 1;
  const verify::CaseMemory second(spec);
  GpuCase gpu(first);
  const TestStream stream;
  const std::vector<std::byte> want_first = gpu.direct(first, stream);
  const std::vector<std::byte> want_second = gpu.direct(second, stream);
  expect_right(first, want_first, gpu.plan());
  expect_right(second, want_second, gpu.plan());
  EXPECT_NE(want_first, want_second);

  gpu.load(first);
  const CapturedGraph graph(stream, [&] { return gpu.run(stream); });
  EXPECT_EQ(gpu.block(), first.bytes()) << "capturing must not run anything";
  EXPECT_EQ(graph.nodes(), gpu.plan().splits > 1 && !gpu.plan().combines_itself ? 2u : 1u);
  for (const bool use_second : {false, true, true, false}) {
    gpu.load(use_second ? second : first);
    graph.replay(stream);
    EXPECT_EQ(gpu.block(), use_second ? want_second : want_first);
  }
  EXPECT_TRUE(gpu.workspace().header_is_zero());
}

TEST_P(GraphReplay, ThousandReplaysGiveTheSameBits) {
  verify::CaseSpec spec = GetParam().spec;
  spec.batch = 1;  // a small block: it is compared a thousand times
  spec.kv_len = std::min<std::int64_t>(spec.kv_len, 300);
  const verify::CaseMemory memory(spec);
  GpuCase gpu(memory);
  const TestStream stream;
  const std::vector<std::byte> want = gpu.direct(memory, stream);
  const CapturedGraph graph(stream, [&] { return gpu.run(stream); });
  for (int replay = 0; replay < 1000; ++replay) {
    gpu.load(memory);  // poisons the outputs
    graph.replay(stream);
    ASSERT_EQ(gpu.block(), want) << "replay " << replay;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GraphReplay,
                         ::testing::Values(GraphCase{"plain", plain()}, GraphCase{"split", split()},
                                           GraphCase{"decode", decode()}),
                         [](const auto& test) { return std::string(test.param.name); });

class Graph : public GpuTest {};

// Under ctest this is the process's first call of the kernel: capture must not need a warm-up.
TEST_F(Graph, FirstCallMayBeCaptured) {
  const verify::CaseMemory memory(dense(DType::f32, 1, 1, 1, 20, 100, 300));
  GpuCase gpu(memory);
  const TestStream stream;
  const CapturedGraph graph(stream, [&] { return gpu.run(stream); });
  graph.replay(stream);
  expect_right(memory, gpu.block(), gpu.plan());
}

// Calls in one graph follow each other, so they may share a workspace.
TEST_F(Graph, ManyCallsShareAWorkspace) {
  verify::CaseSpec spec = split();
  const verify::CaseMemory first(spec);
  spec.seed = 77;
  const verify::CaseMemory second(spec);
  GpuCase a(first), b(second);
  const TestStream stream;
  const std::vector<std::byte> want_a = a.direct(first, stream), want_b = b.direct(second, stream);
  a.load(first);
  b.load(second);
  const CapturedGraph graph(stream, [&]() -> Status {
    for (int i = 0; i < 20; ++i) {
      for (const GpuCase* c : {&a, &b}) {
        Status status = run(c->plan(), c->tensors(), a.workspace().get(), stream);
        if (!status.ok()) return status;
      }
    }
    return {};
  });
  graph.replay(stream);
  EXPECT_EQ(a.block(), want_a);
  EXPECT_EQ(b.block(), want_b);
}

TEST_F(Graph, WorkspaceInitMayBeCaptured) {
  const verify::CaseMemory memory(split());
  GpuCase gpu(memory);
  const TestStream stream;
  const std::vector<std::byte> want = gpu.direct(memory, stream);
  const Workspace workspace = gpu.workspace().get();
  const CapturedGraph graph(stream, [&] {
    const Status status = workspace_init(workspace, stream);
    return status.ok() ? gpu.run(stream) : status;
  });
  require(cudaMemset(workspace.data, 0xff, workspace.bytes), "cudaMemset");
  gpu.load(memory);
  graph.replay(stream);
  EXPECT_EQ(gpu.block(), want);
  EXPECT_TRUE(gpu.workspace().header_is_zero());
}

}  // namespace
}  // namespace flashcore::gpu_test
