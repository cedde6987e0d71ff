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
  command.add_flag("--kernels", args.kernels, "list all kernels with their tiles and resources");
  command.add_flag("--peak", args.peak, "measure the CPU's FMA rate and memory bandwidth");
  command
      .add_option("--tree", args.tree, "fail if this binary was not built from the sources in DIR")
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
  command.add_option("--q", args.q, "queries (.npy file)")->type_name("FILE");
  command.add_option("--k", args.k, "keys (.npy file)")->type_name("FILE");
  command.add_option("--v", args.v, "values (.npy file)")->type_name("FILE");
  command
      .add_option("--block-table", args.block_table,
                  "paged KV: page ids (.npy file), int32 [batch, max_pages]; k and v are then "
                  "[pages, page size, heads, dim]")
      ->type_name("FILE");
  command.add_option("--out", args.out, "write the output to this .npy file")->type_name("FILE");
  command.add_option("--lse-out", args.lse_out, "write the LSE to this .npy file")
      ->type_name("FILE");
  command
      .add_option("--suite", args.selection.suites, "run all cases of this suite; may be repeated")
      ->type_name("SUITE")
      ->allow_extra_args(false);
  add_case_options(command, args.selection);
  command
      .add_option("--kernel", args.selection.kernel,
                  "run every kernel whose id matches, instead of the planner's choice")
      ->type_name("REGEX");
  add_device_options(command, args.device);
  add_control_options(command, args.control);
  add_deadline_option(command, args.control.deadline_s, "a problem",
                      "60 s plus 0.5 s per sample on a GPU (600 s with --stage or --trace)");
  add_page_size_option(command, args.control.page_size);
  command.add_option("--samples", args.samples, "number of timing samples; 0: do not time")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str();
  command
      .add_option(
          "--stage", args.stage,
          "check one stage of the kernel, or all, instead of the result: dequant (8-bit inputs "
          "only), scores, probabilities, pv, partials, combine; writes and times nothing")
      ->check(CLI::IsMember(
          {"dequant", "scores", "probabilities", "pv", "partials", "combine", "all"}));
  command
      .add_option(
          "--trace", args.trace,
          "show one row after each tile, beside the oracle. Measured with runs whose keys end "
          "after the tile: LSE, out, and P of the tile's keys (one-hot V). Derived: "
          "score = log(P) + LSE, max = largest score so far, sum = exp(LSE - max)")
      ->type_name("BATCH,HEAD,ROW");
  command.add_flag("--json", args.json, "print JSON");
  add_problem_options(command, args.problem, true);
  command.footer(
      examples("  flashcore run --shape 1,8,512,64 --dtype f16 --causal\n"
               "  flashcore run --shape 2,32/8,1/4096,128 --dtype bf16 --splits 4\n"
               "  flashcore run --q q.npy --k k.npy --v v.npy --out out.npy\n"
               "  flashcore run --case simt-small --device cpu --json\n"
               "  flashcore run --shape 1,8,512,64 --dtype f16 --causal --stage all\n"
               "  flashcore run --shape 1,2,256,64 --kernel generic --splits 3 --stage partials\n"
               "  flashcore run --shape 1,2,256,64 --causal --trace 0,1,255\n"));
  return command;
}

CLI::App& add_explain(CLI::App& app, ExplainArgs& args) {
  CLI::App& command =
      *app.add_subcommand("explain", "Explain the plan of a problem, for any device");
  command
      .add_option("--suite", args.selection.suites,
                  "explain all cases of this suite; may be repeated")
      ->type_name("SUITE")
      ->allow_extra_args(false);
  add_case_options(command, args.selection);
  command.add_option("--kernel", args.selection.kernel, "plan for this kernel")->type_name("ID");
  add_device_options(command, args.device);
  add_splits_option(command, args.splits);
  add_page_size_option(command, args.page_size);
  command.add_flag("--json", args.json, "print JSON");
  add_ranks_options(command, args.ranks);
  add_problem_options(command, args.problem, false);
  command.footer(
      examples("  flashcore explain --shape 1,8,512,64\n"
               "  flashcore explain --shape 4,32/8,4096,128 --dtype bf16 --plan-for h200\n"
               "  flashcore explain --case decode#2 --plan-for l4 --json\n"
               "  flashcore explain --shape 1,64/8,1048576,128 --dtype bf16 --causal --ranks 64\n"
               "  flashcore explain --shape 1,32/8,65536,128 --ranks 8 --scheme ring --link pcie\n"
               "  flashcore explain --shape 8,32/8,1/65536,128 --dtype bf16 --ranks 8 --decode\n"));
  return command;
}

CLI::App& add_check(CLI::App& app, CheckArgs& args) {
  CLI::App& command = *app.add_subcommand("check", "Check every kernel against the fp64 oracle");
  command
      .add_option("--op", args.op,
                  "forward, or backward: gradients of random problems, whose out and lse are the "
                  "oracle's")
      ->check(CLI::IsMember({"forward", "backward"}))
      ->capture_default_str();
  command.add_option("--problems", args.problems, "number of random problems")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->capture_default_str();
  command
      .add_option("--suite", args.suite,
                  "random (default), tuning, regression, keyless-tiles, all, or a suite of the "
                  "cases file")
      ->type_name("SUITE");
  add_case_options(command, args.selection);
  command.add_option("--kernel", args.selection.kernel, "check only kernels whose id matches")
      ->type_name("REGEX");
  add_device_options(command, args.device);
  command.get_option("--device")
      ->description("all (the CPU and the first GPU), auto, cpu, cuda or cuda:N");
  add_control_options(command, args.control);
  add_deadline_option(command, args.control.deadline_s, "a problem", "20 s on a GPU");
  command.add_option("--index", args.index, "check only problem N of the suite")->type_name("N");
  command
      .add_option("--blocks", args.blocks,
                  "plan for a GPU with N SMs, so that a persistent kernel has N CTAs; each problem "
                  "draws one entry of the list; 0: no limit; default for random problems of "
                  "persistent kernels: 0,1,1,2,3,7")
      ->type_name("N[,N...]")
      ->delimiter(',')
      ->check(CLI::Range(0, 65535));
  command.add_option("--work", args.work, "average multiply-adds of a random problem")
      ->check(CLI::Range(1.0, 1e12))
      ->capture_default_str();
  command.add_option("--jobs", args.jobs, "problems to check in parallel; default: one per CPU")
      ->check(CLI::Range(1, 1024));
  command
      .add_option("--max-failures", args.max_failures, "stop after this many failures; 0: never")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      .add_option("--require-coverage", args.require_coverage,
                  "fail unless every kernel ran N problems and all pairs of options, tile edges "
                  "and tile sequences of a CTA occurred")
      ->type_name("N");
  command.add_flag("--quiet", args.quiet, "print no progress");
  command.add_flag("--json", args.json, "print JSON");
  command.footer(
      examples("  flashcore check\n"
               "  flashcore check --problems 20000 --require-coverage 200\n"
               "  flashcore check --op backward --problems 20000\n"
               "  flashcore check --suite regression\n"
               "  flashcore check --device cuda --kernel sm90 --blocks 1,2,3,7\n"
               "  flashcore check --device cuda --plan-for l4 --kernel f16 --time-limit 60\n"
               "  flashcore check --kernel '^fwd_generic_f32$' --seed 1 --index 17   # replay\n"));
  return command;
}

CLI::App& add_bench(CLI::App& app, BenchArgs& args) {
  CLI::App& command = *app.add_subcommand("bench", "Check and time the cases of bench/cases.json");
  command
      .add_option("--suite", args.selection.suites,
                  "time all cases of this suite; may be repeated; default: cpu on a CPU, anchors "
                  "and simt on a GPU")
      ->type_name("SUITE")
      ->allow_extra_args(false);
  add_case_options(command, args.selection);
  command
      .add_option("--kernel", args.selection.kernel,
                  "time every kernel whose id matches, instead of the planner's choice")
      ->type_name("REGEX");
  add_device_options(command, args.device);
  add_control_options(command, args.control);
  add_deadline_option(command, args.control.deadline_s, "a row",
                      "60 s plus 0.5 s per sample on a GPU");
  add_page_size_option(command, args.control.page_size);
  command.add_option("--samples", args.samples, "number of timing samples per row")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command
      .add_option("--output", args.output, "write the results to this JSON file after every case")
      ->type_name("FILE");
  command
      .add_option("--compare", args.compare,
                  "report the rows that got faster or slower than in this result file")
      ->type_name("OLD.json");
  command.add_option("--results", args.results, "time nothing; compare this result file")
      ->type_name("FILE")
      ->needs("--compare");
  command.add_flag("--list", args.list,
                   "print the cases of all suites, or the selected ones, and stop");
  command.add_flag("--fail-on-slower", args.fail_on_slower, "exit with code 1 if a row got slower");
  command.add_flag("--quiet", args.quiet, "print no progress");
  command.add_flag("--json", args.json, "print JSON");
  command.footer(
      examples("  flashcore bench\n"
               "  flashcore bench --suite options      # what options cost\n"
               "  flashcore bench --list\n"
               "  flashcore bench --suite simt --device cuda --output new.json\n"
               "  flashcore bench --compare old.json --fail-on-slower\n"
               "  flashcore bench --compare old.json --results new.json\n"));
  return command;
}

CLI::App& add_quantize(CLI::App& app, QuantizeArgs& args) {
  CLI::App& command = *app.add_subcommand(
      "quantize", "Quantize .npy files or random data to 8 bits and back; check and time it");
  command.add_option("--in", args.in, "input (.npy file: float16, float32 or bf16)")
      ->type_name("FILE");
  command.add_option("--shape", args.shape, "random input of shape batch,heads,length,dim")
      ->type_name("B,H,S,D");
  command.add_option("--from-dtype", args.from_dtype, "dtype of the random input")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str();
  command.add_option("--dtype", args.dtype, "8-bit format")
      ->check(CLI::IsMember({"e4m3", "e5m2", "int8", "byte"}))
      ->capture_default_str();
  command.add_option("--per", args.per, "granularity of the scales")
      ->check(CLI::IsMember({"tensor", "head", "block"}))
      ->capture_default_str();
  command.add_option("--block-rows", args.block_rows, "rows per scale block")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->capture_default_str();
  command.add_flag("--rotate", args.rotate,
                   "rotate the rows first, which reduces the effect of outlier columns");
  command
      .add_option("--out", args.out, "write the quantized values (uint8 or int8) to this .npy file")
      ->type_name("FILE");
  command.add_option("--scale-out", args.scale_out, "write the scales to this .npy file")
      ->type_name("FILE");
  add_device_options(command, args.device);
  command.add_option("--seed", args.seed, "seed of the random data")->capture_default_str();
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
      "verify", "Find the first wrong stage of an attention implementation, ours or yours");
  command.add_option("--kernel", args.kernel, "verify our kernels whose id matches; default: all")
      ->type_name("REGEX");
  command
      .add_option("--op", args.op,
                  "our kernels of this operation; the forward pass of a backward kernel is the "
                  "planner's choice and not probed")
      ->check(CLI::IsMember({"forward", "backward"}))
      ->capture_default_str();
  command
      .add_option("--lib", args.library,
                  "verify a function of this shared library, in a child process")
      ->type_name("FILE");
  command
      .add_option(
          "--symbol", args.symbol,
          "the function, of type flashcore_verify_function (flashcore/verify_c.h); NAME_backward "
          "is its backward pass, if the library has it")
      ->type_name("NAME");
  add_device_options(command, args.device);
  command
      .add_option("--dtype", args.dtypes,
                  "dtype of the inputs; may be repeated; default: f32 with --lib, else all")
      ->allow_extra_args(false)
      ->check(CLI::IsMember({"f64", "f32", "f16", "bf16", "e4m3", "e5m2", "int8", "byte"}));
  command
      .add_option("--out-dtype", args.out_dtype,
                  "dtype of the output; default: dtype of the inputs, f32 for 8-bit inputs")
      ->type_name("DTYPE");
  command
      .add_option("--arithmetic", args.arithmetic,
                  "dtype to which the implementation rounds scores and P; default: dtype of the "
                  "inputs")
      ->type_name("DTYPE");
  command.add_option("--layout", args.layout, "order of the axes in memory")
      ->check(CLI::IsMember({"bhsd", "bshd"}))
      ->capture_default_str();
  command.add_option("--head-dim", args.head_dims, "verify only this head dim; may be repeated")
      ->allow_extra_args(false);
  command.add_flag("--compact", args.compact, "the implementation accepts contiguous tensors only");
  command
      .add_option("--causal-alignment", args.causal_alignment,
                  "declare the alignment of the causal mask instead of discovering it")
      ->check(CLI::IsMember({"top-left", "bottom-right"}));
  command.add_option("--lse-base", args.lse_base, "base of the logarithm in the LSE")
      ->check(CLI::IsMember({"e", "2"}))
      ->capture_default_str();
  command.add_option("--only", args.only, "run only this probe")->type_name("PROBE");
  command.add_option("--seed", args.seed, "seed of the random inputs")->capture_default_str();
  add_deadline_option(command, args.deadline_s, "a call", "20 s on a GPU or with --lib");
  command.add_flag("--quick", args.quick, "use fewer lengths, head dims and random problems");
  command.add_option("--html", args.html, "write an HTML report with error maps")
      ->type_name("FILE");
  command.add_flag("--quiet", args.quiet, "print no progress");
  command.add_flag("--json", args.json, "print JSON");
  command.add_flag("--serve", args.serve)->group("");
  command.footer(
      examples("  flashcore verify --quick\n"
               "  flashcore verify --kernel sm80 --device cuda\n"
               "  flashcore verify --op backward --quick\n"
               "  flashcore verify --lib ./libmine.so --symbol my_attention --html report.html\n"));
  return command;
}

/// "a, b and c": all commands of the app.
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
    say(formatted("unknown command \"{}\"; known: {}", first, command_names(app)));
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
  app.footer(formatted(
      "flashcore COMMAND --help shows the options of a command, with examples.\n{}", kExitCodes));
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
