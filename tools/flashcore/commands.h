// The subcommands. Each returns the exit code of the process, or throws CommandError if it cannot
// run.
#pragma once

#include "cli/args.h"

namespace flashcore::tool {

int run_info(const InfoArgs& args);
int run_run(const RunArgs& args);
int run_explain(const ExplainArgs& args);
/// With --ranks: the scheme, its bytes and its predicted time. Needs no device.
int explain_ranks(const ExplainArgs& args);
int run_check(const CheckArgs& args);
int run_bench(const BenchArgs& args);
int run_quantize(const QuantizeArgs& args);
int run_verify(const VerifyArgs& args);

}  // namespace flashcore::tool
