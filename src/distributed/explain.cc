// A distributed plan as text and as JSON.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <numeric>

#include "distributed/decimal.h"
#include "flashcore/distributed.h"

namespace flashcore {
namespace {

[[gnu::format(printf, 2, 3)]] void add_text(std::string& text, const char* format, ...) {
  char line[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  text += line;
}

/// 1,048,576
std::string grouped(std::int64_t number) {
  std::string digits = distributed::decimal(number);
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > (number < 0 ? 1 : 0);
       at -= 3) {
    digits.insert(digits.begin() + at, ',');
  }
  return digits;
}

std::string time_text(double seconds) {
  char text[32];
  if (seconds >= 1) {
    std::snprintf(text, sizeof text, "%.3g s", seconds);
  } else if (seconds >= 1e-3) {
    std::snprintf(text, sizeof text, "%.3g ms", seconds * 1e3);
  } else {
    std::snprintf(text, sizeof text, "%.3g us", seconds * 1e6);
  }
  return text;
}

/// "ring step 3, dK and dV" as "ring step, dK and dV".
std::string without_number(std::string name) {
  const std::size_t begin = name.find_first_of("0123456789");
  if (begin == std::string::npos || begin == 0 || name[begin - 1] != ' ') return name;
  const std::size_t end = std::min(name.find_first_not_of("0123456789", begin), name.size());
  return name.erase(begin - 1, end - begin + 1);
}

/// One line for all steps of a kind with equal numbers.
std::string step_lines(const DistributedCosts& costs) {
  std::vector<std::pair<std::string, int>> lines;
  for (const DistributedStep& step : costs.steps) {
    std::string line = without_number(step.name) + ": " + grouped(step.bytes) + " bytes, " +
                       time_text(step.transfer_s) + ", " + time_text(step.hidden_s) + " hidden";
    const auto same = std::find_if(lines.begin(), lines.end(),
                                   [&](const auto& one) { return one.first == line; });
    if (same == lines.end()) {
      lines.emplace_back(std::move(line), 1);
    } else {
      ++same->second;
    }
  }
  std::string text;
  for (const auto& [line, count] : lines) {
    text += "  ";
    if (count > 1) text += distributed::decimal(count) + " x ";
    text += line + "\n";
  }
  return text;
}

std::string costs_text(const char* name, const DistributedPlan& plan,
                       const DistributedCosts& costs) {
  const auto most = std::max_element(costs.bytes.begin(), costs.bytes.end());
  const std::int64_t least = *std::min_element(costs.bytes.begin(), costs.bytes.end());
  std::string text;
  add_text(text,
           "%-9s %s bytes sent by the rank that sends most (rank %d), %s by the one that "
           "sends least\n",
           name, grouped(*most).c_str(),
           plan.sampled[static_cast<std::size_t>(most - costs.bytes.begin())],
           grouped(least).c_str());
  text += step_lines(costs);
  add_text(text, "  work %s, messages %s, %.0f%% of them hidden, together %s\n",
           time_text(costs.work_s).c_str(), time_text(costs.transfer_s()).c_str(),
           costs.hidden() * 100, time_text(costs.total_s()).c_str());
  return text;
}

constexpr char kComputed[] =
    "times are computed from nominal speeds, not measured; the header is not counted\n";

std::string explain_decode(const DistributedPlan& plan) {
  const DistributedProblem& p = plan.problem;
  std::string text;
  add_text(text, "scheme    decode, %zu ranks\n", p.q_rows.size());
  text += "reason    " + plan.reason + "\n";
  add_text(text,
           "keys      %s on rank 0, of %s; %lld x %lld rows of q; %lld/%lld heads of %lld, %s\n",
           grouped(p.k_rows[0]).c_str(),
           grouped(std::accumulate(p.k_rows.begin(), p.k_rows.end(), std::int64_t{0})).c_str(),
           static_cast<long long>(p.batch), static_cast<long long>(p.q_rows[0]),
           static_cast<long long>(p.q_heads), static_cast<long long>(p.kv_heads),
           static_cast<long long>(p.head_dim), to_string(p.dtype));
  return text + costs_text("decode", plan, plan.forward) + kComputed;
}

std::string costs_json(const DistributedCosts& costs) {
  std::string text = "{\"bytes\": [";
  for (std::size_t i = 0; i < costs.bytes.size(); ++i) {
    add_text(text, "%s%lld", i == 0 ? "" : ", ", static_cast<long long>(costs.bytes[i]));
  }
  add_text(text,
           "], \"work_s\": %.17g, \"transfer_s\": %.17g, \"hidden\": %.17g, \"total_s\": %.17g",
           costs.work_s, costs.transfer_s(), costs.hidden(), costs.total_s());
  text += ", \"steps\": [";
  for (std::size_t i = 0; i < costs.steps.size(); ++i) {
    const DistributedStep& step = costs.steps[i];
    add_text(text, "%s[\"%s\", %lld, %.17g, %.17g]", i == 0 ? "" : ", ", step.name.c_str(),
             static_cast<long long>(step.bytes), step.transfer_s, step.hidden_s);
  }
  return text + "]}";
}

}  // namespace

std::string explain(const DistributedPlan& plan) {
  const DistributedProblem& p = plan.problem;
  const std::int64_t rows = std::accumulate(p.q_rows.begin(), p.q_rows.end(), std::int64_t{0});
  std::string text;
  if (plan.scheme == Scheme::decode) return explain_decode(plan);
  add_text(text, "scheme    %s, %s, %zu ranks", to_string(plan.scheme),
           p.sharding == Sharding::zigzag ? "zigzag" : "contiguous", p.q_rows.size());
  if (plan.head_ranks > 1) add_text(text, ", %d ranks divide the heads", plan.head_ranks);
  text += "\nreason    " + plan.reason + "\n";
  add_text(text, "rows      %s, %s on rank 0; %lld/%lld heads of %lld, %s\n", grouped(rows).c_str(),
           grouped(p.q_rows[0]).c_str(), static_cast<long long>(p.q_heads),
           static_cast<long long>(p.kv_heads), static_cast<long long>(p.head_dim),
           to_string(p.dtype));
  text += costs_text("forward", plan, plan.forward);
  text += costs_text("backward", plan, plan.backward);
  return text + kComputed;
}

std::string plan_json(const DistributedPlan& plan) {
  std::string text;
  add_text(text, "{\"scheme\": \"%s\", \"head_ranks\": %d, \"ranks\": %zu, \"sharding\": \"%s\", ",
           to_string(plan.scheme), plan.head_ranks, plan.problem.q_rows.size(),
           plan.problem.sharding == Sharding::zigzag ? "zigzag" : "contiguous");
  text += "\"reason\": \"" + plan.reason + "\", \"sampled\": [";
  for (std::size_t i = 0; i < plan.sampled.size(); ++i) {
    add_text(text, "%s%d", i == 0 ? "" : ", ", plan.sampled[i]);
  }
  text += "], \"forward\": " + costs_json(plan.forward);
  return text + ", \"backward\": " + costs_json(plan.backward) + "}";
}

}  // namespace flashcore
