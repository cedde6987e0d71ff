#include "emulator/instructions/opcode.h"
namespace flashcore::emulator {
bool find_bulk_copy(const Opcode&, Recipe&) { return false; }
}  // namespace flashcore::emulator
