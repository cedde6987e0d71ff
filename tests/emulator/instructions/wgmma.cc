#include "emulator/instructions/opcode.h"
namespace flashcore::emulator {
bool find_wgmma(const Opcode&, Recipe&) { return false; }
}  // namespace flashcore::emulator
