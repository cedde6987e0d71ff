// The synchronization of the sm90 kernels, as a model on the CPU. No interleaving of the roles may
// deadlock, read a tile before it is loaded, overwrite a tile in use, or write a row twice or not
// at all.
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "flashcore/plan.h"
#include "sm90_cta.h"
#include "support/rounds.h"

namespace flashcore::protocol {
namespace {

/// The shape of a kernel, and a function that runs a random problem on its model.
struct Model {
  core::Sm90Traits shape;
  std::function<void(std::uint64_t seed, InjectedFault fault, int uncounted)> run;

  bool has_several_producers() const { return shape.page_producers() > 1; }
  bool has_several_warpgroups() const { return shape.consumers() > 1; }
  bool has_ping_pong() const {
    return core::schedule_for(shape.is_fp8(), shape.head_dim, shape.tile_q, shape.tile_k).ping_pong;
  }
};

template <core::Sm90Traits kShape>
void draw_and_run(std::uint64_t seed, InjectedFault fault, int uncounted) {
  const ModelProblem problem = draw_problem(kShape, seed);
  try {
    run_model<kShape>(problem, fault, seed, problem.producers > 1 ? uncounted : 0);
  } catch (const Violation& violation) {
    throw Violation{violation.message + "\nseed " + std::to_string(seed) + ", " +
                    to_string(problem)};
  }
}

/// Adds a row of kernels.def if it is an sm90 kernel of the forward.
template <Operation kOp, Family kFamily, int... kShape>
void add_kernel(std::map<std::string, Model>& models) {
  if constexpr (kOp == Operation::fwd && kFamily == Family::sm90) {
    constexpr core::Sm90Traits kTraits{kShape...};
    models[std::string(kTraits.is_fp8() ? "e4m3_" : "") + "d" + std::to_string(kTraits.head_dim) +
           "_q" + std::to_string(kTraits.tile_q) + "_k" + std::to_string(kTraits.tile_k)] = {
        kTraits, draw_and_run<kTraits>};
  }
}

/// The shapes of all sm90 kernels. f16 and bf16 share them.
const std::map<std::string, Model>& models() {
  static const std::map<std::string, Model> models = [] {
    std::map<std::string, Model> found;
#define FLASHCORE_KERNEL(id, op, family, inputs, dtype, head_dim, v_dim, tile_q, tile_k, stages, \
                         warp_rows, threads, smem, code)                                         \
  add_kernel<Operation::op, Family::family, head_dim, tile_q, tile_k, stages,                    \
             Inputs::inputs == Inputs::fp8 ? 1 : 2>(found);
#include "cuda/kernels.def"
    return found;
  }();
  return models;
}

const auto kProblems = static_cast<std::uint64_t>(test::rounds(150));  // for each shape
constexpr std::uint64_t kFaultProblems = 100;  // one of them must show a fault

TEST(Sm90Protocol, EveryInterleavingEndsWithEveryRowWrittenOnce) {
  EXPECT_GE(models().size(), 15u);
  for (const auto& [name, model] : models()) {
    for (std::uint64_t seed = 0; seed < kProblems; ++seed) {
      try {
        model.run(seed, InjectedFault::none, 0);
      } catch (const Violation& violation) {
        FAIL() << name << ": " << violation.message;
      }
    }
  }
}

/// The violation of the first problem that shows a fault, or an empty text.
std::string find_fault(const Model& model, InjectedFault fault, int uncounted) {
  for (std::uint64_t seed = 0; seed < kFaultProblems; ++seed) {
    try {
      model.run(seed, fault, uncounted);
    } catch (const Violation& violation) {
      return violation.message;
    }
  }
  return "";
}

/// Expects a violation in every shape for which has(model) is true. Prints the first violation.
void expect_found(InjectedFault fault, const std::function<bool(const Model&)>& has,
                  int uncounted = 0) {
  int shapes = 0;
  for (const auto& [name, model] : models()) {
    if (!has(model)) continue;
    const std::string found = find_fault(model, fault, uncounted);
    EXPECT_NE(found, "") << name;
    if (shapes++ == 0) std::printf("%s: %s\n", name.c_str(), found.c_str());
  }
  EXPECT_GE(shapes, 3);
}

bool any(const Model&) { return true; }

TEST(Sm90Protocol, FindsAMissingArrival) {
  expect_found(InjectedFault::arrival_missing, &Model::has_several_warpgroups);
}
TEST(Sm90Protocol, FindsAWrongExpectedCount) { expect_found(InjectedFault::arrivals_too_few, any); }
TEST(Sm90Protocol, FindsAWrongParity) { expect_found(InjectedFault::parity_wrong, any); }
TEST(Sm90Protocol, FindsASkippedPingPongTurn) {
  expect_found(InjectedFault::turn_skipped, &Model::has_ping_pong);
}
TEST(Sm90Protocol, FindsAStageReleasedTwice) {
  expect_found(InjectedFault::stage_released_twice, any);
}

TEST(Sm90Protocol, FindsAProducerThatNoBarrierExpects) {
  expect_found(InjectedFault::none, &Model::has_several_producers, 1);
}

// The hardware has 16 named barriers. __syncthreads uses barrier 0.
TEST(Sm90Protocol, NamedBarriersAreDistinct) {
  std::set<int> ids{0};
  for (int group = 0; group < core::kMaxConsumers; ++group) {
    EXPECT_TRUE(ids.insert(static_cast<int>(core::ping_pong_barrier(group))).second);
    EXPECT_TRUE(ids.insert(static_cast<int>(core::v_tail_barrier(group))).second);
  }
  EXPECT_LT(*ids.rbegin(), 16);
}

}  // namespace
}  // namespace flashcore::protocol
