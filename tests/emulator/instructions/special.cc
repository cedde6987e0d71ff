#include "emulator/instructions/special.h"

#include <chrono>

#include "emulator/instructions/rows.h"
#include "emulator/machine/grid.h"

namespace flashcore::emulator {
namespace {

struct Special {
  std::string_view name;
  std::uint64_t (*value)(Warp& warp, int lane);
};

std::uint32_t thread_index(const Warp& w, int lane) {
  return static_cast<std::uint32_t>(w.index() * kLanes + lane);
}
const Grid& grid(Warp& w) { return *w.cta().grid; }
std::uint64_t nanoseconds() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

constexpr Special kSpecials[] = {
    {"%tid.x",
     [](Warp& w, int lane) -> std::uint64_t { return thread_index(w, lane) % grid(w).block.x; }},
    {"%tid.y",
     [](Warp& w, int lane) -> std::uint64_t {
       return thread_index(w, lane) / grid(w).block.x % grid(w).block.y;
     }},
    {"%tid.z",
     [](Warp& w, int lane) -> std::uint64_t {
       return thread_index(w, lane) / grid(w).block.x / grid(w).block.y;
     }},
    {"%ntid.x", [](Warp& w, int) -> std::uint64_t { return grid(w).block.x; }},
    {"%ntid.y", [](Warp& w, int) -> std::uint64_t { return grid(w).block.y; }},
    {"%ntid.z", [](Warp& w, int) -> std::uint64_t { return grid(w).block.z; }},
    {"%ctaid.x", [](Warp& w, int) -> std::uint64_t { return w.cta().id.x; }},
    {"%ctaid.y", [](Warp& w, int) -> std::uint64_t { return w.cta().id.y; }},
    {"%ctaid.z", [](Warp& w, int) -> std::uint64_t { return w.cta().id.z; }},
    {"%nctaid.x", [](Warp& w, int) -> std::uint64_t { return grid(w).dim.x; }},
    {"%nctaid.y", [](Warp& w, int) -> std::uint64_t { return grid(w).dim.y; }},
    {"%nctaid.z", [](Warp& w, int) -> std::uint64_t { return grid(w).dim.z; }},
    {"%laneid", [](Warp&, int lane) -> std::uint64_t { return static_cast<std::uint64_t>(lane); }},
    {"%warpid",
     [](Warp& w, int) -> std::uint64_t { return static_cast<std::uint64_t>(w.index()); }},
    {"%nwarpid", [](Warp&, int) -> std::uint64_t { return 64; }},
    {"%smid", [](Warp& w, int) -> std::uint64_t { return w.cta().index % 132; }},
    {"%nsmid", [](Warp&, int) -> std::uint64_t { return 132; }},
    {"%gridid", [](Warp&, int) -> std::uint64_t { return 0; }},
    {"%lanemask_eq", [](Warp&, int lane) -> std::uint64_t { return 1u << lane; }},
    {"%lanemask_lt", [](Warp&, int lane) -> std::uint64_t { return (1u << lane) - 1; }},
    {"%lanemask_le", [](Warp&, int lane) -> std::uint64_t { return (2u << lane) - 1; }},
    {"%lanemask_gt", [](Warp&, int lane) -> std::uint64_t { return ~((2u << lane) - 1); }},
    {"%lanemask_ge", [](Warp&, int lane) -> std::uint64_t { return ~((1u << lane) - 1); }},
    {"%clock", [](Warp& w, int) -> std::uint64_t { return w.instructions; }},
    {"%clock64", [](Warp& w, int) -> std::uint64_t { return w.instructions; }},
    {"%globaltimer", [](Warp&, int) -> std::uint64_t { return nanoseconds(); }},
    {"%dynamic_smem_size",
     [](Warp& w, int) -> std::uint64_t { return grid(w).dynamic_shared_bytes; }},
    {"%total_smem_size", [](Warp& w, int) -> std::uint64_t { return w.cta().shared.size(); }},
    {"%cluster_ctarank", [](Warp& w, int) -> std::uint64_t { return w.cta().rank; }},
    {"%cluster_nctarank",
     [](Warp& w, int) -> std::uint64_t { return w.cta().cluster->ctas.size(); }},
    {"%cluster_ctaid.x", [](Warp& w, int) -> std::uint64_t { return w.cta().rank; }},
    {"%cluster_nctaid.x",
     [](Warp& w, int) -> std::uint64_t { return w.cta().cluster->ctas.size(); }},
    {"%clusterid.x",
     [](Warp& w, int) -> std::uint64_t { return w.cta().index / w.cta().cluster->ctas.size(); }},
    {"%nclusterid.x",
     [](Warp& w, int) -> std::uint64_t {
       return grid(w).dim.count() / w.cta().cluster->ctas.size();
     }},
};

}  // namespace

int special_register(std::string_view name) {
  for (int k = 0; k < static_cast<int>(std::size(kSpecials)); ++k) {
    if (kSpecials[k].name == name) return k;
  }
  return -1;
}

Step move_special(Warp& w, const Instruction& i, std::uint32_t mask) {
  std::uint8_t* d = w.out<std::uint8_t>(i.ops[0]);
  for_lanes(mask, [&](int lane) {
    const std::uint64_t value = kSpecials[i.aux].value(w, lane);
    __builtin_memcpy(d + lane * i.first_bytes, &value, i.first_bytes);
  });
  return Step::next;
}

}  // namespace flashcore::emulator
