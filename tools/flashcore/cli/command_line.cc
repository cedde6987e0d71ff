#include "cli/command_line.h"

#include <algorithm>

#include "cli/option_groups.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "command_error.h"
#include "flashcore/attention.h"

namespace flashcore::tool {
namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 ok; 1 a check failed, the binary is stale, or a case got slower; 2 wrong usage "
    "or\nthe command could not run; 130 interrupted, after printing the results so far.";

std::string examples(const char* text) { return formatted("Examples:\n{}\n{}", text, kExitCodes); }

CLI::App& add_info(CLI::App& app, InfoArgs& args) {
  CLI::App& command =
      *app.add_subcommand("info", "Show version, devices, kernels and source fingerprint");
  command.add_flag("--kernels", args.kernels, "list all kernels and their requirements");
  command.add_flag("--peak", args.peak, "measure the CPU's arithmetic and memory rates");
  command.add_option("--tree", args.tree, "fail if this binary was not built from DIR's sources")
      ->type_name("DIR");
  command.add_flag("--json", args.json, "print JSON");
  command.footer(
      examples("  flashcore info\n"
               "  flashcore info --kernels --peak\n"
               "  flashcore info --tree .      # exit code 1: the binary is stale\n"));
  return command;
}

CLI::App& add_run(CLI::App& app, RunArgs& args) {
  CLI::App& command =
      *app.add_subcommand("run", "Run attention on .npy files or random data; check and time it");
  command.add_option("--q", args.q, "queries, a .npy file")->type_name("FILE");
  command.add_option("--k", args.k, "keys, a .npy file")->type_name("FILE");
  command.add_option("--v", args.v, "values, a .npy file")->type_name("FILE");
  command
      .add_option("--block-table", args.block_table,
                  "page ids, int32 [batch, max_pages]; k and v are [pages, page size, heads, dim]")
      ->type_name("FILE");
  command.add_option("--out", args.out, "write the output to this .npy file")->type_name("FILE");
  command.add_option("--lse-out", args.lse_out, "write the LSE to this .npy file")
      ->type_name("FILE");
  command.add_option("--suite", args.selection.suites, "all cases of a suite; may be repeated")
      ->allow_extra_args(false);
  add_case_options(command, args.selection);
  command.add_option(
      "--kernel", args.selection.kernel,
      "run every kernel that matches this regular expression instead of the planner's choice");
  add_device_options(command, args.device);
  add_control_options(command, args.control);
  add_deadline_option(command, args.control.deadline_s, "a problem",
                      "60 and half a second a sample on a GPU; with --stage or --trace 600");
  add_page_size_option(command, args.control.page_size);
  command.add_option("--samples", args.samples, "number of timing samples; 0: do not time")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str();
  command
      .add_option(
          "--stage", args.stage,
          "check one stage of the kernel over the whole tensor: dequant (8-bit inputs), scores, "
          "probabilities, pv, partials, combine, or all; neither writes nor times the result")
      ->check(CLI::IsMember(
          {"dequant", "scores", "probabilities", "pv", "partials", "combine", "all"}));
  command
      .add_option(
          "--trace", args.trace,
          "one row tile by tile beside the oracle. Measured, by runs in which the keys end after "
          "the tile: LSE, out, and P of the tile's keys (one-hot V). Computed from these: "
          "score = log(P) + LSE, max = largest score so far, sum = exp(LSE - max)")
      ->type_name("BATCH,HEAD,ROW");
  command.add_flag("--json", args.json, "print JSON");
  add_problem_options(command, args.problem, true);
  command.footer(
      examples("  flashcore run --shape 1,8,512,64 --dtype f16 --causal\n"
               "  flashcore run --shape 2,32/8,1/4096,128 --dtype bf16 --splits 4\n"
               "  flashcore run --q q.npy --k k.npy --v v.npy --out out.npy\n"
               "  flashcore run --case prefill-b1-s512 --device cpu --json\n"
               "  flashcore run --shape 1,8,512,64 --dtype f16 --causal --stage all\n"
               "  flashcore run --shape 1,2,256,64 --kernel generic --splits 3 --stage partials\n"
               "  flashcore run --shape 1,2,256,64 --causal --trace 0,1,255\n"));
  return command;
}

CLI::App& add_explain(CLI::App& app, ExplainArgs& args) {
  CLI::App& command =
      *app.add_subcommand("explain", "Explain the plan of a problem, for any device");
  command.add_option("--suite", args.selection.suites, "all cases of a suite; may be repeated")
      ->allow_extra_args(false);
  add_case_options(command, args.selection);
  command.add_option("--kernel", args.selection.kernel, "exactly this kernel (its id)");
  add_device_options(command, args.device);
  add_splits_option(command, args.splits);
  add_page_size_option(command, args.page_size);
  command.add_flag("--json", args.json, "print JSON");
  add_problem_options(command, args.problem, false);
  command.footer(
      examples("  flashcore explain --shape 1,8,512,64\n"
               "  flashcore explain --shape 4,32/8,4096,128 --dtype bf16 --plan-for h200\n"
               "  flashcore explain --case decode#2 --plan-for l4 --json\n"));
  return command;
}

CLI::App& add_check(CLI::App& app, CheckArgs& args) {
  CLI::App& command = *app.add_subcommand("check", "Check every kernel against the fp64 oracle");
  command.add_option("--problems", args.problems, "number of random problems")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->capture_default_str();
  command.add_option(
      "--suite", args.suite,
      "random (default), tuning, regression, keyless-tiles, all, or a suite of the cases file");
  add_case_options(command, args.selection);
  command.add_option("--kernel", args.selection.kernel,
                     "only kernels that match this regular expression");
  add_device_options(command, args.device);
  command.get_option("--device")->description("all (default), auto, cpu, cuda or cuda:N");
  add_control_options(command, args.control);
  add_deadline_option(command, args.control.deadline_s, "a problem", "20 on a GPU");
  command.add_option("--index", args.index, "run only this problem (replay)");
  command
      .add_option("--blocks", args.blocks,
                  "limit the CTAs of a GPU, as if it had so few SMs; each problem draws one entry "
                  "of the list; 0: no limit; default for persistent kernels: 0,1,1,2,3,7")
      ->type_name("N[,N...]")
      ->delimiter(',')
      ->check(CLI::Range(0, 65535));
  command.add_option("--work", args.work, "multiply-adds of a random problem, on average")
      ->check(CLI::Range(1.0, 1e12))
      ->capture_default_str();
  command.add_option("--jobs", args.jobs, "problems in parallel; default: one per CPU")
      ->check(CLI::Range(1, 1024));
  command
      .add_option("--max-failures", args.max_failures, "stop after this many failures; 0: never")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      .add_option("--require-coverage", args.require_coverage,
                  "fail unless every kernel had N problems and all pairs of options, tile edges "
                  "and tile sequences of a CTA occurred")
      ->type_name("N");
  command.add_flag("--quiet", args.quiet, "print no progress");
  command.add_flag("--json", args.json, "print JSON");
  command.footer(
      examples("  flashcore check\n"
               "  flashcore check --problems 20000 --require-coverage 200\n"
               "  flashcore check --suite regression\n"
               "  flashcore check --device cuda --kernel sm90 --blocks 1,2,3,7\n"
               "  flashcore check --device cuda --plan-for l4 --kernel f16 --time-limit 60\n"
               "  flashcore check --kernel '^fwd_generic_f32$' --seed 1 --index 17   # replay\n"));
  return command;
}

CLI::App& add_bench(CLI::App& app, BenchArgs& args) {
  CLI::App& command =
      *app.add_subcommand("bench", "Time the cases of bench/cases.json, each after its check");
  command
      .add_option("--suite", args.selection.suites,
                  "cpu (default on a CPU), anchors and simt (default on a GPU), regression; may be "
                  "repeated")
      ->allow_extra_args(false);
  add_case_options(command, args.selection);
  command.add_option(
      "--kernel", args.selection.kernel,
      "time every kernel that matches this regular expression instead of the planner's choice");
  add_device_options(command, args.device);
  add_control_options(command, args.control);
  add_deadline_option(command, args.control.deadline_s, "a row",
                      "60 and half a second a sample on a GPU");
  add_page_size_option(command, args.control.page_size);
  command.add_option("--samples", args.samples, "timing samples per row")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command
      .add_option("--output", args.output,
                  "write the results as JSON to this file, after every case")
      ->type_name("FILE");
  command
      .add_option("--compare", args.compare,
                  "report what got faster or slower since this result file")
      ->type_name("OLD.json");
  command.add_option("--results", args.results, "compare this result file instead of timing")
      ->type_name("FILE")
      ->needs("--compare");
  command.add_flag("--fail-on-slower", args.fail_on_slower, "exit with code 1 if a row got slower");
  command.add_flag("--quiet", args.quiet, "print no progress");
  command.add_flag("--json", args.json, "print JSON");
  command.footer(
      examples("  flashcore bench\n"
               "  flashcore bench --suite simt --device cuda --output new.json\n"
               "  flashcore bench --compare old.json --fail-on-slower\n"
               "  flashcore bench --compare old.json --results new.json\n"));
  return command;
}

CLI::App& add_quantize(CLI::App& app, QuantizeArgs& args) {
  CLI::App& command =
      *app.add_subcommand("quantize", "Quantize a .npy file or random data to 8 bits and back");
  command.add_option("--in", args.in, "values, a .npy file (float16, float32, bf16)")
      ->type_name("FILE");
  command.add_option("--shape", args.shape, "batch,heads,length,dim of random values instead");
  command.add_option("--from-dtype", args.from_dtype, "of random values: f32, f16 or bf16")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str();
  command.add_option("--dtype", args.dtype, "e4m3, e5m2, int8 or byte")
      ->check(CLI::IsMember({"e4m3", "e5m2", "int8", "byte"}))
      ->capture_default_str();
  command.add_option("--per", args.per, "granularity of the scales: tensor, head or block")
      ->check(CLI::IsMember({"tensor", "head", "block"}))
      ->capture_default_str();
  command.add_option("--block-rows", args.block_rows, "rows per scale block")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->capture_default_str();
  command.add_flag("--rotate", args.rotate,
                   "rotate rows first, which reduces the effect of outlier columns");
  command
      .add_option("--out", args.out, "write the quantized values (uint8 or int8) to this .npy file")
      ->type_name("FILE");
  command.add_option("--scale-out", args.scale_out, "write the scales to this .npy file")
      ->type_name("FILE");
  add_device_options(command, args.device);
  command.add_option("--seed", args.seed, "seed of the random numbers")->capture_default_str();
  command.add_option("--samples", args.samples, "number of timing samples; 0: do not time")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str();
  command.add_flag("--json", args.json, "print JSON");
  command.footer(
      examples("  flashcore quantize --in k.npy --dtype e4m3 --out k8.npy --scale-out scale.npy\n"
               "  flashcore quantize --shape 4,32,16384,128 --from-dtype bf16 --device cuda\n"));
  return command;
}

CLI::App& add_verify(CLI::App& app, VerifyArgs& args) {
  CLI::App& command = *app.add_subcommand(
      "verify", "Find the wrong stage of an attention implementation, ours or yours");
  command.add_option("--kernel", args.kernel,
                     "our kernels that match this regular expression (default: all)");
  command
      .add_option("--lib", args.library,
                  "verify a function of this shared library, in a child process")
      ->type_name("FILE");
  command.add_option("--symbol", args.symbol,
                     "name of the function (type: flashcore_verify_function in verify_c.h)");
  add_device_options(command, args.device);
  command.add_option("--dtype", args.dtypes, "f64 f32 f16 bf16 e4m3 int8 byte; may be repeated")
      ->allow_extra_args(false)
      ->check(CLI::IsMember({"f64", "f32", "f16", "bf16", "e4m3", "int8", "byte"}));
  command.add_option("--out-dtype", args.out_dtype,
                     "dtype of the output (default: dtype; f32 for 8-bit)");
  command.add_option("--arithmetic", args.arithmetic,
                     "format that it rounds scores and P to (default: dtype)");
  command.add_option("--layout", args.layout, "memory order of the tensors")
      ->check(CLI::IsMember({"bhsd", "bshd"}))
      ->capture_default_str();
  command.add_option("--head-dim", args.head_dims, "only this head dim; may be repeated")
      ->allow_extra_args(false);
  command.add_flag("--compact", args.compact, "it accepts compact tensors only");
  command
      .add_option("--causal-alignment", args.causal_alignment,
                  "declare the alignment instead of discovering it")
      ->check(CLI::IsMember({"top-left", "bottom-right"}));
  command.add_option("--lse-base", args.lse_base, "base of the LSE")
      ->check(CLI::IsMember({"e", "2"}))
      ->capture_default_str();
  command.add_option("--only", args.only, "run only this probe");
  command.add_option("--seed", args.seed, "seed of the random inputs")->capture_default_str();
  add_deadline_option(command, args.deadline_s, "a call", "20 on a GPU and with --lib");
  command.add_flag("--quick", args.quick, "use fewer lengths, head dims and random problems");
  command.add_option("--html", args.html, "write an HTML report with maps of the errors")
      ->type_name("FILE");
  command.add_flag("--quiet", args.quiet, "print no progress");
  command.add_flag("--json", args.json, "print JSON");
  command.add_flag("--serve", args.serve)->group("");
  command.footer(
      examples("  flashcore verify --quick\n"
               "  flashcore verify --kernel sm80 --device cuda\n"
               "  flashcore verify --lib ./libmine.so --symbol my_attention --html report.html\n"));
  return command;
}

/// "a, b and c": all commands that were added to the app.
std::string command_names(const CLI::App& app) {
  const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
  std::string names;
  for (std::size_t i = 0; i < commands.size(); ++i) {
    if (i > 0) names += i + 1 < commands.size() ? ", " : " and ";
    names += commands[i]->get_name();
  }
  return names;
}

int report_error(const CLI::ParseError& error, const CLI::App& app, const std::string& first) {
  if (app.get_subcommands().empty() && !first.starts_with('-')) {
    say(formatted("there is no command \"{}\"; known are {}", first, command_names(app)));
    return kCouldNotRun;
  }
  const CLI::App* command = &app;
  for (const CLI::App* chosen : app.get_subcommands()) command = chosen;
  const std::string name =
      command == &app ? "flashcore" : formatted("flashcore {}", command->get_name());
  std::string message = error.what();
  std::replace(message.begin(), message.end(), '\n', ' ');
  say(formatted("{}; see {} --help", message, name));
  return kCouldNotRun;
}

}  // namespace

std::variant<Command, int> parse_command_line(int argc, char** argv) {
  CLI::App app{"FlashCore: attention on CPUs and NVIDIA GPUs, with an oracle to check it.",
               "flashcore"};
  app.set_version_flag("--version",
                       formatted("flashcore {} ({})", version(), source_fingerprint()));
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.footer(formatted("flashcore COMMAND --help shows a command's options and examples.\n{}",
                       kExitCodes));
  InfoArgs info;
  RunArgs run;
  ExplainArgs explain;
  CheckArgs check;
  BenchArgs bench;
  VerifyArgs verify;
  QuantizeArgs quantize;
  const CLI::App& info_command = add_info(app, info);
  const CLI::App& run_command = add_run(app, run);
  const CLI::App& explain_command = add_explain(app, explain);
  const CLI::App& check_command = add_check(app, check);
  const CLI::App& verify_command = add_verify(app, verify);
  const CLI::App& quantize_command = add_quantize(app, quantize);
  add_bench(app, bench);
  if (argc <= 1) {
    print_error("{}", app.help());
    return kCouldNotRun;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& wanted) {  // --help, --version
    return app.exit(wanted);
  } catch (const CLI::ParseError& error) {
    return report_error(error, app, argv[1]);
  }
  check.program = run.program = bench.program = argv[0];
  for (int i = 0; i < argc; ++i) run.command += (i > 0 ? " " : "") + quoted(argv[i]);
  bench.command = "flashcore";  // as typed, not the path on this machine
  for (int i = 1; i < argc; ++i) bench.command += " " + std::string(argv[i]);
  if (info_command.parsed()) return Command(info);
  if (run_command.parsed()) return Command(run);
  if (explain_command.parsed()) return Command(explain);
  if (check_command.parsed()) return Command(check);
  if (verify_command.parsed()) return Command(verify);
  if (quantize_command.parsed()) return Command(quantize);
  return Command(bench);
}

}  // namespace flashcore::tool
