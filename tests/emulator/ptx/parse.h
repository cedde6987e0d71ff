// Shared by the two parsers.
#pragma once

#include <cstdint>
#include <string_view>

#include "emulator/ptx/lexer.h"
#include "emulator/ptx/module.h"

namespace flashcore::emulator::ptx {

std::int64_t parse_integer(std::string_view token);
/// Reads `.space [.align n] .type name[count] [= initial]`.
Variable parse_variable(Lexer& in);

}  // namespace flashcore::emulator::ptx
