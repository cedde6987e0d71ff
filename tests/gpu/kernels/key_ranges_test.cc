// Key ranges of batch-invariant calls on Hopper (core/key_ranges.h). Short ranges give small
// problems several of them, one after the other in a CTA or on several CTAs.
#include <algorithm>
#include <cstring>

#include "gpu/support.h"
#include "plan/planner.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

constexpr Options kInvariant{.reproducibility = Reproducibility::batch_invariant};

/// Gives a plan ranges of `tiles` KV tiles.
void shorten_ranges(Plan& plan, std::int64_t tiles, bool apart) {
  plan.keys_per_range = tiles * plan.tile_k;
  const std::int64_t ranges = (plan.problem.kv_len + plan.keys_per_range - 1) / plan.keys_per_range;
  plan.key_ranges = static_cast<std::int32_t>(std::max<std::int64_t>(ranges, 1));
  plan.ranges_apart = apart && plan.key_ranges > 1;
  require(plan_workspace(plan));
}

bool has_ranges(const KernelInfo& kernel) {
  return has_key_ranges(
      kernel, require(dense_problem(kernel.dtype, 1, 1, 1, 64, 64, 128, 128, kInvariant, kGpu)));
}

class KeyRanges : public GpuTest {
 protected:
  /// body(kernel) for every kernel with key ranges.
  template <typename Body>
  static void for_each_kernel(Body body) {
    int tested = 0;
    for (const KernelInfo* kernel : runnable_kernels()) {
      if (!has_ranges(*kernel)) continue;
      SCOPED_TRACE(kernel->id);
      body(*kernel);
      if (HasFatalFailure()) return;
      ++tested;
    }
    if (tested == 0) GTEST_SKIP() << "this GPU has no kernel with key ranges";
  }
};

/// Runs a case twice in ranges, because the first run must reset the counters.
std::vector<std::byte> run_in_ranges(const verify::CaseMemory& memory, Plan plan,
                                     std::int64_t tiles, bool apart, std::int32_t sms) {
  plan.device.sm_count = std::min(sms, plan.device.sm_count);
  shorten_ranges(plan, tiles, apart);
  DeviceBuffer block(memory.bytes().size());
  const TestWorkspace workspace(plan.workspace_bytes);
  for (int repeat = 0; repeat < 2; ++repeat) {
    block.upload(memory.bytes().data(), memory.bytes().size());
    require(run(plan, memory.at(block.data(), kGpu), workspace.get()));
    expect_right(memory, block.download(), plan);
    EXPECT_TRUE(workspace.header_is_zero());
  }
  return block.download();
}

TEST_F(KeyRanges, RandomProblemsAreRightAndBothWaysGiveTheSameBits) {
  constexpr int kProblems = 25;  // per kernel
  for_each_kernel([](const KernelInfo& kernel) {
    const DeviceInfo device = require(device_info(kGpu));
    verify::Random random(8);
    int used = 0;
    for (std::uint64_t index = 0; used < kProblems; ++index) {
      ASSERT_LT(index, 40U * kProblems) << "only " << used << " problems have several ranges";
      verify::CaseLimits limits;
      limits.target_work = 4e6;
      verify::CaseSpec spec = verify::random_case(kernel, 12, index, limits);
      spec.options.kernel = kernel.id;
      spec.options.reproducibility = Reproducibility::batch_invariant;
      const verify::CaseMemory memory(spec);
      DeviceBuffer block(memory.bytes().size());
      const Problem problem =
          require(make_problem(memory.at(block.data(), kGpu), memory.spec().options));
      const Result<Plan> plan = make_plan(problem, device);
      const std::int64_t tiles = random.between(1, 3);
      if (!plan.ok() || plan->num_tiles == 0 || problem.kv_len <= tiles * plan->tile_k) continue;
      SCOPED_TRACE(testing::Message() << "problem " << index << ", ranges of " << tiles);
      const auto sms = static_cast<std::int32_t>(random.between(1, 2 * plan->num_tiles));
      EXPECT_EQ(run_in_ranges(memory, *plan, tiles, true, sms),
                run_in_ranges(memory, *plan, tiles, false, sms));
      if (HasFailure()) return;
      ++used;
    }
  });
}

/// Sequences of several lengths in one padded cache, random queries for the last rows of each.
class Server {
 public:
  static constexpr std::int64_t kQHeads = 4, kKvHeads = 2, kRows = 40, kCapacity = 1000, kDim = 128;

  explicit Server(DType dtype)
      : dtype_(dtype),
        q_(rows(kRows, kQHeads, 1)),
        k_(rows(kCapacity, kKvHeads, 2)),
        v_(rows(kCapacity, kKvHeads, 3)) {}

  /// One call for the sequences `order`: the rows [first, kRows) of each, which are its last ones.
  /// Returns the bits of out, [order, q_heads, rows, dim].
  std::vector<std::byte> attend(const KernelInfo& kernel, const std::vector<std::int64_t>& order,
                                std::int64_t first, bool apart) const {
    const DeviceBuffer q(gather(q_, order, kRows, kQHeads)),
        k(gather(k_, order, kCapacity, kKvHeads)), v(gather(v_, order, kCapacity, kKvHeads));
    const auto batch = static_cast<std::int64_t>(order.size());
    const std::int64_t count = kRows - first;
    std::vector<std::int32_t> used;
    for (const std::int64_t b : order) used.push_back(kLengths[b]);
    DeviceBuffer lengths(used.size() * 4),
        out(static_cast<std::size_t>(batch * count) * row_bytes(kQHeads));
    lengths.upload(used.data(), used.size() * 4);
    TensorView queries = view(q.data(), dtype_, {batch, kQHeads, kRows, kDim}, kGpu);
    queries.data = static_cast<std::byte*>(queries.data) + first * queries.strides[2] * 2;
    queries.shape[2] = count;
    const Tensors tensors{.q = queries,
                          .k = view(k.data(), dtype_, {batch, kKvHeads, kCapacity, kDim}, kGpu),
                          .v = view(v.data(), dtype_, {batch, kKvHeads, kCapacity, kDim}, kGpu),
                          .out = view(out.data(), dtype_, {batch, kQHeads, count, kDim}, kGpu),
                          .seqused_k = view(lengths.data(), DType::i32, {batch}, kGpu)};
    Options options = kInvariant;
    options.causal = true;
    options.kernel = kernel.id;
    Plan plan = plan_for(tensors, options);
    shorten_ranges(plan, 1, apart);
    const TestWorkspace workspace(plan.workspace_bytes);
    require(run(plan, tensors, workspace.get()));
    return out.download();
  }

  /// The last row of each head of result `i` of a call with `count` rows.
  static std::vector<std::byte> last_rows(const std::vector<std::byte>& out, std::int64_t i,
                                          std::int64_t count) {
    std::vector<std::byte> found;
    for (std::int64_t h = 0; h < kQHeads; ++h) {
      const auto at = out.begin() + (((i * kQHeads + h) + 1) * count - 1) * kDim * 2;
      found.insert(found.end(), at, at + kDim * 2);
    }
    return found;
  }

  static constexpr std::int32_t kLengths[] = {700, 161, 160, 320, 1, 999};
  static constexpr std::int64_t kSequences = 6;

 private:
  static std::size_t row_bytes(std::int64_t heads) {
    return static_cast<std::size_t>(heads * kDim * 2);
  }

  std::vector<std::byte> rows(std::int64_t length, std::int64_t heads, std::uint64_t seed) const {
    verify::Random random(seed);
    std::vector<std::byte> made(static_cast<std::size_t>(kSequences * length) * row_bytes(heads));
    for (std::int64_t i = 0; i < kSequences * length * heads * kDim; ++i) {
      verify::store(made.data(), dtype_, i, random.normal());
    }
    return made;
  }

  static std::vector<std::byte> gather(const std::vector<std::byte>& rows,
                                       const std::vector<std::int64_t>& order, std::int64_t length,
                                       std::int64_t heads) {
    const auto bytes = length * static_cast<std::int64_t>(row_bytes(heads));
    std::vector<std::byte> all;
    for (const std::int64_t b : order) {
      all.insert(all.end(), rows.begin() + b * bytes, rows.begin() + (b + 1) * bytes);
    }
    return all;
  }

  DType dtype_;
  std::vector<std::byte> q_, k_, v_;  // [sequences, heads, length, dim]
};

TEST_F(KeyRanges, ARowsBitsDependOnItsOwnDataAlone) {
  for_each_kernel([](const KernelInfo& kernel) {
    const Server server(kernel.dtype);
    std::vector<std::int64_t> all(Server::kSequences);
    for (std::size_t b = 0; b < all.size(); ++b) all[b] = static_cast<std::int64_t>(b);
    const std::vector<std::byte> prefill = server.attend(kernel, all, 0, false);
    const std::vector<std::vector<std::int64_t>> batches = {
        all, {5, 4, 3, 2, 1, 0}, {0}, {1}, {2}, {3}, {4}, {5}, {5, 0, 5, 0, 0, 5, 1}};
    for (const std::vector<std::int64_t>& batch : batches) {
      for (const std::int64_t first : {std::int64_t{0}, Server::kRows - 5, Server::kRows - 1}) {
        for (const bool apart : {false, true}) {
          const std::vector<std::byte> out = server.attend(kernel, batch, first, apart);
          for (std::size_t i = 0; i < batch.size(); ++i) {
            ASSERT_EQ(Server::last_rows(out, static_cast<std::int64_t>(i), Server::kRows - first),
                      Server::last_rows(prefill, batch[i], Server::kRows))
                << "sequence " << batch[i] << " at " << i << " of " << batch.size()
                << ", rows from " << first << (apart ? ", apart" : ", in sequence");
          }
        }
      }
    }
  });
}

// The planner's choice for long sequences.
TEST_F(KeyRanges, PlannedRangesAreRightAndTheSameEveryTime) {
  const DeviceInfo device = require(device_info(kGpu));
  if (device.compute_capability != 90) GTEST_SKIP() << "key ranges need sm_90";
  const auto case_of = [](std::int64_t batch) {
    verify::CaseSpec spec = dense(DType::bf16, batch, 8, 2, 1, 5000, 128);
    spec.options = kInvariant;
    return spec;
  };
  const verify::CaseMemory one(case_of(1)), many(case_of(3));
  GpuCase alone(one), batch(many);
  EXPECT_GT(alone.plan().key_ranges, 1);
  EXPECT_TRUE(alone.plan().ranges_apart);
  expect_right(one, alone.direct(one, nullptr), alone.plan());
  const std::vector<std::byte> first = batch.direct(many, nullptr);
  expect_right(many, first, batch.plan());
  for (int repeat = 0; repeat < 20; ++repeat) ASSERT_EQ(batch.direct(many, nullptr), first);
  EXPECT_TRUE(batch.workspace().header_is_zero());
}

}  // namespace
}  // namespace flashcore::gpu_test
