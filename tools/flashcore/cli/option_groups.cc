#include "cli/option_groups.h"

namespace flashcore::tool {

void add_device_options(CLI::App& command, DeviceArgs& args) {
  command.add_option("--device", args.device, "auto (a GPU if there is one), cpu, cuda or cuda:N")
      ->capture_default_str();
  command.add_option("--plan-for", args.plan_for,
                     "plan as for this device: h200, h100, a100, l4, t4, cpu, cpu-neon, cpu-avx2, "
                     "cpu-avx512 or cpu-generic");
  command.add_option("--threads", args.threads, "CPU threads; default: all this process may use")
      ->check(CLI::Range(1, 1024));
}

void add_case_options(CLI::App& command, SelectionArgs& args) {
  command
      .add_option("--cases", args.file,
                  "file of cases; default: bench/cases.json here, else the one built in")
      ->type_name("FILE");
  command.add_option("--case", args.cases, "a case by name, NAME or NAME#2; may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false);
}

void add_splits_option(CLI::App& command, std::optional<int>& splits) {
  command
      .add_option("--splits,--num-splits", splits,
                  "key ranges computed apart and merged; 0: the planner's")
      ->check(CLI::Range(0, 1 << 20));
}

void add_page_size_option(CLI::App& command, std::int64_t& page_size) {
  command.add_option("--page-size", page_size, "K and V in shuffled pages of so many keys")
      ->type_name("KEYS")
      ->check(CLI::Range(1, 256));
}

void add_control_options(CLI::App& command, RunControlArgs& args) {
  command.add_option("--seed", args.seed, "of the random numbers")->capture_default_str();
  command.add_option("--sigma", args.sigma, "standard deviation of q, k and v")
      ->check(CLI::NonNegativeNumber);
  add_splits_option(command, args.splits);
  command.add_option("--time-limit", args.time_limit_s, "stop after so many seconds")
      ->type_name("SECONDS")
      ->check(CLI::PositiveNumber);
}

void add_deadline_option(CLI::App& command, std::optional<double>& deadline_s, const char* what,
                         const char* usual) {
  const std::string text = std::string(what) +
                           " that takes longer is ended, with its process, and fails; 0: none; "
                           "default: " +
                           usual;
  command.add_option("--deadline", deadline_s, text)
      ->type_name("SECONDS")
      ->check(CLI::NonNegativeNumber);
}

void add_problem_options(CLI::App& command, ProblemArgs& args, bool files) {
  const std::string sizes = "Sizes";
  command
      .add_option("--shape", args.shape,
                  "batch,heads,length,dim; queries/keys apart by a slash: 1,32/8,1/4096,128")
      ->group(sizes);
  const auto size = [&](const char* name, std::optional<std::int64_t>& value, const char* text) {
    command.add_option(name, value, text)->check(CLI::NonNegativeNumber)->group(sizes);
  };
  size("--batch", args.batch, "sequences");
  size("--q-heads", args.q_heads, "query heads");
  size("--kv-heads", args.kv_heads, "key and value heads; must divide the query heads");
  size("--q-len", args.q_len, "queries of a sequence");
  size("--kv-len", args.kv_len, "keys of a sequence");
  size("--head-dim", args.head_dim, "of q and k, 1 to 576");
  size("--v-dim", args.v_dim, "of v and the output; default: head dim");
  command
      .add_option("--dtype", args.dtype,
                  "f32, f16, bf16 or f64 (CPU); of random data also e4m3, e5m2, int8 or byte")
      ->check(CLI::IsMember({"f64", "f32", "f16", "bf16", "e4m3", "e5m2", "int8", "byte"}))
      ->group(sizes);
  command.add_option("--kv-dtype", args.kv_dtype, "8-bit k and v: e4m3, e5m2, int8 or byte")
      ->check(CLI::IsMember({"e4m3", "e5m2", "int8", "byte"}))
      ->group(sizes);
  command
      .add_option("--scales", args.scales,
                  "of 8-bit tensors: none, one per tensor, head or block of rows")
      ->check(CLI::IsMember({"none", "tensor", "head", "block"}))
      ->capture_default_str()
      ->group(sizes);
  command.add_option("--scale-block", args.scale_block, "rows of a block")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->group(sizes);
  command.add_option("--layout", args.layout, "order of the axes: bhsd or bshd")
      ->check(CLI::IsMember({"bhsd", "bshd"}))
      ->capture_default_str()
      ->group(sizes);

  const std::string options = "Attention";
  command.add_flag("--causal", args.causal, "a query sees no later key (bottom-right)")
      ->group(options);
  command.add_option("--window", args.window, "LEFT,RIGHT keys a query sees; -1: no limit")
      ->group(options);
  command.add_option("--scale", args.scale, "of the scores; default 1/sqrt(head dim)")
      ->group(options);
  command.add_option("--softcap", args.softcap, "scores become c*tanh(score/c)")->group(options);
  const char* kind = files ? "random|FILE" : "random";
  const auto tensor = [&](const char* name, std::string& value, const char* text) {
    auto* option = command.add_option(name, value, text)->type_name(kind)->group(options);
    if (!files) option->check(CLI::IsMember({"random"}));
  };
  tensor("--bias", args.bias, "added to the scores, [batch|1, heads|1, q_len|1, kv_len]");
  tensor("--mask", args.mask, "false hides a key, same shape");
  tensor("--alibi", args.alibi, "ALiBi slopes, [heads] or [batch, heads]");
  tensor("--sinks", args.sinks, "one more logit per head in the denominator, [heads]");
  tensor("--cu-seqlens-q", args.cu_seqlens_q, "packed queries, int32 [batch + 1]");
  tensor("--cu-seqlens-k", args.cu_seqlens_k, "packed keys, int32 [batch + 1]");
  tensor("--used-k", args.used_k, "keys in use, int32 [batch]");
  tensor("--q-start", args.q_start, "position of query 0, int32 [batch]");
  tensor("--k-start", args.k_start, "position of key 0, int32 [batch]");
  command.add_option("--max-q-len", args.max_q_len, "longest packed query sequence")
      ->group(options);
  command.add_option("--max-kv-len", args.max_kv_len, "longest packed key sequence")
      ->group(options);
  command.add_flag("--lse", args.lse, "also compute the log-sum-exp")->group(options);
  command.add_flag("--partial", args.partial, "f32 result and LSE without sinks, for merging")
      ->group(options);
  command
      .add_flag("--checked", args.checked,
                "lengths, positions and page ids are checked on the device")
      ->group(options);
  command.add_flag("--out-f32", args.out_f32, "f32 output of a 16-bit problem")->group(options);
  command.add_option("--reproducibility", args.reproducibility, "deterministic or batch_invariant")
      ->check(CLI::IsMember({"deterministic", "batch_invariant"}))
      ->capture_default_str()
      ->group(options);
}

}  // namespace flashcore::tool
