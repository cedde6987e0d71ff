// Decoding with a KV cache: each step has one new query per sequence.
//
// The program plans once, for the capacity of the cache. seqused_k contains the current lengths in
// device memory. A plan does not depend on them, so the loop neither allocates nor plans.
#include <flashcore/attention.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace fc = flashcore;

namespace {

constexpr int kBatch = 2, kQueryHeads = 8, kHeads = 2, kDim = 64, kCapacity = 256;
constexpr int kPrompt[kBatch] = {100, 37};  // initial tokens of each sequence
constexpr int kSteps = 48;

/// Prints the message and exits. An engine would return the Status.
void require(const fc::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", fc::to_string(status.code()), status.message().c_str());
  std::exit(1);
}

/// A plan for these tensors on the CPU, and an initialised workspace.
struct Call {
  fc::Plan plan;
  fc::Workspace workspace;

  explicit Call(const fc::Tensors& tensors, const fc::Options& options) {
    const auto problem = fc::make_problem(tensors, options);
    require(problem.status());
    const auto made = fc::make_plan(*problem, *fc::device_info({}));
    require(made.status());
    plan = *made;
    workspace = {std::aligned_alloc(256, plan.workspace_bytes), plan.workspace_bytes};
    require(fc::workspace_init(workspace));
  }
  ~Call() { std::free(workspace.data); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(generator); });
  return values;
}

}  // namespace

int main() {
  // The values that a model would compute token by token: [batch, heads, capacity, dim].
  constexpr std::size_t kCacheSize = std::size_t{kBatch} * kHeads * kCapacity * kDim;
  const auto all_q = random_floats(std::size_t{kBatch} * kQueryHeads * kCapacity * kDim, 1);
  const auto all_k = random_floats(kCacheSize, 2), all_v = random_floats(kCacheSize, 3);

  // The cache is initially NaN: rows past seqused_k are never read.
  std::vector<float> k_cache(kCacheSize, NAN), v_cache(kCacheSize, NAN);
  std::vector<std::int32_t> used(kBatch, 0);
  const auto append = [&](int b) {  // writes the next row of every head
    for (int h = 0; h < kHeads; ++h) {
      const std::size_t row = (std::size_t{1} * (b * kHeads + h) * kCapacity + used[b]) * kDim;
      std::memcpy(&k_cache[row], &all_k[row], kDim * sizeof(float));
      std::memcpy(&v_cache[row], &all_v[row], kDim * sizeof(float));
    }
    ++used[b];
  };
  for (int b = 0; b < kBatch; ++b) {
    while (used[b] < kPrompt[b]) append(b);
  }

  std::vector<float> q(kBatch * kQueryHeads * kDim), out(q.size());
  const fc::Tensors step{
      .q = fc::view(q.data(), fc::DType::f32, {kBatch, kQueryHeads, 1, kDim}),
      .k = fc::view(k_cache.data(), fc::DType::f32, {kBatch, kHeads, kCapacity, kDim}),
      .v = fc::view(v_cache.data(), fc::DType::f32, {kBatch, kHeads, kCapacity, kDim}),
      .out = fc::view(out.data(), fc::DType::f32, {kBatch, kQueryHeads, 1, kDim}),
      .seqused_k = fc::view(used.data(), fc::DType::i32, {kBatch})};
  const Call decode(step, {.causal = true});

  // One causal prefill over all tokens. The decode steps must reproduce its rows.
  std::vector<float> whole(all_q.size());
  const fc::Tensors everything{
      .q = fc::view(all_q.data(), fc::DType::f32, {kBatch, kQueryHeads, kCapacity, kDim}),
      .k = fc::view(all_k.data(), fc::DType::f32, {kBatch, kHeads, kCapacity, kDim}),
      .v = fc::view(all_v.data(), fc::DType::f32, {kBatch, kHeads, kCapacity, kDim}),
      .out = fc::view(whole.data(), fc::DType::f32, {kBatch, kQueryHeads, kCapacity, kDim})};
  const Call prefill(everything, {.causal = true});
  require(fc::run(prefill.plan, everything, prefill.workspace));

  float largest = 0;
  for (int i = 0; i < kSteps; ++i) {
    for (int b = 0; b < kBatch; ++b) {
      append(b);
      for (int h = 0; h < kQueryHeads; ++h) {
        const int row = (b * kQueryHeads + h) * kCapacity + used[b] - 1;
        std::memcpy(&q[(b * kQueryHeads + h) * kDim], &all_q[std::size_t{1} * row * kDim],
                    kDim * sizeof(float));
      }
    }
    require(fc::run(decode.plan, step, decode.workspace));
    for (int b = 0; b < kBatch; ++b) {
      for (int h = 0; h < kQueryHeads; ++h) {
        const int row = (b * kQueryHeads + h) * kCapacity + used[b] - 1;
        for (int d = 0; d < kDim; ++d) {
          const float got = out[(b * kQueryHeads + h) * kDim + d];
          const float difference = std::abs(got - whole[std::size_t{1} * row * kDim + d]);
          // NaN counts as a difference.
          if (!(difference <= largest)) largest = difference;
        }
      }
    }
  }
  std::printf("%s, %d splits: %d steps, sequences now %d and %d keys long\n",
              decode.plan.kernel->id, decode.plan.splits, kSteps, used[0], used[1]);
  std::printf("largest difference to one causal prefill: %.1e\n", largest);
  return largest < 1e-5f ? 0 : 1;
}
