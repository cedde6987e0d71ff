// The combination of KV splits in the sm80 kernels, as a model on the CPU. No interleaving may
// deadlock, send to a closed buffer or an exited CTA, or read a missing value. Every row is
// combined exactly once.
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include "flashcore/plan.h"
#include "sm80_cluster.h"
#include "sm80_split.h"
#include "support/rounds.h"

namespace flashcore::protocol {
namespace {

ClusterProblem draw_cluster(const core::Sm80Traits& shape, verify::Random& random) {
  ClusterProblem problem{};
  problem.rows = static_cast<int>(random.between(1, shape.tile_q));
  problem.splits = static_cast<int>(random.between(2, core::ClusterBuffer::kMaxSplits));
  for (int i = 0; i < problem.splits; ++i) problem.has_tiles.push_back(random.chance(0.7));
  return problem;
}

SplitProblem draw_split(const core::Sm80Traits& shape, verify::Random& random) {
  SplitProblem problem{};
  problem.splits = static_cast<int>(random.between(2, random.chance(0.1) ? 64 : 8));
  problem.keys_per_split = shape.tile_k * static_cast<int>(random.between(1, 3));
  problem.is_varlen = random.chance(0.7);
  const std::int64_t tiles = problem.splits > 8 ? 1 : random.between(1, 3);
  for (std::int64_t i = 0; i < tiles; ++i) {
    const int rows = random.chance(0.1) ? 0 : static_cast<int>(random.between(1, shape.tile_q));
    std::int64_t kv_len = random.between(0, problem.splits * problem.keys_per_split);
    if (random.chance(0.3)) kv_len -= kv_len % problem.keys_per_split;  // whole splits
    if (!problem.is_varlen) kv_len = problem.splits * problem.keys_per_split;
    problem.tiles.push_back({rows, static_cast<int>(kv_len)});
  }
  return problem;
}

/// Throws Violation.
using Run = std::function<void(std::uint64_t seed, InjectedFault fault)>;

template <typename Problem>
void describe_violations(const Problem& problem, std::uint64_t seed,
                         const std::function<void()>& run) {
  try {
    run();
  } catch (const Violation& violation) {
    throw Violation{violation.message + "\nseed " + std::to_string(seed) + ", " +
                    problem.describe()};
  }
}

template <core::Sm80Traits kShape>
void draw_and_run_cluster(std::uint64_t seed, InjectedFault fault) {
  verify::Random random(seed);
  const ClusterProblem problem = draw_cluster(kShape, random);
  describe_violations(problem, seed, [&] { run_cluster<kShape>(problem, fault, seed); });
}

template <core::Sm80Traits kShape>
void draw_and_run_split(std::uint64_t seed, InjectedFault fault) {
  verify::Random random(seed);
  const SplitProblem problem = draw_split(kShape, random);
  describe_violations(problem, seed, [&] { run_split<kShape>(problem, fault, seed); });
}

struct Model {
  Run cluster;  // empty: the kernel does not combine in clusters
  Run split;
};

template <core::Sm80Traits kShape>
void add_model(std::map<std::string, Model>& models) {
  Model& model =
      models[std::string(kShape.key_bytes == 1 ? "8bit_" : "") + "d" +
             std::to_string(kShape.head_dim) + "_q" + std::to_string(kShape.tile_q) + "_k" +
             std::to_string(kShape.tile_k) + "_s" + std::to_string(kShape.stages)];
  if constexpr (kShape.warp_private_kv()) model.cluster = draw_and_run_cluster<kShape>;
  model.split = draw_and_run_split<kShape>;
}

/// Adds a row of kernels.def if it is an sm80 kernel.
template <Family kFamily, int... kShape>
void add_kernel(std::map<std::string, Model>& models) {
  if constexpr (kFamily == Family::sm80) add_model<core::Sm80Traits{kShape...}>(models);
}

/// The shapes of all sm80 kernels. f16 and bf16 share them.
const std::map<std::string, Model>& models() {
  static const std::map<std::string, Model> models = [] {
    std::map<std::string, Model> found;
#define FLASHCORE_KERNEL(id, op, family, inputs, dtype, head_dim, v_dim, tile_q, tile_k, stages, \
                         warp_rows, threads, smem, code)                                         \
  add_kernel<Family::family, head_dim, tile_q, tile_k, stages, warp_rows, threads,               \
             Inputs::inputs == Inputs::kv8 ? 1 : 2>(found);
#include "cuda/kernels.def"
    return found;
  }();
  return models;
}

const auto kProblems = static_cast<std::uint64_t>(test::rounds(150));  // for each shape
constexpr std::uint64_t kFaultProblems = 50;  // one of them must show a fault

/// Runs `part` of all models that have it. Returns the number of these models.
int run_all(Run Model::*part) {
  int shapes = 0;
  for (const auto& [name, model] : models()) {
    if (!(model.*part)) continue;
    ++shapes;
    for (std::uint64_t seed = 0; seed < kProblems; ++seed) {
      try {
        (model.*part)(seed, InjectedFault::none);
      } catch (const Violation& violation) {
        ADD_FAILURE() << name << ": " << violation.message;
        return shapes;
      }
    }
  }
  return shapes;
}

TEST(Sm80Combine, EveryInterleavingOfAClusterCombinesEveryVec4Once) {
  EXPECT_GE(run_all(&Model::cluster), 12);
}

TEST(Sm80Combine, LastCtaSeesAllResultsAndResetsCounters) { EXPECT_GE(run_all(&Model::split), 20); }

/// The violation of the first problem that shows a fault, or an empty text.
std::string find_fault(const Run& run, InjectedFault fault) {
  for (std::uint64_t seed = 0; seed < kFaultProblems; ++seed) {
    try {
      run(seed, fault);
    } catch (const Violation& violation) {
      return violation.message;
    }
  }
  return "";
}

/// Expects a violation in every shape. Prints the violation of the first one.
void expect_found(InjectedFault fault, Run Model::*part) {
  bool first = true;
  for (const auto& [name, model] : models()) {
    if (!(model.*part)) continue;
    const std::string found = find_fault(model.*part, fault);
    EXPECT_NE(found, "") << name;
    if (first) std::printf("%s: %s\n", name.c_str(), found.c_str());
    first = false;
  }
}

TEST(Sm80Combine, FindsTooFewExpectedBytes) {
  expect_found(InjectedFault::expected_bytes_short, &Model::cluster);
}
TEST(Sm80Combine, FindsASendToAClosedBuffer) {
  expect_found(InjectedFault::sent_before_open, &Model::cluster);
}
TEST(Sm80Combine, FindsAWrongLastCount) {
  expect_found(InjectedFault::counted_wrong, &Model::split);
}
TEST(Sm80Combine, FindsACounterThatIsNotReset) {
  expect_found(InjectedFault::counter_left, &Model::split);
}

}  // namespace
}  // namespace flashcore::protocol
