// Special registers (%tid.x), and the forms of mov that the decoder tells apart by the operands.
#pragma once

#include <string_view>

#include "emulator/machine/warp.h"

namespace flashcore::emulator {

/// mov of a special register; the handler's aux is its number. -1 if there is no such register.
int special_register(std::string_view name);
Step move_special(Warp& warp, const Instruction& instruction, std::uint32_t mask);

/// mov d, {a, b, …} and mov {a, b, …}, d.
Step pack_elements(Warp& warp, const Instruction& instruction, std::uint32_t mask);
Step unpack_elements(Warp& warp, const Instruction& instruction, std::uint32_t mask);

}  // namespace flashcore::emulator
