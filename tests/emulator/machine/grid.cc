#include "emulator/machine/grid.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

namespace flashcore::emulator {
namespace {

constexpr int kSlice = 4096;  // instructions of a warp before another one runs
/// Passes over the resident CTAs after which asynchronous work completes although warps still run:
/// they may poll.
constexpr int kMaxPasses = 64;

thread_local std::vector<std::vector<std::uint8_t>> free_buffers;

}  // namespace

Cta::Cta(Grid& g, std::uint64_t linear, std::shared_ptr<ClusterState> c, std::uint32_t r)
    : grid(&g),
      index(linear),
      cluster(std::move(c)),
      rank(r),
      shared(g.take_buffer(g.program->shared_bytes + g.dynamic_shared_bytes)) {
  std::fill(shared.begin(), shared.end(), std::uint8_t{0xff});  // NaN in every format
  id.x = static_cast<std::uint32_t>(linear % g.dim.x);
  id.y = static_cast<std::uint32_t>(linear / g.dim.x % g.dim.y);
  id.z = static_cast<std::uint32_t>(linear / g.dim.x / g.dim.y);
  const auto threads = static_cast<int>(g.block.count());
  for (int first = 0; first < threads; first += kLanes) {
    const int lanes = std::min(kLanes, threads - first);
    const std::uint32_t mask = lanes == kLanes ? kFullMask : (1u << lanes) - 1;
    warps.push_back(std::make_unique<Warp>(*this, first / kLanes, mask));
  }
  live_warps = static_cast<int>(warps.size());
}

Cta::~Cta() { grid->return_buffer(std::move(shared)); }

std::uint8_t* Cta::shared_at(std::uint64_t address, int bytes, const Warp& warp, int lane) {
  const auto in_window = static_cast<std::uint32_t>(address);
  const std::uint32_t owner = in_window >> kRankShift;
  const std::uint32_t offset = (in_window & ((1u << kRankShift) - 1)) - kSharedBase;
  Cta* cta = this;
  if (owner != 0) {
    if (owner > cluster->ctas.size())
      warp.fail("shared address of a CTA outside the cluster", lane);
    cta = cluster->ctas[owner - 1];
    if (cta->done()) warp.fail("access of the shared memory of a CTA that has exited", lane);
  }
  if (offset > cta->shared.size() ||
      cta->shared.size() - offset < static_cast<std::size_t>(bytes)) {
    char text[128];
    std::snprintf(text, sizeof text, "access of %d bytes at 0x%x outside shared memory (%zu bytes)",
                  bytes, offset, cta->shared.size());
    warp.fail(text, lane);
  }
  return cta->shared.data() + offset;
}

std::uint32_t Cta::live_threads() const { return static_cast<std::uint32_t>(live_warps) * kLanes; }

void Cta::on_warp_exit() {
  if (--live_warps == 0) --cluster->live_ctas;
  // A barrier of the whole CTA no longer waits for the threads of this warp.
  for (NamedBarrier& barrier : barriers) {
    if (barrier.expected == 0 && barrier.arrived != 0 && barrier.arrived >= live_threads()) {
      barrier.arrived = 0;
      ++barrier.generation;
      if (cluster->races != nullptr) cluster->races->complete(&barrier);
    }
  }
}

std::vector<std::uint8_t> Grid::take_buffer(std::size_t bytes) {
  std::vector<std::uint8_t> buffer;
  if (!free_buffers.empty()) {
    buffer = std::move(free_buffers.back());
    free_buffers.pop_back();
  }
  buffer.resize(bytes);
  return buffer;
}

void Grid::return_buffer(std::vector<std::uint8_t> buffer) {
  constexpr std::size_t kMaxFree = 64;
  if (free_buffers.size() < kMaxFree) free_buffers.push_back(std::move(buffer));
}

void Grid::add_clusters() {
  const std::uint64_t in_cluster = cluster.count();
  const auto limit =
      std::max<std::uint64_t>(static_cast<std::uint64_t>(schedule.resident_ctas), in_cluster);
  while (next_cta < dim.count() && resident.size() + in_cluster <= limit) {
    auto state = std::make_shared<ClusterState>();
    if (schedule.find_races) {
      state->races =
          std::make_unique<Races>(static_cast<std::uint32_t>(in_cluster * block.count()));
    }
    for (std::uint64_t rank = 0; rank < in_cluster; ++rank) {
      resident.push_back(
          std::make_unique<Cta>(*this, next_cta++, state, static_cast<std::uint32_t>(rank)));
      state->ctas.push_back(resident.back().get());
      ++state->live_ctas;
      if (state->races != nullptr) {
        state->races->add_memory(resident.back()->shared.data(), resident.back()->shared.size());
      }
    }
  }
}

bool Grid::deliver_one() {
  if (async.empty()) return false;
  const std::size_t which = schedule.seed == 0 ? 0 : random() % async.size();
  const auto work = std::move(async[which]);
  async.erase(async.begin() + static_cast<std::ptrdiff_t>(which));
  work();
  return true;
}

/// CTAs of a cluster end together: others may still write to their shared memory.
bool Grid::cluster_is_done(const std::unique_ptr<Cta>& cta) { return cta->cluster->live_ctas == 0; }

void Grid::finish_done_clusters() {
  if (std::none_of(resident.begin(), resident.end(), cluster_is_done)) return;
  while (deliver_one()) {  // asynchronous work refers to CTAs
  }
}

std::string Grid::run() {
  random.seed(schedule.seed);
  int passes = 0;
  add_clusters();
  while (!resident.empty()) {
    bool progressed = false;
    std::vector<std::pair<Cta*, Warp*>> order;
    for (const auto& cta : resident) {
      for (const auto& warp : cta->warps) {
        if (!warp->done()) order.emplace_back(cta.get(), warp.get());
      }
    }
    if (schedule.seed != 0) std::shuffle(order.begin(), order.end(), random);
    for (const auto& [cta, warp] : order) {
      const int slice = schedule.seed == 0 ? kSlice : 1 + static_cast<int>(random() % 256);
      try {
        progressed |= warp->run(slice) != Warp::Result::blocked;
      } catch (const Fault& fault) {
        return report(*cta, *warp, fault);
      }
      if (schedule.seed != 0 && random() % 16 == 0) progressed |= deliver_one();
    }
    if (!progressed || ++passes >= kMaxPasses) {
      passes = 0;
      if (!deliver_one() && !progressed) return report_deadlock();
    }
    finish_done_clusters();
    if (schedule.find_races) {
      if (std::string race = report_race(); !race.empty()) return race;
    }
    std::erase_if(resident, cluster_is_done);
    add_clusters();
  }
  return {};
}

std::string Grid::report(const Cta& cta, const Warp& warp, const Fault& fault) const {
  char text[512];
  const int thread = warp.index() * kLanes + std::max(fault.lane, 0);
  std::snprintf(text, sizeof text,
                "%s\n  kernel %s\n  CTA %u,%u,%u %s %d, PTX line %d: ", fault.what.c_str(),
                program->name.substr(0, 300).c_str(), cta.id.x, cta.id.y, cta.id.z,
                fault.lane < 0 ? "from thread" : "thread", thread, warp.current().line);
  return text + program->opcodes[static_cast<std::size_t>(&warp.current() - program->code.data())];
}

std::string Grid::report_race() const {
  for (const auto& cta : resident) {
    const std::string& found = cta->cluster->races->found();
    if (!found.empty()) return found + "\n  kernel " + program->name;
  }
  return {};
}

std::string Grid::report_deadlock() const {
  std::string text = "deadlock: no warp can go on\n  kernel " + program->name;
  for (const auto& cta : resident) {
    text += "\n  CTA " + std::to_string(cta->id.x) + "," + std::to_string(cta->id.y) + "," +
            std::to_string(cta->id.z);
    for (const auto& warp : cta->warps) {
      if (!warp->done()) text += warp->describe();
    }
  }
  return text;
}

}  // namespace flashcore::emulator
