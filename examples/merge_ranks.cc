// One attention over keys on several ranks. Each rank computes a partial result over its own keys,
// and merge() merges them. Here a loop replaces the ranks. Real ranks would send partial results
// (an output and one number per query) instead of keys.
#include <flashcore/attention.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace fc = flashcore;

namespace {

constexpr int kHeads = 4, kQueries = 128, kKeys = 1000, kDim = 64;
constexpr int kRanks = 4, kKeysPerRank = kKeys / kRanks;

/// Prints the message and exits. An engine would return the Status.
void require(const fc::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", fc::to_string(status.code()), status.message().c_str());
  std::exit(1);
}

std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(generator); });
  return values;
}

/// Plans and runs one call. A real rank would reuse the plan and the workspace.
void attend(const fc::Tensors& tensors, const fc::Options& options) {
  const auto problem = fc::make_problem(tensors, options);
  require(problem.status());
  const auto plan = fc::make_plan(*problem, *fc::device_info({}));
  require(plan.status());
  const fc::Workspace workspace{std::aligned_alloc(256, plan->workspace_bytes),
                                plan->workspace_bytes};
  require(fc::workspace_init(workspace));
  require(fc::run(*plan, tensors, workspace));
  std::free(workspace.data);
}

/// Keys [first, first + count) of all heads, without copying: [1, heads, count, dim].
fc::TensorView some_keys(const std::vector<float>& data, int first, int count) {
  fc::TensorView view = fc::view(data.data(), fc::DType::f32, {1, kHeads, kKeys, kDim});
  view.data = static_cast<float*>(view.data) + first * kDim;
  view.shape[2] = count;
  return view;
}

}  // namespace

int main() {
  const auto q = random_floats(kHeads * kQueries * kDim, 1);
  const auto k = random_floats(kHeads * kKeys * kDim, 2);
  const auto v = random_floats(kHeads * kKeys * kDim, 3);
  const auto sinks = random_floats(kHeads, 4);
  const auto query = fc::view(q.data(), fc::DType::f32, {1, kHeads, kQueries, kDim});
  const auto sink = fc::view(sinks.data(), fc::DType::f32, {kHeads});

  // The causal mask needs positions across ranks: the queries are the last of the sequence, and
  // each rank passes the position of its first key.
  const std::int32_t q_start = kKeys - kQueries;
  std::vector<std::vector<float>> outs(kRanks), lses(kRanks);
  std::vector<fc::PartialResult> partials(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    outs[rank].resize(q.size());
    lses[rank].resize(kHeads * kQueries);
    partials[rank] = {
        .out = fc::view(outs[rank].data(), fc::DType::f32, {1, kHeads, kQueries, kDim}),
        .lse = fc::view(lses[rank].data(), fc::DType::f32, {1, kHeads, kQueries})};
    const std::int32_t k_start = rank * kKeysPerRank;
    attend({.q = query,
            .k = some_keys(k, k_start, kKeysPerRank),
            .v = some_keys(v, k_start, kKeysPerRank),
            .out = partials[rank].out,
            .lse = partials[rank].lse,
            .q_start = fc::view(&q_start, fc::DType::i32, {1}),
            .k_start = fc::view(&k_start, fc::DType::i32, {1})},
           {.causal = true, .partial = true});
  }
  // The last merge adds the sinks. Partial results have none.
  std::vector<float> merged(q.size());
  require(fc::merge(partials, fc::view(merged.data(), fc::DType::f32, {1, kHeads, kQueries, kDim}),
                    {}, sink));

  std::vector<float> whole(q.size());
  attend({.q = query,
          .k = some_keys(k, 0, kKeys),
          .v = some_keys(v, 0, kKeys),
          .out = fc::view(whole.data(), fc::DType::f32, {1, kHeads, kQueries, kDim}),
          .sinks = sink},
         {.causal = true});
  float largest = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const float difference = std::abs(merged[i] - whole[i]);
    if (!(difference <= largest)) largest = difference;  // NaN counts as a difference
  }
  std::printf("%d ranks of %d keys, merged: largest difference to one call %.1e\n", kRanks,
              kKeysPerRank, largest);
  return largest < 1e-5f ? 0 : 1;
}
