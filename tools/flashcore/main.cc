// Entry point of the command `flashcore`. See docs/cli.md.
#include <cstdio>
#include <exception>
#include <new>

#include "check/supervise.h"
#include "cli/command_line.h"
#include "cli/signals.h"
#include "cli/terminal.h"
#include "cli/worker_link.h"
#include "command_error.h"
#include "commands.h"

namespace flashcore::tool {
namespace {

template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <typename... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

int execute(const Command& command) {
  return std::visit(Overloaded{[](const InfoArgs& args) { return run_info(args); },
                               [](const RunArgs& args) { return run_run(args); },
                               [](const ExplainArgs& args) { return run_explain(args); },
                               [](const CheckArgs& args) { return run_check(args); },
                               [](const BenchArgs& args) { return run_bench(args); },
                               [](const VerifyArgs& args) { return run_verify(args); },
                               [](const QuantizeArgs& args) { return run_quantize(args); }},
                    command);
}

int run_command(int argc, char** argv) {
  try {
    const auto parsed = parse_command_line(argc, argv);
    if (const int* code = std::get_if<int>(&parsed)) return *code;
    note_interrupts();
    WorkerLink& link = WorkerLink::here();
    link.open();
    if (!link.has_supervisor() && needs_supervisor(std::get<Command>(parsed))) {
      return supervise(argc, argv);
    }
    const int code = execute(std::get<Command>(parsed));
    if (std::fflush(stdout) == 0) return code;
    say("cannot write to standard output");
  } catch (const CommandError& error) {
    say(error.what());
  } catch (const std::bad_alloc&) {
    say("not enough memory; try a smaller problem");
  } catch (const std::exception& error) {
    say(error.what());
  }
  return kCouldNotRun;
}

int main_function(int argc, char** argv) {
  const int code = run_command(argc, argv);
  WorkerLink::here().exits(code);  // a hung device can keep the process from exiting
  return code;
}

}  // namespace
}  // namespace flashcore::tool

int main(int argc, char** argv) { return flashcore::tool::main_function(argc, argv); }
