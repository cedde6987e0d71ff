#include "emulator/unit/run_ptx.h"

#include <cstring>

#include "emulator/machine/decode.h"
#include "emulator/machine/memory.h"

namespace flashcore::emulator {
namespace {

constexpr const char* kBefore = R"(
.version 9.0
.target sm_90a
.address_size 64
.visible .entry snippet(.param .u64 snippet_param_0)
{
  .reg .pred %p<64>;
  .reg .b16 %rs<64>;
  .reg .b32 %r<64>;
  .reg .f32 %f<64>;
  .reg .b64 %rd<64>;
  .shared .align 1024 .b8 smem[16384];
  ld.param.u64 %rd0, [snippet_param_0];
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd1, %r0, 4;
  add.s64 %rd1, %rd0, %rd1;
)";

}  // namespace

std::string run_ptx(const std::string& body, std::vector<std::uint32_t>& memory,
                    const SnippetOptions& options) {
  ptx::Module module;
  module.text = kBefore + body + "\nret;\n}\n";
  ptx::parse_module(module);
  const auto program = decode(module, module.functions.at("snippet"), {});
  const std::size_t bytes = memory.size() * sizeof memory[0];
  void* data = device_memory().allocate(bytes);
  std::memcpy(data, memory.data(), bytes);
  Grid grid;
  grid.program = program.get();
  grid.dim.x = options.ctas;
  grid.block.x = options.threads;
  grid.cluster.x = options.cluster;
  grid.params.resize(sizeof data);
  std::memcpy(grid.params.data(), &data, sizeof data);
  grid.schedule.seed = options.seed;
  grid.schedule.find_races = options.find_races;
  grid.compute_capability = options.compute_capability;
  const std::string report = grid.run();
  std::memcpy(memory.data(), data, bytes);
  device_memory().release(data);
  return report;
}

}  // namespace flashcore::emulator
