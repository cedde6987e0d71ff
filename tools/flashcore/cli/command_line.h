// From argv to one command's arguments.
#pragma once

#include <variant>

#include "cli/args.h"

namespace flashcore::tool {

using Command =
    std::variant<InfoArgs, RunArgs, ExplainArgs, CheckArgs, BenchArgs, VerifyArgs, QuantizeArgs>;

/// What to do, or, where the command line asks for help or is wrong, the exit code; what there is
/// to say about it has then been printed.
std::variant<Command, int> parse_command_line(int argc, char** argv);

}  // namespace flashcore::tool
