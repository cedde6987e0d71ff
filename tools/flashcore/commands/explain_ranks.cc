// flashcore explain --ranks: the scheme of a distributed problem, its bytes and predicted time.
#include <charconv>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/json_output.h"
#include "cli/text.h"
#include "command_error.h"
#include "commands.h"
#include "data/problem.h"
#include "flashcore/distributed.h"

namespace flashcore::tool {
namespace {

constexpr double kDefaultLatency = 20e-6;

bool read_number(std::string_view text, double& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc{} && end == text.data() + text.size();
}

/// "nvlink", "50e9" or "50e9,20e-6".
LinkSpeed link_of(const char* option, const std::string& text) {
  if (const auto known = link_speed(text.c_str()); known.ok()) return *known;
  const std::size_t comma = text.find(',');
  LinkSpeed speed{0, kDefaultLatency};
  const bool valid = read_number(std::string_view(text).substr(0, comma), speed.bandwidth) &&
                     (comma == std::string::npos ||
                      read_number(std::string_view(text).substr(comma + 1), speed.latency));
  if (valid) return speed;
  throw CommandError(formatted(
      "{} is \"{}\"; wanted nvlink, pcie, infiniband, ethernet, or bytes per second, with "
      "a latency in seconds after a comma: 50e9,20e-6",
      option, text));
}

Scheme scheme_of(const std::string& text) {
  for (const Scheme one : {Scheme::automatic, Scheme::ring, Scheme::gather, Scheme::ulysses,
                           Scheme::two_d, Scheme::halo}) {
    if (text == to_string(one)) return one;
  }
  throw CommandError(formatted("--scheme is \"{}\"", text));
}

/// Refuses what changes a call on one device and is not part of the model.
void refuse_unused(const ExplainArgs& args) {
  const ProblemArgs& p = args.problem;
  const std::pair<bool, const char*> unused[] = {
      {args.page_size > 0, "--page-size"},
      {args.splits.has_value(), "--splits"},
      {!args.selection.kernel.empty(), "--kernel"},
      {!args.selection.suites.empty(), "--suite"},
      {!args.selection.cases.empty(), "--case"},
      {!p.kv_dtype.empty(), "--kv-dtype"},
      {!p.bias.empty(), "--bias"},
      {!p.mask.empty(), "--mask"},
      {!p.alibi.empty(), "--alibi"},
      {!p.cu_seqlens_q.empty(), "--cu-seqlens-q (use --documents)"},
      {!p.cu_seqlens_k.empty(), "--cu-seqlens-k (use --documents)"},
      {!p.used_k.empty(), "--used-k"},
      {!p.q_start.empty(), "--q-start"},
      {!p.k_start.empty(), "--k-start"},
      {p.out_f32, "--out-f32"},
      {p.options.partial, "--partial"},
      {p.options.checked, "--checked"},
      {p.options.max_q_len > 0, "--max-q-len"},
      {p.options.max_kv_len > 0, "--max-kv-len"},
  };
  for (const auto& [given, name] : unused) {
    if (given) throw CommandError(formatted("{}: --ranks does not take it", name));
  }
}

std::vector<std::int64_t> documents_of(const std::string& text) {
  std::vector<std::int64_t> documents;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    std::int64_t row = 0;
    const auto [next, error] = std::from_chars(at, end, row);
    if (error != std::errc{} || (next != end && *next != ',')) {
      throw CommandError(formatted(
          "--documents is \"{}\"; wanted the first row of each, then the length: 0,100,250", text));
    }
    documents.push_back(row);
    at = next + (next == end ? 0 : 1);
  }
  return documents;
}

void set_decode(const verify::CaseSpec& spec, const RanksArgs& ranks, DistributedProblem& p) {
  if (p.scheme != Scheme::automatic) throw CommandError("--scheme: --decode has only one");
  if (p.causal) throw CommandError("--causal: with --decode row i sees all keys up to its own");
  p.scheme = Scheme::decode;
  p.by_heads = ranks.by_heads;
  p.q_rows.assign(static_cast<std::size_t>(ranks.ranks), spec.q_len);
  p.k_rows.clear();
  for (std::int32_t r = 0; r < ranks.ranks; ++r) {
    p.k_rows.push_back(decode_length(spec.kv_len, r, ranks.ranks, 1));
  }
}

DistributedProblem distributed_problem(const ExplainArgs& args) {
  if (!gives_sizes(args.problem)) {
    throw CommandError("--ranks needs the sizes of a problem: --shape 1,64/8,1048576,128");
  }
  refuse_unused(args);
  const verify::CaseSpec spec = spec_of(args.problem);
  if (spec.k_storage != DType::none) {
    throw CommandError("--dtype: --ranks takes f64, f32, f16 or bf16");
  }
  const RanksArgs& ranks = args.ranks;
  DistributedProblem p;
  p.dtype = spec.dtype;
  p.batch = spec.batch;
  p.q_heads = spec.q_heads;
  p.kv_heads = spec.kv_heads;
  p.head_dim = spec.head_dim;
  p.v_dim = spec.v_dim;
  p.causal = spec.options.causal;
  p.window_left = spec.options.window_left;
  p.window_right = spec.options.window_right;
  p.reproducibility = spec.options.reproducibility;
  p.sharding = ranks.sharding == "zigzag" ? Sharding::zigzag : Sharding::contiguous;
  p.q_rows = distributed_rows(spec.q_len, ranks.ranks, p.sharding);
  p.k_rows = distributed_rows(spec.kv_len, ranks.ranks, p.sharding);
  p.documents = documents_of(ranks.documents);
  p.scheme = scheme_of(ranks.scheme);
  p.ranks_per_node = ranks.node;
  p.head_ranks = ranks.head_ranks;
  if (ranks.decode) set_decode(spec, ranks, p);
  return p;
}

}  // namespace

int explain_ranks(const ExplainArgs& args) {
  ClusterSpeeds speeds;
  speeds.link = link_of("--link", args.ranks.link);
  speeds.net = link_of("--net", args.ranks.net);
  const std::string device = args.device.plan_for.empty() ? "h200" : args.device.plan_for;
  if (const Status status = set_device_speed(speeds, device.c_str()); !status.ok()) {
    throw CommandError("--plan-for with --ranks: " + status.message());
  }
  const DistributedPlan plan = value_or_throw(plan_distributed(distributed_problem(args), speeds));
  if (!args.json) {
    print_out("{}", explain(plan));
    const DistributedProblem& p = plan.problem;
    const std::int64_t rows = std::accumulate(p.q_rows.begin(), p.q_rows.end(), std::int64_t{0});
    if (!args.ranks.decode && rows < args.ranks.ranks) {
      print_out("fewer rows than ranks: --decode plans a KV cache whose keys the ranks divide\n");
    }
    return kOk;
  }
  Json json = Json::parse(plan_json(plan));
  json["device"] = device;
  json["text"] = explain(plan);
  tool::print_json(json);
  return kOk;
}

}  // namespace flashcore::tool
