// run(): bad workspaces, and tensors that differ from the plan.
#include <gtest/gtest.h>

#include <cstring>

#include "support/to_c.h"
#include "unit/api/bad_call.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

class BadRun : public testing::Test {
 protected:
  BadRun() {
    plan_ = *make_plan(*make_problem(call_.tensors, call_.options), *device_info(Device{}));
  }
  void expect_refused(const Status& status, std::initializer_list<const char*> words) {
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << status.message();
    for (const char* word : words) {
      EXPECT_NE(status.message().find(word), std::string::npos)
          << "no \"" << word << "\" in: " << status.message();
    }
    for (const std::uint64_t bits : call_.output.out.bits()) {
      ASSERT_EQ(bits, verify::poison(DType::f32));
    }
    for (const std::uint64_t bits : call_.output.lse.bits()) {
      ASSERT_EQ(bits, verify::poison(DType::f32));
    }
  }

  GoodCall call_;
  Plan plan_;
};

TEST_F(BadRun, Workspaces) {
  WorkspaceMemory memory(plan_.workspace_bytes);
  Workspace workspace = memory.get();
  workspace.bytes -= 1;
  expect_refused(run(plan_, call_.tensors, workspace),
                 {"workspace", std::to_string(plan_.workspace_bytes - 1).c_str(),
                  std::to_string(plan_.workspace_bytes).c_str()});
  workspace.bytes = 0;
  expect_refused(run(plan_, call_.tensors, workspace), {"workspace: has 0 bytes"});
  workspace = memory.get();
  workspace.data = nullptr;
  expect_refused(run(plan_, call_.tensors, workspace), {"workspace", "null"});
  workspace = memory.get();
  workspace.data = static_cast<char*>(workspace.data) + 128;
  expect_refused(run(plan_, call_.tensors, workspace), {"workspace", "256"});
  EXPECT_TRUE(run(plan_, call_.tensors, memory.get()).ok());
}

TEST_F(BadRun, WorkspacesThroughC) {
  WorkspaceMemory memory(plan_.workspace_bytes);
  CCall c(call_.tensors, call_.options);
  flashcore_error error{};
  const auto attempt = [&](void* data, std::size_t bytes) {
    c.params.workspace = data;
    c.params.workspace_bytes = bytes;
    const std::int32_t code = flashcore_attention(&c.params, &error);
    return Status(static_cast<StatusCode>(code), error.message);
  };
  char* data = static_cast<char*>(memory.get().data);
  expect_refused(attempt(data, plan_.workspace_bytes - 1), {"workspace: has"});
  expect_refused(attempt(nullptr, plan_.workspace_bytes), {"workspace", "null"});
  expect_refused(attempt(data + 64, plan_.workspace_bytes), {"workspace", "aligned"});
  c.params.workspace_header = data;
  expect_refused(attempt(data, plan_.workspace_bytes), {"workspace", "header"});
  c.params.workspace_header = nullptr;
  EXPECT_TRUE(attempt(data, plan_.workspace_bytes).ok());
}

TEST_F(BadRun, InitAndStatusNeedAHeader) {
  WorkspaceMemory memory(kWorkspaceHeaderBytes);
  Workspace workspace = memory.get();
  EXPECT_TRUE(workspace_init(workspace).ok());
  EXPECT_TRUE(workspace_status(workspace).ok());
  workspace.bytes = kWorkspaceHeaderBytes - 1;
  expect_refused(workspace_init(workspace), {"workspace", "65535", "65536"});
  expect_refused(workspace_status(workspace), {"workspace", "65535", "65536"});
  workspace = memory.get();
  workspace.data = nullptr;
  expect_refused(workspace_init(workspace), {"workspace", "null"});
}

TEST_F(BadRun, AnUninitialisedHeaderIsReportedAsCorrupt) {
  WorkspaceMemory memory(kWorkspaceHeaderBytes);
  std::memset(memory.get().data, 0xff, kWorkspaceHeaderBytes);
  const Status status = workspace_status(memory.get());
  EXPECT_EQ(status.code(), StatusCode::internal);
  EXPECT_NE(status.message().find("workspace_init"), std::string::npos) << status.message();
}

TEST_F(BadRun, AnEmptyPlan) {
  WorkspaceMemory memory(plan_.workspace_bytes);
  expect_refused(run(Plan{}, call_.tensors, memory.get()), {"plan", "make_plan"});
}

TEST_F(BadRun, TensorsOfAnotherCall) {
  WorkspaceMemory memory(plan_.workspace_bytes);
  const auto changed = [&](auto change) {
    Tensors tensors = call_.tensors;
    change(tensors);
    return run(plan_, tensors, memory.get());
  };
  const char* words = "not those of the plan";
  expect_refused(changed([](Tensors& t) { t.bias = {}; }), {words});
  expect_refused(changed([](Tensors& t) { t.lse = {}; }), {words});
  expect_refused(changed([](Tensors& t) { t.k.strides[2] = 0; }), {words});
  expect_refused(changed([](Tensors& t) { t.seqused_k = {}; }), {words});
  expect_refused(changed([](Tensors& t) {
                   t.k.shape[2] = t.v.shape[2] = t.bias.shape[3] = t.mask.shape[3] = 6;
                 }),
                 {words});
  // run() checks pointers too, not only make_problem().
  expect_refused(changed([](Tensors& t) { t.v.data = nullptr; }), {"v:", "null"});
}

TEST_F(BadRun, AcceptsBetterAlignedTensorsAndRejectsWorseOnes) {
  Inputs inputs = call_.inputs;
  const Tensor aligned = inputs.v;
  inputs.v = rearranged(inputs.v, MemoryLayout::misaligned);
  Output output = make_output(inputs);
  const Tensors worse = tensors_of(inputs, output.out, output.lse);
  inputs.v = aligned;
  const Tensors better = tensors_of(inputs, output.out, output.lse);
  const Plan for_worse = *make_plan(*make_problem(worse, {}), *device_info(Device{}));
  const Plan for_better = *make_plan(*make_problem(better, {}), *device_info(Device{}));
  ASSERT_LT(for_worse.problem.v.alignment_bytes, for_better.problem.v.alignment_bytes);
  WorkspaceMemory memory(plan_.workspace_bytes);
  EXPECT_TRUE(run(for_worse, better, memory.get()).ok());
  EXPECT_EQ(run(for_better, worse, memory.get()).code(), StatusCode::invalid_argument);
}

TEST_F(BadRun, RejectsAKernelThatThisCpuCannotExecute) {
  const char* device =
      to_string(device_info(Device{})->isa) == std::string("neon") ? "cpu-avx2" : "cpu-neon";
  const Result<Plan> plan =
      make_plan(*make_problem(call_.tensors, call_.options), *named_device(device));
  ASSERT_TRUE(plan.ok());
  WorkspaceMemory memory(plan->workspace_bytes);
  const Status status = run(*plan, call_.tensors, memory.get());
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_NE(status.message().find(plan->kernel->id), std::string::npos) << status.message();
}

}  // namespace
}  // namespace flashcore::test
