// Workspaces and concurrent calls.
#include <atomic>
#include <cstring>
#include <thread>

#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

class Workspaces : public KernelTest {
 protected:
  struct Call {
    Inputs inputs;
    Output output;
    Tensors tensors;
    Plan plan;
    Tensor right;  // the first output, after its comparison with the oracle
  };
  /// Plans a call without running it.
  Call planned(const Sizes& sizes, std::int32_t splits, int threads = 2) {
    Call call;
    call.inputs = draw_inputs(random(), kernel(), sizes);
    add_score_options(random(), call.inputs);
    add_masks(random(), call.inputs);
    call.inputs.options.num_splits = splits;
    call.output = make_output(call.inputs);
    call.tensors = tensors_of(call.inputs, call.output.out, call.output.lse);
    DeviceInfo info = *device_info(Device{});
    info.threads = threads;
    call.plan = *make_plan(*make_problem(call.tensors, call.inputs.options), info);
    return call;
  }
  static bool header_is_zero(const Workspace& workspace) {
    const auto* bytes = static_cast<const unsigned char*>(workspace.data);
    for (std::size_t i = 0; i < kWorkspaceHeaderBytes; ++i) {
      if (bytes[i] != 0) return false;
    }
    return true;
  }
};
FLASHCORE_FOR_EACH_KERNEL(Workspaces);

constexpr Sizes kSmall{
    .batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 9, .kv_len = 150, .head_dim = 16, .v_dim = 8};
constexpr Sizes kLarge{.batch = 2,
                       .q_heads = 4,
                       .kv_heads = 2,
                       .q_len = 70,
                       .kv_len = 300,
                       .head_dim = 48,
                       .v_dim = 65};

TEST_P(Workspaces, EarlierContentsDoNotMatter) {
  for (const std::int32_t splits : {1, 3}) {
    Call call = planned(kLarge, splits);
    WorkspaceMemory memory(call.plan.workspace_bytes);
    Tensor first;
    for (const int byte : {0xff, 0x00, 0x7f}) {
      std::memset(memory.get().data, byte, memory.get().bytes);
      ASSERT_TRUE(workspace_init(memory.get()).ok());
      call.output.out.fill(0);
      ASSERT_TRUE(run(call.plan, call.tensors, memory.get()).ok());
      if (!first.given()) first = call.output.out;
      FLASHCORE_EXPECT_SAME_BITS(call.output.out, first);
      EXPECT_TRUE(header_is_zero(memory.get()));
      EXPECT_TRUE(workspace_status(memory.get()).ok());
    }
  }
}

TEST_P(Workspaces, PlansMayShareAWorkspace) {
  Call a = planned(kLarge, 3), b = planned(kSmall, 1), c = planned(kSmall, 2);
  const std::size_t bytes =
      std::max({a.plan.workspace_bytes, b.plan.workspace_bytes, c.plan.workspace_bytes});
  WorkspaceMemory memory(bytes);  // initialized once
  for (int n = 0; n < 3; ++n) {
    for (Call* call : {&a, &b, &c, &a}) {
      call->output.out.fill(0);
      ASSERT_TRUE(run(call->plan, call->tensors, memory.get()).ok());
      Output& output = call->output;
      if (!call->right.given()) {
        output.problem = call->plan.problem;
        output.plan = call->plan;
        ASSERT_EQ(verdict(call->inputs, output), "");
        call->right = output.out;
      }
      FLASHCORE_EXPECT_SAME_BITS(output.out, call->right);
      ASSERT_TRUE(header_is_zero(memory.get()));
    }
  }
}

TEST_P(Workspaces, RunReadsCurrentData) {
  Call call = planned(kSmall, 2);
  WorkspaceMemory memory(call.plan.workspace_bytes);
  for (int n = 0; n < 3; ++n) {
    const Tensor q = draw_normal(random(), dtype(), call.inputs.q.shape());
    call.inputs.q.set_bits(q.bits());  // in place, so that the views of the plan stay valid
    ASSERT_TRUE(run(call.plan, call.tensors, memory.get()).ok());
    call.output.problem = call.plan.problem;
    call.output.plan = call.plan;
    EXPECT_EQ(verdict(call.inputs, call.output), "");
  }
}

TEST_P(Workspaces, SeveralThreadsRunDifferentPlans) {
  constexpr int kCallers = 4;
  std::vector<Call> calls;
  std::vector<Output> want;
  for (int i = 0; i < kCallers; ++i) {
    calls.push_back(planned(i % 2 == 0 ? kLarge : kSmall, i % 3, 3));
  }
  for (Call& call : calls) {
    // push_back() moved the calls, so the views are made again.
    call.tensors = tensors_of(call.inputs, call.output.out, call.output.lse);
    WorkspaceMemory memory(call.plan.workspace_bytes);
    ASSERT_TRUE(run(call.plan, call.tensors, memory.get()).ok());
    want.push_back(call.output);
    call.output.out.fill(0);
    call.output.lse.fill(0);
  }
  std::atomic<int> failures{0};
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < kCallers; ++i) {
    callers.emplace_back([&, i] {
      Call& call = calls[i];
      WorkspaceMemory memory(call.plan.workspace_bytes);
      for (int n = 0; n < rounds(10); ++n) {
        if (!run(call.plan, call.tensors, memory.get()).ok()) ++failures;
        if (!difference(call.output.out, want[i].out).empty()) ++failures;
        if (!difference(call.output.lse, want[i].lse).empty()) ++failures;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(failures.load(), 0);
}

TEST_P(Workspaces, SeveralThreadsShareAPlan) {
  const Call call = planned(kLarge, 2, 2);
  WorkspaceMemory alone(call.plan.workspace_bytes);
  const Tensors tensors = tensors_of(call.inputs, call.output.out, call.output.lse);
  ASSERT_TRUE(run(call.plan, tensors, alone.get()).ok());
  std::atomic<int> failures{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      const Output mine = make_output(call.inputs);
      const Tensors my_tensors = tensors_of(call.inputs, mine.out, mine.lse);
      WorkspaceMemory memory(call.plan.workspace_bytes);
      if (!run(call.plan, my_tensors, memory.get()).ok()) ++failures;
      if (!difference(mine.out, call.output.out).empty()) ++failures;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(failures.load(), 0);
}

}  // namespace
}  // namespace flashcore::test
