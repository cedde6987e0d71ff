// A launched grid: its CTAs, their shared memory and barriers, and the asynchronous work in flight.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulator/machine/races.h"
#include "emulator/machine/warp.h"

namespace flashcore::emulator {

struct Dim {
  std::uint32_t x = 1, y = 1, z = 1;
  std::uint64_t count() const { return std::uint64_t{x} * y * z; }
};

struct Grid;

/// One of a CTA's 16 barriers: bar.sync, bar.arrive.
struct NamedBarrier {
  std::uint32_t arrived = 0, expected = 0, generation = 0;
  bool any = false, result = false;  // of bar.red.or: the present phase, the last one
};

/// barrier.cluster of the CTAs of a cluster.
struct ClusterState {
  std::vector<struct Cta*> ctas;
  int live_ctas = 0;
  std::uint32_t arrived = 0, generation = 0;
  std::unique_ptr<Races> races;  // null: not searched for
};

struct Cta {
  Cta(Grid& grid, std::uint64_t index, std::shared_ptr<ClusterState> cluster, std::uint32_t rank);
  ~Cta();
  Cta(const Cta&) = delete;
  Cta& operator=(const Cta&) = delete;

  /// Host address of shared memory, of this CTA or another one of its cluster.
  std::uint8_t* shared_at(std::uint64_t address, int bytes, const Warp& warp, int lane);
  /// Threads in warps that have not exited, whole warps.
  std::uint32_t live_threads() const;
  void on_warp_exit();
  bool done() const { return live_warps == 0; }

  Grid* grid;
  std::uint64_t index;
  Dim id;
  std::shared_ptr<ClusterState> cluster;
  std::uint32_t rank;
  int live_warps = 0;
  std::array<NamedBarrier, 16> barriers;
  std::vector<std::uint8_t> shared;
  std::vector<std::unique_ptr<Warp>> warps;
};

/// What differs between runs of one kernel without changing what it may compute.
struct Schedule {
  std::uint64_t seed = 0;  // 0: fixed order, asynchronous work as late as possible
  int resident_ctas = 4;
  bool find_races = false;
};

struct Grid {
  const Program* program = nullptr;
  Dim dim, block, cluster;
  std::size_t dynamic_shared_bytes = 0;
  int compute_capability = 90;  // its tensor cores add with different widths
  std::vector<std::uint8_t> params;
  Schedule schedule;

  /// Runs the grid. Returns an empty string, or a report of the fault.
  std::string run();

  /// Work that completes later: a TMA copy, an asynchronous store.
  void later(std::function<void()> work) { async.push_back(std::move(work)); }

  /// Register files and shared memory are used again, because fresh memory is slow.
  std::vector<std::uint8_t> take_buffer(std::size_t bytes);
  void return_buffer(std::vector<std::uint8_t> buffer);

 private:
  void add_clusters();
  bool deliver_one();
  static bool cluster_is_done(const std::unique_ptr<Cta>& cta);
  void finish_done_clusters();
  std::string report(const Cta& cta, const Warp& warp, const Fault& fault) const;
  std::string report_deadlock() const;
  /// The first race in a resident CTA, or an empty string.
  std::string report_race() const;

  std::deque<std::function<void()>> async;
  std::vector<std::unique_ptr<Cta>> resident;
  std::uint64_t next_cta = 0;
  std::mt19937_64 random;
};

}  // namespace flashcore::emulator
