// Parses argv into the arguments of one command.
#pragma once

#include <variant>

#include "cli/args.h"

namespace flashcore::tool {

using Command =
    std::variant<InfoArgs, RunArgs, ExplainArgs, CheckArgs, BenchArgs, VerifyArgs, QuantizeArgs>;

/// Returns the command to run. After --help, --version or wrong usage it has printed the text, and
/// returns the exit code.
std::variant<Command, int> parse_command_line(int argc, char** argv);

}  // namespace flashcore::tool
