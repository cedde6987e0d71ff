// The barriers of a CTA (bar, barrier) and of a cluster (barrier.cluster). Warps arrive as a whole.
#include <cstdint>
#include <string>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"
#include "emulator/machine/grid.h"

namespace flashcore::emulator {
namespace {

/// All lanes of the warp must execute an aligned instruction together.
bool whole_warp(const Warp& w, std::uint32_t mask) { return w.converged(mask, w.live()); }

NamedBarrier& arrive_at(Warp& w, const Instruction& i, std::uint32_t id, std::uint32_t mask) {
  const int lane = __builtin_ctz(mask);
  if (id >= 16) w.fail("barrier " + std::to_string(id) + " does not exist", lane);
  NamedBarrier& barrier = w.cta().barriers[id];
  const std::uint32_t expected = i.op_count > 1 ? w.in<std::uint32_t>(i.ops[1])[lane] : 0;
  if (expected % kLanes != 0) w.fail("the threads of a barrier are not whole warps", lane);
  if (barrier.arrived != 0 && barrier.expected != expected) {
    w.fail("barrier " + std::to_string(id) + " expects " + std::to_string(barrier.expected) +
               " threads, but this warp " + std::to_string(expected),
           lane);
  }
  barrier.expected = expected;
  barrier.arrived += kLanes;
  const std::uint32_t wanted = expected == 0 ? w.cta().live_threads() : expected;
  if (barrier.arrived > wanted) w.fail("more threads at a barrier than it expects", lane);
  return barrier;
}

void complete_if_full(Cta& cta, NamedBarrier& barrier) {
  if (barrier.arrived < (barrier.expected == 0 ? cta.live_threads() : barrier.expected)) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

Step sync(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!whole_warp(w, mask)) return Step::blocked;
  const std::uint32_t id = w.in<std::uint32_t>(i.ops[0])[__builtin_ctz(mask)];
  if (id < 16 && w.barrier_wait[id] != 0) {
    if (w.cta().barriers[id].generation + 1 == w.barrier_wait[id]) return Step::blocked;
    w.barrier_wait[id] = 0;
    return Step::next;
  }
  NamedBarrier& barrier = arrive_at(w, i, id, mask);
  const std::uint32_t before = barrier.generation;
  complete_if_full(w.cta(), barrier);
  if (barrier.generation != before) return Step::next;
  w.barrier_wait[id] = before + 1;
  return Step::blocked;
}

Step arrive(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!whole_warp(w, mask)) return Step::blocked;
  complete_if_full(w.cta(),
                   arrive_at(w, i, w.in<std::uint32_t>(i.ops[0])[__builtin_ctz(mask)], mask));
  return Step::next;
}

Step cluster_arrive(Warp& w, const Instruction&, std::uint32_t mask) {
  if (!whole_warp(w, mask)) return Step::blocked;
  ClusterState& cluster = *w.cta().cluster;
  if (w.cluster_arrived) w.fail("barrier.cluster.arrive without a wait for the last one");
  w.cluster_arrived = true;
  w.cluster_generation = cluster.generation;
  ++cluster.arrived;
  return Step::next;
}

Step cluster_wait(Warp& w, const Instruction&, std::uint32_t mask) {
  if (!whole_warp(w, mask)) return Step::blocked;
  ClusterState& cluster = *w.cta().cluster;
  if (!w.cluster_arrived) w.fail("barrier.cluster.wait without an arrive");
  if (cluster.generation == w.cluster_generation) {
    // Warps that have exited count as arrived.
    std::uint32_t live = 0;
    for (const Cta* cta : cluster.ctas) live += static_cast<std::uint32_t>(cta->live_warps);
    if (cluster.arrived < live) return Step::blocked;
    cluster.arrived = 0;
    ++cluster.generation;
  }
  w.cluster_arrived = false;
  return Step::next;
}

}  // namespace

bool find_barrier(const Opcode& opcode, Recipe& recipe) {
  if (opcode.base() != "bar" && opcode.base() != "barrier") return false;
  recipe.immediate_bytes[0] = recipe.immediate_bytes[1] = 4;
  if (opcode.has("cluster")) {
    recipe.handler = opcode.has("arrive") ? cluster_arrive : cluster_wait;
  } else if (opcode.has("warp") || opcode.has("red")) {
    return false;
  } else if (opcode.has("sync")) {
    recipe.handler = sync;
  } else if (opcode.has("arrive")) {
    recipe.handler = arrive;
  }
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
