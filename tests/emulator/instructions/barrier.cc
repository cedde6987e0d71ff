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

/// The number of threads that an instruction names; 0: all.
std::uint32_t expected_by(Warp& w, const Instruction& i, std::uint32_t mask) {
  return i.op_count > 1 ? w.in<std::uint32_t>(i.ops[1])[__builtin_ctz(mask)] : 0;
}

NamedBarrier& arrive_at(Warp& w, std::uint32_t expected, std::uint32_t id, std::uint32_t mask) {
  const int lane = __builtin_ctz(mask);
  if (id >= 16) w.fail("barrier " + std::to_string(id) + " does not exist", lane);
  NamedBarrier& barrier = w.cta().barriers[id];
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

/// The lanes arrive, for the search for races.
void release(Warp& w, const void* barrier, std::uint32_t mask) {
  if (Races* races = w.races()) {
    for_lanes(mask, [&](int lane) { races->arrive(barrier, w.thread_of(lane)); });
  }
}
void acquire(Warp& w, const void* barrier, std::uint32_t mask) {
  if (Races* races = w.races()) {
    for_lanes(mask, [&](int lane) { races->wait(barrier, w.thread_of(lane)); });
  }
}

void complete_if_full(Cta& cta, NamedBarrier& barrier) {
  if (barrier.arrived < (barrier.expected == 0 ? cta.live_threads() : barrier.expected)) return;
  barrier.arrived = 0;
  barrier.result = barrier.any;
  barrier.any = false;
  ++barrier.generation;
  if (cta.cluster->races != nullptr) cta.cluster->races->complete(&barrier);
}

/// Arrives and waits; `any`: the warp's part of bar.red.or.
Step sync_at(Warp& w, std::uint32_t expected, std::uint32_t id, std::uint32_t mask, bool any) {
  if (id < 16 && w.barrier_wait[id] != 0) {
    if (w.cta().barriers[id].generation + 1 == w.barrier_wait[id]) return Step::blocked;
    w.barrier_wait[id] = 0;
    acquire(w, &w.cta().barriers[id], mask);
    return Step::next;
  }
  NamedBarrier& barrier = arrive_at(w, expected, id, mask);
  release(w, &barrier, mask);
  barrier.any |= any;
  const std::uint32_t before = barrier.generation;
  complete_if_full(w.cta(), barrier);
  if (barrier.generation != before) {
    acquire(w, &barrier, mask);
    return Step::next;
  }
  w.barrier_wait[id] = before + 1;
  return Step::blocked;
}

Step sync(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!whole_warp(w, mask)) return Step::blocked;
  const std::uint32_t id = w.in<std::uint32_t>(i.ops[0])[__builtin_ctz(mask)];
  return sync_at(w, expected_by(w, i, mask), id, mask, false);
}

/// bar.red.or.pred d, id, p: of all threads of the CTA.
Step reduce_or(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!whole_warp(w, mask)) return Step::blocked;
  const std::uint32_t id = w.in<std::uint32_t>(i.ops[1])[__builtin_ctz(mask)];
  const bool negated = (i.aux & 1) != 0;
  const std::uint32_t p = (negated ? ~w.predicate(i.ops[2]) : w.predicate(i.ops[2])) & mask;
  const Step step = sync_at(w, 0, id, mask, p != 0);
  if (step != Step::next) return step;
  w.set_predicate(i.ops[0], mask, w.cta().barriers[id].result ? kFullMask : 0);
  return step;
}

Step arrive(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!whole_warp(w, mask)) return Step::blocked;
  const std::uint32_t id = w.in<std::uint32_t>(i.ops[0])[__builtin_ctz(mask)];
  NamedBarrier& barrier = arrive_at(w, expected_by(w, i, mask), id, mask);
  release(w, &barrier, mask);
  complete_if_full(w.cta(), barrier);
  return Step::next;
}

Step cluster_arrive(Warp& w, const Instruction&, std::uint32_t mask) {
  if (!whole_warp(w, mask)) return Step::blocked;
  ClusterState& cluster = *w.cta().cluster;
  if (w.cluster_arrived) w.fail("barrier.cluster.arrive without a wait for the last one");
  w.cluster_arrived = true;
  w.cluster_generation = cluster.generation;
  ++cluster.arrived;
  release(w, &cluster, mask);
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
    if (cluster.races != nullptr) cluster.races->complete(&cluster);
  }
  w.cluster_arrived = false;
  acquire(w, &cluster, mask);
  return Step::next;
}

}  // namespace

bool find_barrier(const Opcode& opcode, Recipe& recipe) {
  if (opcode.base() != "bar" && opcode.base() != "barrier") return false;
  recipe.immediate_bytes[0] = recipe.immediate_bytes[1] = 4;
  if (opcode.has("cluster")) {
    recipe.handler = opcode.has("arrive") ? cluster_arrive : cluster_wait;
  } else if (opcode.has("warp")) {
    return false;
  } else if (opcode.has("red")) {
    recipe.immediate_bytes[1] = 4;
    if (opcode.has("or")) recipe.handler = reduce_or;
  } else if (opcode.has("sync")) {
    recipe.handler = sync;
  } else if (opcode.has("arrive")) {
    recipe.handler = arrive;
  }
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
