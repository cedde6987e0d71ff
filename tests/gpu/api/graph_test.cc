// Calls captured in a CUDA graph: replays use the current data and lengths on the device, and the
// bits depend on the data only.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "gpu/captured_graph.h"
#include "gpu/support.h"

namespace flashcore::gpu_test {
namespace {

struct GraphCase {
  const char* name;
  verify::CaseSpec spec;
};

void PrintTo(const GraphCase& c, std::ostream* out) { *out << c.name; }

verify::CaseSpec causal() {
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

/// One step of a decode loop: lengths differ between replays.
verify::CaseSpec decode() {
  verify::CaseSpec spec = dense(DType::bf16, 3, 8, 2, 1, 2000, 128);
  spec.used_k = true;
  spec.options.num_splits = 7;
  spec.sinks = true;
  return spec;
}

/// More tiles than SMs: a Hopper kernel schedules them dynamically by the header's tile_counter.
verify::CaseSpec dynamically_scheduled() {
  verify::CaseSpec spec = dense(DType::bf16, 5, 40, 20, 129, 300, 128);
  spec.options.causal = spec.lse = true;
  for (const KernelInfo* kernel : runnable_kernels()) {
    if (kernel->family == Family::sm90 && kernel->inputs == Inputs::native &&
        kernel->dtype == DType::bf16 && kernel->head_dim == 128) {
      spec.options.kernel = kernel->id;
      verify::fit_to_kernel(*kernel, spec);
      break;
    }
  }
  return spec;
}

/// The last CTA to arrive combines the splits.
verify::CaseSpec combined_by_last_cta() {
  verify::CaseSpec spec = dense(DType::bf16, 2, 32, 8, 1, 3000, 128);
  spec.options.num_splits = 20;  // more than the CTAs of a cluster
  spec.lse = true;
  return spec;
}

class GraphReplay : public GpuTest, public ::testing::WithParamInterface<GraphCase> {};

TEST_P(GraphReplay, UsesCurrentData) {
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
  EXPECT_EQ(graph.nodes(), gpu.plan().combine == CombineMode::kernel ? 2u : 1u);
  for (const bool use_second : {false, true, true, false}) {
    gpu.load(use_second ? second : first);
    graph.replay(stream);
    EXPECT_EQ(gpu.block(), use_second ? want_second : want_first);
  }
  EXPECT_TRUE(gpu.workspace().header_is_zero());
}

TEST_P(GraphReplay, ThousandReplaysGiveTheSameBits) {
  verify::CaseSpec spec = GetParam().spec;
  spec.batch = 1;  // a small case: the test compares it a thousand times
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
                         ::testing::Values(GraphCase{"causal", causal()},
                                           GraphCase{"split", split()},
                                           GraphCase{"decode", decode()}),
                         [](const auto& test) { return std::string(test.param.name); });

class Graph : public GpuTest {};

// Under ctest, this is the first call of the process: capture must not need a warm-up.
TEST_F(Graph, FirstCallMayBeCaptured) {
  const verify::CaseMemory memory(dense(DType::f32, 1, 1, 1, 20, 100, 300));
  GpuCase gpu(memory);
  const TestStream stream;
  const CapturedGraph graph(stream, [&] { return gpu.run(stream); });
  graph.replay(stream);
  expect_right(memory, gpu.block(), gpu.plan());
}

// Calls of one graph run in order, so they may share a workspace.
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

// A workspace that is initialized before the capture needs no node in the graph.
TEST_F(Graph, HasAKernelForEachCallAndNoMemset) {
  constexpr int kCalls = 5;
  for (const verify::CaseSpec& spec :
       {causal(), split(), decode(), combined_by_last_cta(), dynamically_scheduled()}) {
    const verify::CaseMemory memory(spec);
    GpuCase gpu(memory);
    const TestStream stream;
    const std::vector<std::byte> want = gpu.direct(memory, stream);
    const CapturedGraph graph(stream, [&]() -> Status {
      for (int call = 0; call < kCalls; ++call) {
        if (Status status = gpu.run(stream); !status.ok()) return status;
      }
      return {};
    });
    const bool two = gpu.plan().combine == CombineMode::kernel;
    EXPECT_EQ(graph.nodes(cudaGraphNodeTypeKernel), two ? 2u * kCalls : 1u * kCalls);
    EXPECT_EQ(graph.nodes(cudaGraphNodeTypeMemset), 0u);
    EXPECT_EQ(graph.nodes(), graph.nodes(cudaGraphNodeTypeKernel));
    for (int replay = 0; replay < 50; ++replay) {
      gpu.load(memory);
      graph.replay(stream);
      ASSERT_EQ(gpu.block(), want) << to_string(spec) << " replay " << replay;
    }
    EXPECT_TRUE(gpu.workspace().header_is_zero());
  }
}

// The header is in a separate buffer, and the rest of the workspace has its minimum size.
TEST_F(Graph, HeaderMayBeSeparate) {
  for (const verify::CaseSpec& spec :
       {causal(), split(), decode(), combined_by_last_cta(), dynamically_scheduled()}) {
    const verify::CaseMemory memory(spec);
    GpuCase gpu(memory);
    const TestStream stream;
    const std::vector<std::byte> want = gpu.direct(memory, stream);
    const TestWorkspace header(kWorkspaceHeaderBytes);
    const std::size_t bytes = gpu.plan().workspace_bytes - kWorkspaceHeaderBytes;
    const std::unique_ptr<DeviceBuffer> rest =
        bytes > 0 ? std::make_unique<DeviceBuffer>(bytes) : nullptr;
    Workspace workspace{rest == nullptr ? nullptr : rest->data(), bytes, kGpu, header.get().data};
    const CapturedGraph graph(stream,
                              [&] { return run(gpu.plan(), gpu.tensors(), workspace, stream); });
    for (int replay = 0; replay < 3; ++replay) {
      gpu.load(memory);
      graph.replay(stream);
      ASSERT_EQ(gpu.block(), want) << to_string(spec);
    }
    EXPECT_TRUE(header.header_is_zero());
    if (bytes > 0) {
      workspace.bytes -= 1;
      EXPECT_NE(
          run(gpu.plan(), gpu.tensors(), workspace, stream).message().find("without the header"),
          std::string::npos);
    }
  }
}

// Each graph has its own workspace and does not reset it.
TEST_F(Graph, ConcurrentGraphsAndCallsDoNotInterfere) {
  for (const verify::CaseSpec& spec : {combined_by_last_cta(), dynamically_scheduled()}) {
    verify::CaseSpec other = spec;
    other.seed += 1;
    const verify::CaseMemory first(spec), second(other);
    GpuCase a(first), b(second), c(first);
    if (a.plan().device.compute_capability == 90) {
      EXPECT_TRUE(uses_header(a.plan()));
    }
    const TestStream stream_a, stream_b, stream_c;
    const std::vector<std::byte> want_a = a.direct(first, stream_a);
    const std::vector<std::byte> want_b = b.direct(second, stream_b);
    const auto twenty = [](GpuCase& one, cudaStream_t stream) {
      return [&one, stream]() -> Status {
        for (int i = 0; i < 20; ++i) {
          if (Status status = one.run(stream); !status.ok()) return status;
        }
        return {};
      };
    };
    const CapturedGraph graph_a(stream_a, twenty(a, stream_a));
    const CapturedGraph graph_b(stream_b, twenty(b, stream_b));
    for (int repeat = 0; repeat < 10; ++repeat) {
      a.load(first);
      b.load(second);
      c.load(first);
      for (int replay = 0; replay < 5; ++replay) {
        graph_a.replay(stream_a);
        graph_b.replay(stream_b);
        require(twenty(c, stream_c)());
      }
      ASSERT_EQ(a.block(), want_a) << repeat;
      ASSERT_EQ(b.block(), want_b) << repeat;
      ASSERT_EQ(c.block(), want_a) << repeat;
    }
    for (const GpuCase* one : {&a, &b, &c}) EXPECT_TRUE(one->workspace().header_is_zero());
  }
}

class Capture : public GpuTest {
 protected:
  static std::uint64_t id_of(cudaStream_t stream, std::int32_t* ended = nullptr) {
    return require(capture_id(kGpu, stream, ended));
  }
  /// Waits: CUDA sets the flag asynchronously.
  static bool becomes_one(std::int32_t& flag) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::atomic_ref<std::int32_t>(flag).load() == 0) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
};

TEST_F(Capture, HasAnId) {
  const verify::CaseMemory memory(causal());
  const GpuCase gpu(memory);
  const TestStream stream, forked;
  EXPECT_EQ(id_of(stream), 0u);
  std::uint64_t first = 0, again = 0, of_fork = 0, second = 0;
  cudaEvent_t event = nullptr;
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  {
    const CapturedGraph graph(stream, [&]() -> Status {
      first = id_of(stream);
      EXPECT_EQ(id_of(forked), 0u);
      const Status status = gpu.run(stream);
      again = id_of(stream);
      require(cudaEventRecord(event, stream), "cudaEventRecord");
      require(cudaStreamWaitEvent(forked, event, 0), "cudaStreamWaitEvent");
      of_fork = id_of(forked);
      require(cudaEventRecord(event, forked), "cudaEventRecord");
      require(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
      return status;
    });
    EXPECT_EQ(graph.nodes(cudaGraphNodeTypeKernel), graph.nodes());
  }
  const CapturedGraph graph(stream, [&] {
    second = id_of(stream);
    return gpu.run(stream);
  });
  require(cudaEventDestroy(event), "cudaEventDestroy");
  EXPECT_NE(first, 0u);
  EXPECT_EQ(again, first);
  EXPECT_EQ(of_fork, first);
  EXPECT_NE(second, 0u);
  EXPECT_NE(second, first);
  EXPECT_EQ(id_of(stream), 0u);
}

TEST_F(Capture, ReportsTheEndOfTheGraph) {
  const verify::CaseMemory memory(causal());
  GpuCase gpu(memory);
  const TestStream stream;
  const std::vector<std::byte> want = gpu.direct(memory, stream);
  static std::int32_t ended;  // static: CUDA may write it after the test
  ended = 0;
  {
    CapturedGraph graph(stream, [&] {
      EXPECT_NE(id_of(stream, &ended), 0u);
      return gpu.run(stream);
    });
    EXPECT_EQ(graph.nodes(), graph.nodes(cudaGraphNodeTypeKernel))
        << "the notification adds no node";
    gpu.load(memory);
    graph.replay(stream);
    EXPECT_EQ(gpu.block(), want);
    graph.destroy_graph();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_EQ(std::atomic_ref<std::int32_t>(ended).load(), 0)
        << "the executable graph still exists";
    gpu.load(memory);
    graph.replay(stream);
    EXPECT_EQ(gpu.block(), want);
    EXPECT_EQ(std::atomic_ref<std::int32_t>(ended).load(), 0);
  }
  EXPECT_TRUE(becomes_one(ended));
}

// Another thread initializes a workspace and synchronizes: that must not break a capture, even in
// the most restrictive mode.
TEST_F(Capture, OtherThreadsMaySynchronize) {
  const verify::CaseMemory memory(causal());
  GpuCase gpu(memory);
  const TestStream stream, other;
  const DeviceBuffer buffer(kWorkspaceHeaderBytes);
  const std::vector<std::byte> want = gpu.direct(memory, stream);
  gpu.load(memory);
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin capture");
  const Status status = gpu.run(stream);
  Status waited;
  std::thread([&] {
    const Workspace workspace{buffer.data(), buffer.bytes(), kGpu};
    waited = workspace_init(workspace, other);
    if (waited.ok()) waited = workspace_status(workspace, other);
  }).join();
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(stream, &graph), "end capture");
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(waited.ok()) << waited.message();
  cudaGraphExec_t executable = nullptr;
  require(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  require(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
  EXPECT_EQ(gpu.block(), want);
  require(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  require(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

TEST_F(Capture, ReportsTheEndOfAFailedCapture) {
  const TestStream stream;
  static std::int32_t ended;
  ended = 0;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  EXPECT_NE(id_of(stream, &ended), 0u);
  EXPECT_NE(cudaStreamSynchronize(stream), cudaSuccess);  // invalidates the capture
  cudaGraph_t graph = nullptr;
  EXPECT_NE(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  static_cast<void>(cudaGetLastError());
  EXPECT_TRUE(becomes_one(ended));
}

}  // namespace
}  // namespace flashcore::gpu_test
