// The cost model of distributed_decode(). A rank reads its keys once and then sends out and LSE.
#include <algorithm>

#include "core/error.h"
#include "distributed/job.h"
#include "distributed/traffic.h"

namespace flashcore::distributed {
namespace {

using ll = long long;

Status check_decode_problem(const DistributedProblem& p) {
  FLASHCORE_RETURN_IF_ERROR(check_problem(p));
  const auto ranks = static_cast<std::int64_t>(p.q_rows.size());
  if (std::count(p.q_rows.begin(), p.q_rows.end(), p.q_rows[0]) != ranks) {
    return invalid_argument(
        "q_rows: differ between ranks; wanted the same new queries on every rank");
  }
  if (p.window_left >= 0 || p.window_right >= 0 || !p.documents.empty()) {
    return unsupported("decode has no window and no documents: row i sees all keys up to its own");
  }
  if (p.by_heads && p.q_heads % ranks != 0) {
    return invalid_argument("by_heads: %lld ranks cannot divide %lld heads", ll{ranks},
                            ll{p.q_heads});
  }
  return {};
}

/// Seconds until the rank with most keys has read and used them.
double decode_work(const DistributedProblem& p, const ClusterSpeeds& speeds) {
  const std::int64_t keys = *std::max_element(p.k_rows.begin(), p.k_rows.end());
  const auto entries = static_cast<double>(p.batch * keys * (p.head_dim + p.v_dim));
  const double bytes = entries * static_cast<double>(p.kv_heads * size_of(p.dtype));
  const double flops = 2 * entries * static_cast<double>(p.q_heads * p.q_rows[0]);
  return std::max(bytes / speeds.memory_bandwidth, flops / speeds.forward_flops);
}

}  // namespace

Result<std::vector<SentBytes>> decode_traffic(const DistributedProblem& p) {
  FLASHCORE_RETURN_IF_ERROR(check_decode_problem(p));
  const auto ranks = static_cast<std::int64_t>(p.q_rows.size());
  const std::int64_t heads = p.by_heads ? p.q_heads / ranks : p.q_heads;
  const std::int64_t part = p.batch * heads * p.q_rows[0] * (p.v_dim + 1) * 4;
  return std::vector<SentBytes>{{"out and lse", part * (ranks - 1)}};
}

Result<DistributedPlan> plan_decode(const DistributedProblem& p, const ClusterSpeeds& speeds) {
  const Result<std::vector<SentBytes>> sent = decode_traffic(p);
  if (!sent.ok()) return sent.status();
  const auto ranks = static_cast<std::int32_t>(p.q_rows.size());
  DistributedPlan plan;
  plan.problem = p;
  plan.scheme = Scheme::decode;
  plan.reason = p.by_heads ? "keys are divided between ranks; each rank gets its heads"
                           : "keys are divided between ranks; each rank gets the whole result";
  plan.sampled = sampled_ranks(ranks);
  const std::int64_t bytes = sent->front().bytes;
  const LinkSpeed& link = ranks <= p.ranks_per_node ? speeds.link : speeds.net;
  DistributedStep step;
  step.name = sent->front().step;
  step.bytes = bytes;
  if (bytes > 0) step.transfer_s = static_cast<double>(bytes) / link.bandwidth + link.latency;
  plan.forward.steps.push_back(std::move(step));
  plan.forward.work_s = decode_work(p, speeds);
  plan.forward.bytes.assign(plan.sampled.size(), bytes);
  plan.backward.bytes.assign(plan.sampled.size(), 0);
  return plan;
}

}  // namespace flashcore::distributed
