// The cost model: seconds of work and of messages, from nominal speeds. Nothing is measured.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "distributed/guarded.h"
#include "distributed/job.h"
#include "distributed/traffic.h"

namespace flashcore {
namespace {

using distributed::guarded;
using distributed::Job;
using distributed::sampled_ranks;

constexpr double kBackwardWork = 2.5;  // times the forward work

struct NamedLink {
  const char* name;
  LinkSpeed speed;
};
constexpr NamedLink kLinks[] = {{"nvlink", {450e9, 10e-6}},
                                {"pcie", {50e9, 10e-6}},
                                {"infiniband", {50e9, 20e-6}},
                                {"ethernet", {12.5e9, 50e-6}}};

struct NamedDevice {
  const char* name;
  double forward, backward;  // FLOP/s of the attention kernels, 16-bit
  double memory;             // bytes per second
};
constexpr NamedDevice kDevices[] = {{"h200", 650e12, 450e12, 4.8e12},
                                    {"h100", 650e12, 450e12, 3.35e12},
                                    {"a100", 200e12, 140e12, 2e12},
                                    {"cpu", 1e11, 2e10, 5e10}};

template <typename Named>
std::string names_of(const Named& table) {
  std::string text;
  for (const auto& one : table) text.append(text.empty() ? "" : ", ").append(one.name);
  return text;
}

/// Seconds of work of each step, on the rank that has most; one step for all but rings.
std::vector<double> work_by_step(const Job& job, double flops, bool backward) {
  const Job inner = job.one_head_group(0);
  const double per_pair = static_cast<double>(inner.batch * inner.q_heads) * 2 *
                          static_cast<double>(job.head_dim + job.v_dim) *
                          (backward ? kBackwardWork : 1) / flops;
  const bool one_step = !job.is_ring();
  std::vector<double> work;
  for (std::int32_t step = 0; step < (one_step ? 1 : inner.ranks()); ++step) {
    double most = 0;
    for (const std::int32_t rank : sampled_ranks(inner.ranks())) {
      const std::int32_t block = (rank - step + inner.ranks()) % inner.ranks();
      const distributed::Spans all{{0, inner.mask.k_docs.back()}};
      double pairs = 0;
      for (const distributed::Span q : inner.q_of(rank)) {
        for (const distributed::Span k : one_step ? all : inner.k_of(block)) {
          pairs += static_cast<double>(inner.mask.visible(q, k));
        }
      }
      most = std::max(most, pairs * per_pair);
    }
    work.push_back(most);
  }
  return work;
}

bool ends_with(const std::string& text, const char* end) {
  const std::size_t n = std::strlen(end);
  return text.size() >= n && text.compare(text.size() - n, n, end) == 0;
}

/// The messages of a ring step hide behind the work of the step; all others hide behind nothing.
DistributedCosts costs_of(const Job& job, const DistributedProblem& problem,
                          const ClusterSpeeds& speeds, bool backward) {
  std::vector<std::vector<SentBytes>> sent;
  for (const std::int32_t rank : sampled_ranks(job.ranks())) {
    sent.push_back(distributed::traffic(job, rank, backward));
  }
  const std::vector<double> work =
      work_by_step(job, backward ? speeds.backward_flops : speeds.forward_flops, backward);
  const LinkSpeed between = job.ranks() <= problem.ranks_per_node ? speeds.link : speeds.net;
  const LinkSpeed inside = job.head_ranks <= problem.ranks_per_node ? speeds.link : speeds.net;
  DistributedCosts costs;
  std::size_t computed = 0;
  double free = 0;  // work of the last computed step that hides no message yet
  const std::size_t count = sent[0].size();
  for (std::size_t i = 0; i < count; ++i) {
    DistributedStep step;
    step.name = sent[0][i].step;
    for (const auto& one : sent) step.bytes = std::max(step.bytes, one[i].bytes);
    const bool of_heads = job.head_ranks > 1 && (i == 0 || i + 1 == count);
    const LinkSpeed& link = of_heads ? inside : between;
    if (step.bytes > 0) {
      step.transfer_s = static_cast<double>(step.bytes) / link.bandwidth + link.latency;
    }
    if (step.name.rfind("ring step", 0) == 0) {
      if (!ends_with(step.name, "dK and dV")) free = work[computed++];
      step.hidden_s = std::min(step.transfer_s, free);
      free -= step.hidden_s;
    }
    costs.steps.push_back(std::move(step));
  }
  for (const auto& one : sent) {
    std::int64_t sum = 0;
    for (const SentBytes& step : one) sum += step.bytes;
    costs.bytes.push_back(sum);
  }
  for (const double one : work) costs.work_s += one;
  return costs;
}

Status check_speeds(const ClusterSpeeds& speeds) {
  const struct {
    const char* name;
    double value;
  } rates[] = {{"link bandwidth", speeds.link.bandwidth},
               {"net bandwidth", speeds.net.bandwidth},
               {"forward FLOP/s", speeds.forward_flops},
               {"backward FLOP/s", speeds.backward_flops},
               {"memory bandwidth", speeds.memory_bandwidth}};
  for (const auto& rate : rates) {
    if (!(rate.value > 0) || !std::isfinite(rate.value)) {
      return invalid_argument("%s is %g; wanted a positive number", rate.name, rate.value);
    }
  }
  for (const LinkSpeed& link : {speeds.link, speeds.net}) {
    if (!(link.latency >= 0) || !std::isfinite(link.latency)) {
      return invalid_argument("latency is %g; wanted 0 or more seconds", link.latency);
    }
  }
  return {};
}

}  // namespace

std::vector<std::int64_t> distributed_rows(std::int64_t length, std::int32_t ranks,
                                           Sharding sharding) {
  std::vector<std::int64_t> rows;
  for (const distributed::Spans& spans : distributed::place(length, ranks, sharding)) {
    rows.push_back(distributed::rows_of(spans));
  }
  return rows;
}

Result<LinkSpeed> link_speed(const char* name) noexcept {
  return guarded<Result<LinkSpeed>>([&]() -> Result<LinkSpeed> {
    for (const NamedLink& one : kLinks) {
      if (std::strcmp(one.name, name) == 0) return one.speed;
    }
    return invalid_argument("link is '%s'; wanted one of %s", name, names_of(kLinks).c_str());
  });
}

Status set_device_speed(ClusterSpeeds& speeds, const char* name) noexcept {
  return guarded<Status>([&]() -> Status {
    for (const NamedDevice& one : kDevices) {
      if (std::strcmp(one.name, name) != 0) continue;
      speeds.forward_flops = one.forward;
      speeds.backward_flops = one.backward;
      speeds.memory_bandwidth = one.memory;
      return {};
    }
    return invalid_argument("device is '%s'; wanted one of %s", name, names_of(kDevices).c_str());
  });
}

std::string speeds_json() {
  std::string text = "{\"links\": {";
  char line[128];
  for (const NamedLink& one : kLinks) {
    std::snprintf(line, sizeof line, "%s\"%s\": [%.17g, %.17g]", &one == kLinks ? "" : ", ",
                  one.name, one.speed.bandwidth, one.speed.latency);
    text += line;
  }
  text += "}, \"devices\": {";
  for (const NamedDevice& one : kDevices) {
    std::snprintf(line, sizeof line, "%s\"%s\": [%.17g, %.17g, %.17g]",
                  &one == kDevices ? "" : ", ", one.name, one.forward, one.backward, one.memory);
    text += line;
  }
  return text + "}}";
}

double DistributedCosts::transfer_s() const noexcept {
  double sum = 0;
  for (const DistributedStep& step : steps) sum += step.transfer_s;
  return sum;
}

double DistributedCosts::hidden() const noexcept {
  double sum = 0;
  for (const DistributedStep& step : steps) sum += step.hidden_s;
  const double transfer = transfer_s();
  return transfer > 0 ? sum / transfer : 1.0;
}

double DistributedCosts::total_s() const noexcept {
  double sum = work_s;
  for (const DistributedStep& step : steps) sum += step.transfer_s - step.hidden_s;
  return sum;
}

Result<DistributedPlan> plan_distributed(const DistributedProblem& problem,
                                         const ClusterSpeeds& speeds) noexcept {
  return guarded<Result<DistributedPlan>>([&]() -> Result<DistributedPlan> {
    FLASHCORE_RETURN_IF_ERROR(check_speeds(speeds));
    if (problem.scheme == Scheme::decode) return distributed::plan_decode(problem, speeds);
    const Result<Job> job = distributed::make_job(problem);
    if (!job.ok()) return job.status();
    DistributedPlan plan;
    plan.problem = problem;
    plan.scheme = job->scheme;
    plan.head_ranks = job->head_ranks;
    plan.reason = job->reason;
    plan.sampled = sampled_ranks(job->ranks());
    plan.forward = costs_of(*job, problem, speeds, false);
    plan.backward = costs_of(*job, problem, speeds, true);
    return plan;
  });
}

Result<std::vector<SentBytes>> sent_bytes(const DistributedProblem& problem, std::int32_t rank,
                                          bool backward) noexcept {
  return guarded<Result<std::vector<SentBytes>>>([&]() -> Result<std::vector<SentBytes>> {
    const bool decode = problem.scheme == Scheme::decode;
    if (decode && backward) return std::vector<SentBytes>{};
    if (decode) return distributed::decode_traffic(problem);
    const Result<Job> job = distributed::make_job(problem);
    if (!job.ok()) return job.status();
    if (rank < 0 || rank >= job->ranks()) {
      return invalid_argument("rank is %d; wanted 0 to %d", rank, job->ranks() - 1);
    }
    return distributed::traffic(*job, rank, backward);
  });
}

}  // namespace flashcore
