// Gradients on the GPU: right on random problems, the same bits at every repeat and from a graph,
// and reports of bad lengths.
#include "flashcore/backward.h"

#include "backend/backend.h"
#include "check/check.h"
#include "check/gradient_memory.h"
#include "gpu/captured_graph.h"
#include "gpu/support.h"
#include "verify/inputs/case.h"

namespace flashcore::gpu_test {
namespace {

constexpr int kRandomProblems = 40;  // for each kernel
constexpr int kBackwardRepeats = 100;

/// A call and its gradients in device memory.
class GpuGradients {
 public:
  explicit GpuGradients(const verify::CaseSpec& spec, const char* kernel)
      : memory_(with_kernel(spec, kernel)),
        gradients_(memory_.spec(), memory_.tensors()),
        block_(memory_.bytes()),
        outputs_(gradients_.bytes()),
        tensors_(memory_.at(block_.data(), kGpu)),
        views_(gradients_.at(outputs_.data(), kGpu)) {
    const Options backward = memory_.spec().options;
    Options options = backward;
    options.kernel = nullptr;
    const Plan forward = plan_for(tensors_, options);
    const TestWorkspace workspace(forward.workspace_bytes);
    require(flashcore::run(forward, tensors_, workspace.get()));
    require(cudaDeviceSynchronize(), "forward");
    const BackwardProblem problem = require(make_backward_problem(tensors_, views_, backward));
    plan_ = require(make_backward_plan(problem, require(device_info(kGpu))));
  }

  const BackwardPlan& plan() const { return plan_; }
  const Tensors& tensors() const { return tensors_; }
  Status run(const Workspace& workspace, Stream stream) const {
    return run_backward(plan_, tensors_, views_, workspace, stream);
  }
  void poison(cudaStream_t stream) const {
    require(cudaMemcpyAsync(outputs_.data(), gradients_.bytes().data(), gradients_.bytes().size(),
                            cudaMemcpyHostToDevice, stream),
            "poison");
  }
  std::vector<std::byte> outputs() const { return outputs_.download(); }
  bool only_outputs_changed() const { return gradients_.only_outputs_changed(outputs()); }

 private:
  /// The kernel decides which types and layouts the gradients may have.
  static verify::CaseSpec with_kernel(verify::CaseSpec spec, const char* kernel) {
    spec.options.kernel = kernel;
    return spec;
  }

  verify::CaseMemory memory_;
  verify::GradientMemory gradients_;
  DeviceBuffer block_, outputs_;
  Tensors tensors_;
  Gradients views_;
  BackwardPlan plan_;
};

verify::CaseSpec causal_gqa(const KernelInfo& kernel, std::uint64_t seed) {
  verify::CaseSpec spec = dense(kernel, 2, 4, 2, 300, 333);
  spec.options.causal = spec.lse = true;
  spec.seed = seed;
  return spec;
}

class GpuBackward : public GpuTest {};

TEST_F(GpuBackward, EveryKernelIsRightOnRandomProblems) {
  for (const KernelInfo* kernel : runnable_kernels(Operation::bwd)) {
    verify::CheckRunner runner(*cuda_backend(), kGpu, require(device_info(kGpu)));
    for (int i = 0; i < kRandomProblems; ++i) {
      verify::CaseSpec spec = verify::random_case(*kernel, 17, static_cast<std::uint64_t>(i));
      spec.options.kernel = kernel->id;
      const verify::CheckRunner::Outcome outcome = runner.check_backward(spec);
      ASSERT_TRUE(outcome.status.ok()) << kernel->id << ": " << outcome.status.message();
      ASSERT_TRUE(outcome.comparison.ok)
          << kernel->id << " problem " << i << ": " << verify::report(outcome.comparison);
      ASSERT_FALSE(outcome.stray_writes) << kernel->id << " problem " << i;
    }
  }
}

TEST_F(GpuBackward, RepeatsAndGraphsGiveTheSameBits) {
  for (const KernelInfo* kernel : runnable_kernels(Operation::bwd)) {
    const GpuGradients call(causal_gqa(*kernel, 5), kernel->id);
    ASSERT_STREQ(call.plan().kernel->id, kernel->id);
    const TestWorkspace workspace(call.plan().workspace_bytes);
    const TestStream stream;
    call.poison(stream);
    require(call.run(workspace.get(), stream));
    stream.synchronize();
    const std::vector<std::byte> first = call.outputs();
    for (int repeat = 0; repeat < kBackwardRepeats; ++repeat) {
      call.poison(stream);
      require(call.run(workspace.get(), stream));
      stream.synchronize();
      ASSERT_TRUE(call.outputs() == first) << kernel->id << ": repeat " << repeat;
    }
    const CapturedGraph graph(stream, [&] { return call.run(workspace.get(), stream); });
    for (int replay = 0; replay < 3; ++replay) {
      call.poison(stream);
      graph.replay(stream);
      stream.synchronize();
      ASSERT_TRUE(call.outputs() == first) << kernel->id << ": replay " << replay;
    }
    EXPECT_TRUE(workspace.header_is_zero());
  }
}

/// A length or start with bad values, and the expected report.
struct BadLengths {
  bool verify::CaseSpec::*given;  // makes the call have the tensor
  TensorView Tensors::*tensor;
  std::vector<std::int32_t> values;
  const char* wanted;
};

std::vector<BadLengths> bad_lengths() {
  using verify::CaseSpec;
  return {
      {&CaseSpec::q_varlen,
       &Tensors::cu_seqlens_q,
       {0, 1, 2, 100000},
       "cu_seqlens_q[3] is 100000 (sequence 2)"},
      {&CaseSpec::kv_varlen,
       &Tensors::cu_seqlens_k,
       {0, 2, 3, -7},
       "cu_seqlens_k[3] is -7 (sequence 2)"},
      {&CaseSpec::used_k, &Tensors::seqused_k, {3, 334, 4}, "seqused_k[1] is 334 (sequence 1)"},
      {&CaseSpec::q_start,
       &Tensors::q_start,
       {0, 0, 2000000000},
       "q_start[2] is 2000000000 (sequence 2)"},
  };
}

// A kernel clamps bad lengths and reports them. The next call with good ones is right again.
TEST_F(GpuBackward, CheckedCallsReportBadLengths) {
  for (const KernelInfo* kernel : runnable_kernels(Operation::bwd)) {
    for (const BadLengths& bad : bad_lengths()) {
      verify::CaseSpec spec = dense(*kernel, 3, 4, 2, 300, 333);
      spec.options.causal = spec.options.checked = spec.lse = true;
      spec.*bad.given = true;
      const GpuGradients call(spec, kernel->id);
      const TestWorkspace workspace(call.plan().workspace_bytes);
      const TensorView& lengths = call.tensors().*bad.tensor;
      ASSERT_EQ(static_cast<std::size_t>(lengths.shape[0]), bad.values.size());
      const std::size_t bytes = bad.values.size() * sizeof(std::int32_t);
      std::vector<std::int32_t> good(bad.values.size());
      require(cudaMemcpy(good.data(), lengths.data, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
      const auto run = [&](const std::vector<std::int32_t>& values) {
        require(cudaMemcpy(lengths.data, values.data(), bytes, cudaMemcpyHostToDevice), "memcpy");
        call.poison(nullptr);
        require(call.run(workspace.get(), nullptr));
        return workspace_status(workspace.get());
      };
      require(run(good));
      const std::vector<std::byte> right = call.outputs();
      const Status status = run(bad.values);
      EXPECT_EQ(status.code(), StatusCode::invalid_argument) << kernel->id << ": " << bad.wanted;
      EXPECT_NE(status.message().find(bad.wanted), std::string::npos)
          << kernel->id << ": " << status.message();
      EXPECT_TRUE(call.only_outputs_changed()) << kernel->id << ": " << bad.wanted;
      EXPECT_TRUE(workspace.header_is_zero());
      require(run(good));
      EXPECT_TRUE(call.outputs() == right) << kernel->id << ": " << bad.wanted;
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
