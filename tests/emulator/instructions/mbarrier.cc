#include "emulator/instructions/opcode.h"
namespace flashcore::emulator {
bool find_mbarrier(const Opcode&, Recipe&) { return false; }
}  // namespace flashcore::emulator
