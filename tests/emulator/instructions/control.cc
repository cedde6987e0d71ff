// Branches, exits and traps. Calls do not exist: the decoder inlines functions.
#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"

namespace flashcore::emulator {
namespace {

Step bra(Warp& w, const Instruction& i, std::uint32_t mask) { return w.branch(mask, i.target); }
Step ret(Warp& w, const Instruction&, std::uint32_t mask) { return w.exit(mask); }
Step trap(Warp& w, const Instruction&, std::uint32_t mask) { w.fail("trap", __builtin_ctz(mask)); }

}  // namespace

bool find_control(const Opcode& opcode, Recipe& recipe) {
  const std::string_view base = opcode.base();
  if (base == "bra") recipe.handler = bra;
  if (base == "ret" || base == "exit") recipe.handler = ret;
  if (base == "trap" || base == "brkpt") recipe.handler = trap;
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
