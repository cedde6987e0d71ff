// flashcore explain --ranks: the scheme of a distributed problem, its bytes and predicted time.
#include <charconv>
#include <string_view>

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

DistributedProblem distributed_problem(const ExplainArgs& args) {
  if (!gives_sizes(args.problem)) {
    throw CommandError("--ranks needs the sizes of a problem: --shape 1,64/8,1048576,128");
  }
  const verify::CaseSpec spec = spec_of(args.problem);
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
  p.scheme = scheme_of(ranks.scheme);
  p.ranks_per_node = ranks.node;
  p.head_ranks = ranks.head_ranks;
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
    return kOk;
  }
  Json json = Json::parse(plan_json(plan));
  json["device"] = device;
  json["text"] = explain(plan);
  tool::print_json(json);
  return kOk;
}

}  // namespace flashcore::tool
