#include "cli/option_groups.h"

#include <algorithm>
#include <string>

namespace flashcore::tool {
namespace {

/// "max_q_len" -> "--max-q-len"
std::string flag_of(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

/// Removes Markdown from documentation.
std::string help_of(std::string doc) {
  doc.erase(std::remove(doc.begin(), doc.end(), '`'), doc.end());
  return doc;
}

/// Adds a flag for each number and boolean of api/options.def. Windows, choices, splits and kernels
/// have their own flags. Storage options have none, because files hold no 8-bit tensors.
void add_table_options(CLI::App& command, Options& options, const std::string& group) {
#define FLASHCORE_CLI_flag(name, doc) \
  command.add_flag(flag_of(#name), options.name, help_of(doc))->group(group);
#define FLASHCORE_CLI_f64(name, doc) \
  command.add_option(flag_of(#name), options.name, help_of(doc))->group(group);
#define FLASHCORE_CLI_optional_f64(name, doc) FLASHCORE_CLI_f64(name, doc)
#define FLASHCORE_CLI_i64(name, doc) FLASHCORE_CLI_f64(name, doc)
#define FLASHCORE_CLI_i32(name, doc)
#define FLASHCORE_CLI_window(name, doc)
#define FLASHCORE_CLI_choice(name, doc)
#define FLASHCORE_CLI_text(name, doc)
#define FLASHCORE_CLI_ROLE_score(name, type, doc) FLASHCORE_CLI_##type(name, doc)
#define FLASHCORE_CLI_ROLE_run(name, type, doc) FLASHCORE_CLI_##type(name, doc)
#define FLASHCORE_CLI_ROLE_storage(name, type, doc)
#define FLASHCORE_OPTION(name, type, initial, least, wanted, role, word, doc) \
  FLASHCORE_CLI_ROLE_##role(name, type, doc)
#include "api/options.def"
}

}  // namespace

void add_device_options(CLI::App& command, DeviceArgs& args) {
  command
      .add_option("--device", args.device,
                  "auto (the first usable GPU, else the CPU), cpu, cuda or cuda:N")
      ->type_name("DEVICE")
      ->capture_default_str();
  command
      .add_option("--plan-for", args.plan_for,
                  "plan for this device: h200, h100, a100, l4, t4, cpu, cpu-neon, cpu-avx2, "
                  "cpu-avx512, cpu-amx or cpu-generic")
      ->type_name("DEVICE");
  command
      .add_option("--threads", args.threads, "CPU threads; default: all that this process may use")
      ->check(CLI::Range(1, 1024));
}

void add_case_options(CLI::App& command, SelectionArgs& args) {
  command
      .add_option("--cases", args.file,
                  "file of cases; default: bench/cases.json, else the built-in copy")
      ->type_name("FILE");
  command
      .add_option("--case", args.cases,
                  "a case, or NAME#2 for the second one of that name; may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false);
}

void add_splits_option(CLI::App& command, std::optional<int>& splits) {
  command
      .add_option("--splits,--num-splits", splits, "number of KV splits; 0: the planner chooses")
      ->check(CLI::Range(0, 1 << 20));
}

void add_page_size_option(CLI::App& command, std::int64_t& page_size) {
  command
      .add_option("--page-size", page_size,
                  "paged KV with this many keys per page; the pages are shuffled")
      ->type_name("KEYS")
      ->check(CLI::Range(1, 256));
}

void add_ranks_options(CLI::App& command, RanksArgs& args) {
  CLI::Option* ranks =
      command
          .add_option(
              "--ranks", args.ranks,
              "divide the rows between this many ranks; print the scheme, its bytes and its "
              "predicted time. Needs no GPU; --plan-for is h200 (default), h100, a100 or cpu")
          ->type_name("N")
          ->check(CLI::Range(1, 1 << 20));
  const auto add = [&](const char* name, auto& value, const std::string& text) {
    return command.add_option(name, value, text)->needs(ranks);
  };
  add("--node", args.node, "ranks: per machine")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  add("--scheme", args.scheme, "ranks: how they exchange keys")
      ->check(CLI::IsMember({"auto", "ring", "gather", "ulysses", "2d", "halo"}))
      ->capture_default_str();
  add("--sharding", args.sharding, "ranks: which rows each holds")
      ->check(CLI::IsMember({"zigzag", "contiguous"}))
      ->capture_default_str();
  add("--head-ranks", args.head_ranks, "ranks, 2d: how many divide the heads")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20));
  add("--documents", args.documents, "ranks: packed documents, their first rows and the length")
      ->type_name("0,I,J,...");
  CLI::Option* decode =
      command
          .add_flag("--decode", args.decode,
                    "ranks: they divide the keys of a KV cache; the queries are new rows")
          ->needs(ranks);
  command
      .add_flag("--by-heads", args.by_heads,
                "ranks, decode: each gets the result of its heads only")
      ->needs(decode);
  const std::string speeds =
      ": nvlink, pcie, infiniband, ethernet, or bytes per second and a latency, 50e9,20e-6";
  add("--link", args.link, "ranks: speed inside a machine" + speeds)
      ->type_name("SPEED")
      ->capture_default_str();
  add("--net", args.net, "ranks: speed between machines" + speeds)
      ->type_name("SPEED")
      ->capture_default_str();
}

void add_control_options(CLI::App& command, RunControlArgs& args) {
  command.add_option("--seed", args.seed, "seed of the random data")->capture_default_str();
  command.add_option("--sigma", args.sigma, "standard deviation of the random q, k and v")
      ->check(CLI::NonNegativeNumber);
  add_splits_option(command, args.splits);
  command
      .add_option("--time-limit", args.time_limit_s,
                  "stop after this time and print the results so far")
      ->type_name("SECONDS")
      ->check(CLI::PositiveNumber);
}

void add_deadline_option(CLI::App& command, std::optional<double>& deadline_s,
                         const std::string& unit, const std::string& default_limit) {
  const std::string text =
      "kill " + unit +
      " that takes longer and count it as failed; 0: no limit; default: " + default_limit +
      ", else no limit";
  command.add_option("--deadline", deadline_s, text)
      ->type_name("SECONDS")
      ->check(CLI::NonNegativeNumber);
}

void add_problem_options(CLI::App& command, ProblemArgs& args, bool files) {
  const std::string sizes = "Sizes";
  command
      .add_option("--shape", args.shape,
                  "batch,heads,length,dim, with a slash where queries and keys differ: "
                  "1,32/8,1/4096,128")
      ->type_name("B,H,S,D")
      ->group(sizes);
  const auto size = [&](const char* name, std::optional<std::int64_t>& value, const char* text) {
    command.add_option(name, value, text)->check(CLI::NonNegativeNumber)->group(sizes);
  };
  size("--batch", args.batch, "number of sequences");
  size("--q-heads", args.q_heads, "number of query heads");
  size("--kv-heads", args.kv_heads, "number of KV heads; must divide the query heads");
  size("--q-len", args.q_len, "queries per sequence");
  size("--kv-len", args.kv_len, "keys per sequence");
  size("--head-dim", args.head_dim, "head dim of q and k, 1 to 576");
  size("--v-dim", args.v_dim, "head dim of v and the output; default: that of q and k");
  command
      .add_option("--dtype", args.dtype,
                  "dtype of q, k and v: f64 on a CPU only, 8-bit types for random data only")
      ->check(CLI::IsMember({"f64", "f32", "f16", "bf16", "e4m3", "e5m2", "int8", "byte"}))
      ->group(sizes);
  command.add_option("--kv-dtype", args.kv_dtype, "8-bit dtype of k and v, with a wider q")
      ->check(CLI::IsMember({"e4m3", "e5m2", "int8", "byte"}))
      ->group(sizes);
  command
      .add_option("--scales", args.scales,
                  "scales of 8-bit tensors: none, or one per tensor, head or block of rows")
      ->check(CLI::IsMember({"none", "tensor", "head", "block"}))
      ->capture_default_str()
      ->group(sizes);
  command.add_option("--scale-block", args.scale_block, "rows per scale block")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->group(sizes);
  command.add_option("--layout", args.layout, "order of the axes")
      ->check(CLI::IsMember({"bhsd", "bshd"}))
      ->capture_default_str()
      ->group(sizes);

  const std::string options = "Attention";
  add_table_options(command, args.options, options);
  command.add_option("--window", args.window, "keys that a query sees on each side; -1: no limit")
      ->type_name("LEFT,RIGHT")
      ->group(options);
  const char* kind = files ? "random|FILE" : "random";
  const auto tensor = [&](const char* name, std::string& value, const char* text) {
    auto* option = command.add_option(name, value, text)->type_name(kind)->group(options);
    if (!files) option->check(CLI::IsMember({"random"}));
  };
  tensor("--bias", args.bias, "added to the scores, [batch|1, heads|1, q_len|1, kv_len]");
  tensor("--mask", args.mask, "false hides the key; same shape as --bias");
  tensor("--alibi", args.alibi, "ALiBi slopes, [heads] or [batch, heads]");
  tensor("--sinks", args.sinks, "one more term per head in the softmax denominator, [heads]");
  tensor("--cu-seqlens-q", args.cu_seqlens_q, "varlen queries, int32 [batch + 1]");
  tensor("--cu-seqlens-k", args.cu_seqlens_k, "varlen keys, int32 [batch + 1]");
  tensor("--used-k", args.used_k, "keys in use per sequence, int32 [batch]");
  tensor("--q-start", args.q_start, "position of query 0, int32 [batch]");
  tensor("--k-start", args.k_start, "position of key 0, int32 [batch]");
  command.add_flag("--lse", args.lse, "also compute the log-sum-exp (LSE)")->group(options);
  command.add_flag("--out-f32", args.out_f32, "f32 output for 16-bit inputs")->group(options);
  command
      .add_option("--reproducibility", args.reproducibility,
                  "batch_invariant: the bits of a row depend on its own data only")
      ->check(CLI::IsMember({"deterministic", "batch_invariant"}))
      ->capture_default_str()
      ->group(options);
}

}  // namespace flashcore::tool
