// Calls that another thread ends: the code, the time it takes, what is written, what still works.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "api/polled_run.h"
#include "support/call.h"
#include "support/draw.h"

namespace flashcore::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kDelay = std::chrono::milliseconds(50);
// An item of the call below takes seconds, the whole call takes longer still.
constexpr auto kSoon = std::chrono::seconds(1);
constexpr float kNotWritten = -7.f;

/// Four work items of 64 rows and 2^23 keys for each split. All keys are one row of memory.
struct LongCall {
  explicit LongCall(int threads = 1, int splits = 1) {
    tensors.q = view(q.data(), DType::f32, {1, 1, kRows, kDim}, {});
    tensors.out = view(out.data(), DType::f32, {1, 1, kRows, kDim}, {});
    tensors.k = tensors.v = view(keys.data(), DType::f32, {1, 1, 1 << 23, kDim}, {});
    tensors.k.strides[2] = tensors.v.strides[2] = 0;
    DeviceInfo device = *device_info(Device{});
    device.threads = threads;
    plan = *make_plan(*make_problem(tensors, {.num_splits = splits}), device);
  }
  bool is_untouched() const {
    return std::all_of(out.begin(), out.end(), [](float one) { return one == kNotWritten; });
  }

  static constexpr int kRows = 256, kDim = 64;
  std::vector<float> q = std::vector<float>(kRows * kDim, 0.5f);
  std::vector<float> keys = std::vector<float>(kDim, 0.5f);
  std::vector<float> out = std::vector<float>(kRows * kDim, kNotWritten);
  Tensors tensors;
  Plan plan;
};

/// A small call with a workspace that others have used.
void expect_right_results(Workspace workspace) {
  Random random(5);
  Inputs inputs = draw_inputs(random, *find_kernel("fwd_plain_f32"),
                              {.batch = 2, .q_heads = 2, .q_len = 3, .kv_len = 500});
  inputs.options.num_splits = 4;
  Output output = make_output(inputs);
  const Tensors tensors = tensors_of(inputs, output.out, output.lse);
  const Plan plan = *make_plan(*make_problem(tensors, inputs.options), *device_info(Device{}));
  ASSERT_LE(plan.workspace_bytes, workspace.bytes);
  ASSERT_TRUE(run(plan, tensors, workspace).ok());
  FLASHCORE_EXPECT_SAME(output, attend(inputs));
}

TEST(Cancel, BeforeTheCallNothingIsWritten) {
  const LongCall call;
  const WorkspaceMemory workspace(call.plan.workspace_bytes);
  const std::int32_t cancel = 1;
  const auto start = Clock::now();
  const Status status = run(call.plan, call.tensors, workspace.get(), nullptr, &cancel);
  EXPECT_LT(Clock::now() - start, kSoon);
  EXPECT_EQ(status.code(), StatusCode::cancelled);
  EXPECT_NE(status.message().find("cancel"), std::string::npos) << status.message();
  EXPECT_TRUE(call.is_untouched());
}

TEST(Cancel, DuringTheCallItEndsSoon) {
  for (const int threads : {1, 3}) {
    for (const int splits : {1, 5}) {
      const LongCall call(threads, splits);
      EXPECT_EQ(call.plan.splits, splits);
      const WorkspaceMemory workspace(std::max<std::size_t>(call.plan.workspace_bytes, 4 << 20));
      std::int32_t cancel = 0;
      std::thread other([&cancel] {
        std::this_thread::sleep_for(kDelay);
        __atomic_store_n(&cancel, 1, __ATOMIC_RELAXED);
      });
      const auto start = Clock::now();
      const Status status = run(call.plan, call.tensors, workspace.get(), nullptr, &cancel);
      const auto elapsed = Clock::now() - start;
      other.join();
      EXPECT_EQ(status.code(), StatusCode::cancelled) << threads << " threads, " << splits;
      EXPECT_GE(elapsed, kDelay);
      EXPECT_LT(elapsed, kSoon) << threads << " threads, " << splits << " splits";
      expect_right_results(workspace.get());
    }
  }
}

TEST(Cancel, AFlagThatStaysClearChangesNothing) {
  Random random(7);
  const Inputs inputs = draw_inputs(random, *find_kernel("fwd_plain_f32"),
                                    {.batch = 2, .q_heads = 2, .q_len = 70, .kv_len = 90});
  Output output = make_output(inputs);
  const Tensors tensors = tensors_of(inputs, output.out, output.lse);
  const Plan plan = *make_plan(*make_problem(tensors, inputs.options), *device_info(Device{}));
  const WorkspaceMemory workspace(plan.workspace_bytes);
  const std::int32_t cancel = 0;
  ASSERT_TRUE(run(plan, tensors, workspace.get(), nullptr, &cancel).ok());
  FLASHCORE_EXPECT_SAME(output, attend(inputs));

  output = make_output(inputs);
  ASSERT_TRUE(
      run_polled(plan, tensors_of(inputs, output.out, output.lse), [] { return false; }).ok());
  FLASHCORE_EXPECT_SAME(output, attend(inputs));
}

TEST(PolledRun, StopsWhenItIsAskedTo) {
  const LongCall call(2);
  int polls = 0;
  const auto caller = std::this_thread::get_id();
  const auto start = Clock::now();
  const Status status = run_polled(call.plan, call.tensors, [&] {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    return ++polls == 3;
  });
  EXPECT_LT(Clock::now() - start, kSoon);
  EXPECT_EQ(status.code(), StatusCode::cancelled);
  EXPECT_EQ(polls, 3);
  EXPECT_TRUE(call.is_untouched());
}

TEST(PolledRun, ReturnsTheErrorOfTheCall) {
  LongCall call;
  call.tensors.out.data = nullptr;
  EXPECT_EQ(run_polled(call.plan, call.tensors, [] { return false; }).code(),
            StatusCode::invalid_argument);
}

}  // namespace
}  // namespace flashcore::test
