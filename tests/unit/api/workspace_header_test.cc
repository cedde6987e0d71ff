// The workspace header: the plans that use it, and its address if it is separate.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "backend/backend.h"
#include "backend/params.h"
#include "core/sm90_traits.h"
#include "flashcore/flashcore.h"
#include "plan/planner.h"
#include "support/draw.h"

namespace flashcore::test {
namespace {

struct Shape {
  std::int64_t batch, q_heads, kv_heads, q_len, kv_len, dim;
};

Result<Plan> try_plan(const char* device, DType dtype, const Shape& s,
                      const Options& options = {}) {
  const DeviceInfo info = *named_device(device);
  const Result<Problem> problem = dense_problem(dtype, s.batch, s.q_heads, s.kv_heads, s.q_len,
                                                s.kv_len, s.dim, s.dim, options, info.device);
  if (!problem.ok()) return problem.status();
  return make_plan(*problem, info);
}

Plan plan_of(const char* device, DType dtype, const Shape& shape, const Options& options = {}) {
  return *try_plan(device, dtype, shape, options);
}

TEST(UsesHeader, IfHopperFetchesTilesDynamically) {
  const Plan many = plan_of("h200", DType::bf16, {4, 32, 32, 2048, 2048, 128}, {.causal = true});
  EXPECT_STREQ(many.kernel->family_name(), "sm90");
  EXPECT_GT(many.num_tiles, many.device.sm_count);
  EXPECT_TRUE(uses_header(many));

  const Plan as_many_as_sms = plan_of("h200", DType::bf16, {1, 132, 132, 128, 128, 128});
  EXPECT_STREQ(as_many_as_sms.kernel->family_name(), "sm90");
  EXPECT_EQ(as_many_as_sms.num_tiles, as_many_as_sms.device.sm_count);
  EXPECT_EQ(as_many_as_sms.tail_tiles, 0);
  EXPECT_FALSE(uses_header(as_many_as_sms));

  Plan one_more = as_many_as_sms;
  one_more.num_tiles += 1;
  EXPECT_TRUE(uses_header(one_more));

  const Plan fp8 = plan_of("h200", DType::e4m3, {4, 32, 32, 2048, 2048, 128});
  EXPECT_STREQ(fp8.kernel->family_name(), "sm90_e4m3");
  EXPECT_TRUE(uses_header(fp8));
}

TEST(UsesHeader, IfHopperSplitsTheTail) {
  Plan plan = plan_of("h200", DType::bf16, {1, 4, 4, 2048, 2048, 128});
  EXPECT_GT(plan.tail_tiles, 0);
  EXPECT_LE(plan.num_tiles, plan.device.sm_count);
  EXPECT_TRUE(uses_header(plan));
  ASSERT_TRUE(apply_tail_split(plan, 0, 1).ok());
  EXPECT_FALSE(uses_header(plan)) << "one tile per CTA and no tail splits";
  ASSERT_TRUE(apply_tail_split(plan, 1, 2).ok());
  EXPECT_TRUE(uses_header(plan));
}

TEST(UsesHeader, IfTheKernelCombinesItsSplits) {
  const Shape decode{1, 32, 8, 1, 8192, 128};
  const Plan in_cluster = plan_of("h200", DType::bf16, {1, 32, 32, 1, 8192, 64});
  EXPECT_EQ(in_cluster.combine, CombineMode::cluster);
  EXPECT_TRUE(uses_header(in_cluster)) << "the last CTA combines if no cluster fits";
  const Plan by_last_cta = plan_of("a100", DType::bf16, decode);
  EXPECT_GT(by_last_cta.splits, 1);
  EXPECT_EQ(by_last_cta.combine, CombineMode::last_cta);
  EXPECT_TRUE(uses_header(by_last_cta));
  EXPECT_TRUE(uses_header(plan_of("a100", DType::e4m3, decode, {.num_splits = 4})));

  const Plan by_second_kernel =
      plan_of("a100", DType::bf16, {1, 32, 8, 1, 65536, 128}, {.num_splits = 200});
  EXPECT_GT(by_second_kernel.splits, core::kMaxCombinedSplits);
  EXPECT_FALSE(uses_header(by_second_kernel));
  const Plan simt = plan_of("h200", DType::f32, decode, {.num_splits = 4});
  EXPECT_STREQ(simt.kernel->family_name(), "simt");
  EXPECT_EQ(simt.splits, 4);
  EXPECT_FALSE(uses_header(simt));
}

TEST(UsesHeader, OtherPlansDoNot) {
  for (const char* device : {"h200", "a100", "l4", "t4"}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::e4m3}) {
      const Plan plan = plan_of(device, dtype, {1, 2, 2, 64, 64, 64}, {.num_splits = 1});
      EXPECT_FALSE(uses_header(plan)) << device << ' ' << plan.kernel->id;
    }
  }
  EXPECT_FALSE(uses_header(plan_of("cpu", DType::f32, {1, 2, 2, 64, 64, 64})));
  EXPECT_FALSE(uses_header(plan_of("cpu", DType::f32, {1, 2, 2, 64, 640, 64}, {.num_splits = 3})));
  EXPECT_FALSE(uses_header(Plan{}));
}

// Compares uses_header() with the launch arguments of every kernel: counters, scheduled tiles (as
// cuda/sm90/make_params.cc counts them) and the error slot.
TEST(UsesHeader, AgreesWithTheLaunchArguments) {
  const Shape shapes[] = {
      {1, 2, 2, 64, 64, 64},     {1, 132, 132, 128, 128, 128}, {2, 67, 67, 128, 128, 128},
      {1, 32, 8, 1, 8192, 128},  {5, 40, 20, 129, 70, 128},    {1, 4, 4, 2048, 2048, 128},
      {1, 8, 2, 300, 3000, 64},  {1, 32, 32, 2, 500, 256},     {3, 300, 100, 200, 100, 64},
      {1, 4, 1, 1, 100000, 576}, {1, 4, 1, 1, 100000, 128}};
  std::set<std::string> families;
  int used = 0, unused = 0;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.device != DeviceType::cuda) continue;
    for (const Shape& shape : shapes) {
      for (const int splits : {0, 1, 3, 129}) {
        for (const bool checked : {false, true}) {
          Options options{.checked = checked, .num_splits = splits, .kernel = kernel.id};
          const DType dtype = needs_8_bits(kernel) ? DType::e4m3 : kernel.dtype;
          const Result<Plan> plan = try_plan("h200", dtype, shape, options);
          if (!plan.ok()) continue;
          std::byte memory[1];
          const core::AttentionParams p = make_params(*plan, {}, {memory, 0, plan->problem.device});
          bool counts = p.counters != nullptr;
          if (is_persistent(kernel)) {
            const core::TileScheduler order =
                core::make_tile_scheduler(p.batch, p.q_heads / plan->heads_in_tile,
                                          p.group / plan->heads_in_tile, p.q_tiles, 0);
            const core::TailSplit tail{order.tiles - static_cast<std::int32_t>(plan->tail_tiles), 1,
                                       core::make_fast_divmod(plan->tail_splits)};
            counts =
                core::num_scheduled(order, tail) > plan->device.sm_count || plan->tail_tiles > 0;
          }
          EXPECT_EQ(uses_header(*plan), counts || p.checked)
              << kernel.id << " splits " << splits << " q_len " << shape.q_len;
          (uses_header(*plan) ? used : unused) += 1;
          families.insert(kernel.family_name());
        }
      }
    }
  }
  EXPECT_EQ(families, (std::set<std::string>{"simt", "sm80", "sm80_8bit", "sm90", "sm90_e4m3"}));
  EXPECT_GT(used, 100);
  EXPECT_GT(unused, 100);
}

class SeparateHeader : public testing::Test {
 protected:
  alignas(256) std::byte header_[256] = {};
  alignas(256) std::byte data_[256] = {};

  /// The plan's offsets include the header. With a separate header, data starts at that offset less
  /// the size of the header.
  void expect_addresses(const Plan& plan) {
    const Device gpu = plan.problem.device;
    const core::AttentionParams inside = make_params(plan, {}, {data_, 0, gpu});
    const core::AttentionParams separate = make_params(plan, {}, {data_, 0, gpu, header_});
    EXPECT_EQ(static_cast<void*>(inside.error), data_);
    EXPECT_EQ(static_cast<void*>(separate.error), header_);
    EXPECT_EQ(inside.counters != nullptr, separate.counters != nullptr);
    if (separate.counters != nullptr) {
      EXPECT_EQ(static_cast<void*>(separate.counters), header_ + core::kCountersOffset);
      EXPECT_EQ(static_cast<void*>(inside.counters), data_ + core::kCountersOffset);
    }
    const auto offset = [&](const void* address) {
      return address == nullptr ? -1 : static_cast<const std::byte*>(address) - data_;
    };
    constexpr auto kHeader = static_cast<std::ptrdiff_t>(kWorkspaceHeaderBytes);
    EXPECT_EQ(offset(inside.partial_out) - offset(separate.partial_out),
              inside.partial_out != nullptr ? kHeader : 0);
    EXPECT_EQ(offset(inside.partial_lse) - offset(separate.partial_lse),
              inside.partial_lse != nullptr ? kHeader : 0);
    EXPECT_EQ(
        offset(inside.partial_out),
        plan.partial_out_offset == 0 ? -1 : static_cast<std::ptrdiff_t>(plan.partial_out_offset));
  }
};

TEST_F(SeparateHeader, HasTheExpectedAddresses) {
  expect_addresses(plan_of("a100", DType::bf16, {1, 32, 8, 1, 8192, 128}));  // combined splits
  expect_addresses(plan_of("h200", DType::f32, {1, 2, 2, 33, 700, 64}, {.num_splits = 5}));
  expect_addresses(plan_of("h200", DType::bf16, {1, 4, 4, 2048, 2048, 128}));  // tail splits
  expect_addresses(plan_of("h200", DType::bf16, {1, 2, 2, 64, 64, 64}, {.num_splits = 1}));
}

/// A small call on the CPU.
class CpuHeader : public testing::Test {
 protected:
  CpuHeader() {
    Random random(5);
    inputs_ = draw_inputs(random, *find_kernel("fwd_generic_f32"),
                          {.batch = 2, .q_heads = 2, .q_len = 3, .kv_len = 5});
    output_ = make_output(inputs_);
    tensors_ = tensors_of(inputs_, output_.out, output_.lse);
    plan_ = *make_plan(*make_problem(tensors_, inputs_.options), *device_info(Device{}));
  }
  Inputs inputs_;
  Output output_;
  Tensors tensors_;
  Plan plan_;
};

TEST_F(CpuHeader, IsNotWrittenIfUnused) {
  EXPECT_FALSE(uses_header(plan_));
  WorkspaceMemory memory(plan_.workspace_bytes);
  std::memset(memory.get().data, 0xff, memory.get().bytes);
  ASSERT_TRUE(run(plan_, tensors_, memory.get()).ok());
  FLASHCORE_EXPECT_SAME(output_, attend(inputs_));
  const auto* bytes = static_cast<const unsigned char*>(memory.get().data);
  for (std::size_t i = 0; i < kWorkspaceHeaderBytes; ++i) ASSERT_EQ(bytes[i], 0xff) << i;
}

TEST_F(CpuHeader, RejectsASeparateHeader) {
  WorkspaceMemory memory(plan_.workspace_bytes), header(kWorkspaceHeaderBytes);
  Workspace workspace = memory.get();
  workspace.header = header.get().data;
  const Status status = run(plan_, tensors_, workspace);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find("Workspace::header"), std::string::npos) << status.message();
}

TEST_F(CpuHeader, ASeparateHeaderIsInitialisedAndChecked) {
  WorkspaceMemory header(kWorkspaceHeaderBytes);
  std::memset(header.get().data, 0xff, kWorkspaceHeaderBytes);
  Workspace workspace{nullptr, 0, Device{}, header.get().data};
  EXPECT_FALSE(workspace_status(workspace).ok());
  ASSERT_TRUE(workspace_init(workspace).ok());
  EXPECT_TRUE(workspace_status(workspace).ok());
  workspace.header = static_cast<std::byte*>(workspace.header) + 64;
  EXPECT_NE(workspace_init(workspace).message().find("aligned"), std::string::npos);
}

TEST(CaptureId, IsZeroOnACpu) {
  std::int32_t ended = 0;
  const Result<std::uint64_t> id = capture_id(Device{}, nullptr, &ended);
  ASSERT_TRUE(id.ok());
  EXPECT_EQ(*id, 0u);
  EXPECT_EQ(ended, 0);

  flashcore_error error{};
  std::uint64_t found = 7;
  EXPECT_EQ(flashcore_capture_id({FLASHCORE_CPU, 0}, nullptr, &found, nullptr, &error),
            FLASHCORE_OK);
  EXPECT_EQ(found, 0u);
  EXPECT_EQ(flashcore_capture_id({FLASHCORE_CPU, 0}, nullptr, nullptr, nullptr, &error),
            FLASHCORE_INVALID_ARGUMENT);
  EXPECT_EQ(flashcore_capture_id({9, 0}, nullptr, &found, nullptr, &error), FLASHCORE_UNSUPPORTED);
}

}  // namespace
}  // namespace flashcore::test
