// KV splits on GPUs: split-KV of decode, the cluster combine, and tail splits.
#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>

#include "core/cluster_buffer.h"
#include "plan/devices.h"

namespace flashcore {
namespace {

Plan planned(const DeviceInfo& device, std::int64_t batch, std::int64_t q_heads,
             std::int64_t kv_heads, std::int64_t q_len, std::int64_t keys, std::int64_t dim,
             const Options& options = {}) {
  return *make_plan(*dense_problem(DType::bf16, batch, q_heads, kv_heads, q_len, keys, dim, dim,
                                   options, device.device),
                    device);
}

// The tiles of a last partial wave are split along the keys if that is faster.
TEST(PlannerSplits, HopperSplitsTheTailIfSmsWouldBeIdle) {
  const DeviceInfo device = *named_device("h200");
  const auto prefill = [&](std::int64_t batch, std::int64_t q_heads, std::int64_t kv_heads,
                           std::int64_t length, std::int64_t dim, const Options& options) {
    return planned(device, batch, q_heads, kv_heads, length, length, dim, options);
  };
  const Plan few = prefill(1, 4, 4, 2048, 128, {});
  EXPECT_EQ(few.num_tiles, 64);
  EXPECT_EQ(few.tail_tiles, 64);
  EXPECT_GE(few.tail_splits, 2);
  EXPECT_EQ(few.keys_per_tail_split % few.tile_k, 0);
  EXPECT_GE(
      few.workspace_bytes,
      few.partial_out_offset + static_cast<std::size_t>(64 * few.tail_splits) * 128 * 130 * 4);
  const Plan many = prefill(4, 32, 8, 4096, 128, {});
  EXPECT_EQ(many.tail_tiles, 4096 % device.sm_count);
  EXPECT_GT(many.tail_splits, 2);

  EXPECT_EQ(prefill(1, 4, 4, 2048, 128, {.causal = true}).tail_tiles, 0)
      << "tiles differ in length";
  EXPECT_EQ(prefill(1, 132, 132, 128, 128, {}).tail_tiles, 0) << "no SM is idle";
  EXPECT_EQ(prefill(1, 4, 4, 2048, 64, {}).tail_tiles, 0) << "d64 has no tail splits";
  const Options invariant{.reproducibility = Reproducibility::batch_invariant};
  EXPECT_EQ(prefill(1, 4, 4, 2048, 128, invariant).tail_tiles, 0);
}

// A batch-invariant call has ranges of one length, from the kernel alone. They are on several CTAs
// where SMs would be idle.
TEST(PlannerSplits, BatchInvariantCallsHaveKeyRangesOfOneLength) {
  const DeviceInfo device = *named_device("h200");
  const Options invariant{.reproducibility = Reproducibility::batch_invariant};
  const Plan alone = planned(device, 1, 32, 8, 1, 8192, 128, invariant);
  EXPECT_STREQ(alone.kernel->id, "fwd_sm90_bf16_d128_q64_k160");
  EXPECT_EQ(alone.keys_per_range, 1920);
  EXPECT_EQ(alone.key_ranges, 5);
  EXPECT_TRUE(alone.ranges_apart);
  EXPECT_EQ(alone.num_tiles, 8);
  EXPECT_EQ(alone.splits, 1);
  EXPECT_TRUE(uses_header(alone));
  const std::size_t partial = 64 * 130 * 4;
  EXPECT_GE(alone.workspace_bytes, alone.partial_out_offset + 8 * 5 * partial);

  for (const std::int64_t batch : {1, 16, 500}) {
    for (const std::int64_t q_len : {1, 33, 3000}) {
      for (const std::int64_t keys : {1, 1920, 1921, 100000}) {
        const Plan plan = planned(device, batch, 32, 8, q_len, keys, 128, invariant);
        SCOPED_TRACE(testing::Message() << batch << ' ' << q_len << ' ' << keys);
        EXPECT_EQ(plan.keys_per_range, 1920);
        EXPECT_EQ(plan.key_ranges, (keys + 1919) / 1920);
        EXPECT_EQ(plan.tail_tiles, 0);
        if (plan.key_ranges == 1) {
          EXPECT_EQ(plan.workspace_bytes, kWorkspaceHeaderBytes);
          EXPECT_FALSE(plan.ranges_apart);
        }
        const std::size_t most = static_cast<std::size_t>(8 * device.sm_count) * 2 * partial;
        EXPECT_LE(plan.workspace_bytes, kWorkspaceHeaderBytes + most) << "of any batch";
      }
    }
  }
  // In sequence each CTA keeps one result.
  const Plan many = planned(device, 4, 32, 8, 4096, 4096, 128, invariant);
  EXPECT_STREQ(many.kernel->id, "fwd_sm90_bf16_d128_k160");
  EXPECT_FALSE(many.ranges_apart);
  EXPECT_EQ(many.workspace_bytes,
            many.partial_out_offset + static_cast<std::size_t>(device.sm_count) * 2 * partial);

  EXPECT_EQ(planned(device, 1, 32, 8, 1, 8192, 64, invariant).key_ranges, 1) << "d64 has no ranges";
  EXPECT_EQ(planned(device, 1, 32, 8, 1, 8192, 128).key_ranges, 1) << "may depend on the batch";
}

TEST(PlannerSplits, OnlyBatchInvariantCallsTakeTheKernelOfFewRows) {
  const DeviceInfo device = *named_device("h200");
  const auto takes_it = [&](std::int64_t q_len, const Options& options) {
    const Plan plan = planned(device, 1, 32, 8, q_len, 8192, 128, options);
    return std::string_view(plan.kernel->id) == "fwd_sm90_bf16_d128_q64_k160";
  };
  for (const std::int64_t q_len : {1, 8, 10, 16, 64, 4096}) {
    EXPECT_FALSE(takes_it(q_len, {})) << q_len;
    EXPECT_EQ(takes_it(q_len, {.reproducibility = Reproducibility::batch_invariant}), q_len <= 64)
        << q_len;
  }
}

// The planner uses 8-row tiles for at most 8 rows, and only if a cluster combines the splits.
TEST(PlannerSplits, SwapAbTilesAreForClusters) {
  const auto rows_in_tile = [](const char* device, std::int64_t batch, std::int64_t group,
                               std::int64_t q_len, std::int64_t dim, std::int64_t keys = 8192) {
    const Plan plan = planned(*named_device(device), batch, 32 * group, 32, q_len, keys, dim);
    EXPECT_EQ(plan.tile_q == 8 && plan.combine != CombineMode::cluster, false);
    return plan.tile_q;
  };
  for (const std::int64_t dim : {40, 64, 100, 128}) {
    EXPECT_EQ(rows_in_tile("h200", 1, 1, 1, dim), 8) << dim;
    EXPECT_EQ(rows_in_tile("h200", 1, 4, 2, dim), 8) << dim;
    EXPECT_EQ(rows_in_tile("h200", 1, 3, 3, dim), 16) << dim;
    EXPECT_EQ(rows_in_tile("h200", 64, 1, 1, dim), 16) << dim;
    EXPECT_EQ(rows_in_tile("a100", 1, 1, 1, dim), 16) << dim;
  }
  EXPECT_EQ(rows_in_tile("h200", 1, 1, 1, 64, 512), 8);
}

// Later GPUs run the sm_80 PTX, which has no clusters.
TEST(PlannerSplits, OnlyHopperCombinesInClusters) {
  DeviceInfo device = *named_device("h200");
  const auto combines_in_cluster = [&] {
    return planned(device, 1, 32, 32, 1, 8192, 64).combine == CombineMode::cluster;
  };
  EXPECT_TRUE(combines_in_cluster());
  for (const int other : {80, 89, 100, 103, 120}) {
    device.compute_capability = other;
    EXPECT_FALSE(combines_in_cluster()) << other;
  }
}

// Three CTAs per SM were slower (docs/performance.md), perhaps because other SMs then have none.
TEST(PlannerSplits, TwoSwapAbCtasShareAnSm) {
  const DeviceInfo device = *named_device("h200");
  int found = 0;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.tile_q != 8) continue;
    const int bytes = kernel.smem_bytes +
                      core::ClusterBuffer::bytes(kernel.tile_q, kernel.head_dim, kernel.threads) +
                      1024;
    EXPECT_EQ(device.smem_per_sm_bytes / bytes, 2) << kernel.id;
    ++found;
  }
  EXPECT_EQ(found, 4);
}

// With more CTAs than SMs, clusters use 70 to 90 % of all CTA slots. With more free slots, the next
// call would put two CTAs on one SM.
TEST(PlannerSplits, ClustersShareSmsOnlyIfTheyFillMostSlots) {
  const DeviceInfo device = *named_device("h200");
  for (const std::int64_t batch : {1, 2, 3, 4, 8, 16}) {
    for (const std::int64_t heads : {1, 8, 32}) {
      for (const std::int64_t keys : {1024, 4096, 8192, 65536}) {
        const Plan plan = planned(device, batch, heads, heads, 1, keys, 64);
        if (plan.combine != CombineMode::cluster) continue;
        const std::int64_t ctas = batch * heads * plan.splits;
        if (ctas <= device.sm_count) continue;
        const KernelInfo& kernel = *plan.kernel;
        // A CTA of a cluster also has the cluster buffer.
        const int bytes = kernel.smem_bytes + core::ClusterBuffer::bytes(
                                                  kernel.tile_q, kernel.head_dim, kernel.threads);
        const std::int64_t slots =
            device.sm_count *
            std::min(kernel.blocks_per_sm, device.smem_per_sm_bytes / (bytes + 1024));
        EXPECT_GE(10 * ctas, 7 * slots) << batch << " x " << heads << " heads, " << keys;
        EXPECT_LE(10 * ctas, 9 * slots) << batch << " x " << heads << " heads, " << keys;
      }
    }
  }
}

// The fastest measured splits (docs/performance.md). Positive: combined in a cluster.
TEST(PlannerSplits, OfShortDecodeAreTheFastestMeasured) {
  const auto in_cluster = [](std::int64_t batch, std::int64_t q_heads, std::int64_t kv_heads,
                             std::int64_t keys, std::int64_t dim) {
    const Plan plan = planned(*named_device("h200"), batch, q_heads, kv_heads, 1, keys, dim);
    return plan.combine == CombineMode::cluster ? plan.splits : -plan.splits;
  };
  EXPECT_EQ(in_cluster(4, 32, 8, 4096, 128), 7);
  EXPECT_EQ(in_cluster(1, 32, 32, 8192, 64), 7);
  EXPECT_EQ(in_cluster(4, 32, 8, 2048, 128), 6);
  EXPECT_EQ(in_cluster(5, 32, 8, 4096, 128), 5);
  EXPECT_EQ(in_cluster(4, 32, 8, 16384, 128), 7);
  EXPECT_EQ(in_cluster(1, 32, 8, 1024, 128), 8);
  EXPECT_EQ(in_cluster(1, 32, 32, 512, 64), 2);
  EXPECT_EQ(in_cluster(8, 32, 8, 4096, 128), -2);
  EXPECT_EQ(in_cluster(1, 32, 8, 8192, 128), -16);
  EXPECT_EQ(in_cluster(1, 32, 32, 65536, 64), -8);
  EXPECT_EQ(in_cluster(1, 32, 8, 65536, 128), -16);
  EXPECT_EQ(in_cluster(2, 64, 8, 16384, 128), -8) << "5 splits in a cluster are 4 us slower";
  EXPECT_EQ(in_cluster(5, 40, 8, 16384, 64), 5) << "2 or 3 CTAs per SM are 15 us slower";
}

// The combine by the last CTA takes longer than most loads of a short split, and its time grows
// with the rows. Fewer splits in a cluster, or one split, take 0.4 to 0.95 of that time.
TEST(PlannerSplits, ShortSplitsDoNotUseTheLastCtaCombine) {
  const auto splits = [](DType dtype, std::int64_t batch, std::int64_t q_heads,
                         std::int64_t kv_heads, std::int64_t keys, std::int64_t dim) {
    const DeviceInfo device = *named_device("h200");
    const Plan plan = *make_plan(
        *dense_problem(dtype, batch, q_heads, kv_heads, 1, keys, dim, dim, {}, device.device),
        device);
    EXPECT_EQ(plan.combine, plan.splits > 1 ? CombineMode::cluster : CombineMode::none)
        << plan.kernel->id;
    return plan.splits;
  };
  EXPECT_EQ(splits(DType::bf16, 1, 16, 1, 4096, 64), 8);
  EXPECT_EQ(splits(DType::bf16, 2, 16, 1, 8192, 64), 8);
  EXPECT_EQ(splits(DType::bf16, 1, 64, 8, 4096, 64), 8);
  EXPECT_EQ(splits(DType::bf16, 2, 8, 8, 2048, 64), 4);
  EXPECT_EQ(splits(DType::bf16, 4, 16, 16, 512, 64), 1);
  EXPECT_EQ(splits(DType::bf16, 1, 16, 16, 2048, 128), 4);
  EXPECT_EQ(splits(DType::bf16, 4, 64, 8, 512, 192), 3);
  EXPECT_EQ(splits(DType::e4m3, 4, 16, 1, 4096, 128), 8);
}

// If lengths are known at run time only, all splits have one length, so that several CTAs share a
// long sequence. The tile has 16 rows: larger ones would be mostly padding.
TEST(PlannerSplits, OfUnknownLengthsHaveOneLength) {
  const DeviceInfo device = *named_device("h200");
  Problem ragged = *dense_problem(DType::bf16, 64, 32, 8, 1, 32768, 128, 128, {}, device.device);
  ragged.seqused_k.dtype = DType::i32;
  ragged.seqused_k.batch = 1;
  const Result<Plan> plan = make_plan(ragged, device);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->tile_q, 16);
  EXPECT_EQ(plan->keys_per_split, 1024);
  EXPECT_EQ(plan->combine, CombineMode::last_cta);
}

}  // namespace
}  // namespace flashcore
