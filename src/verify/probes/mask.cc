// Probes mask and window: with Q = 0, P is 1/n at the visible keys and 0 elsewhere.
#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probe_sequence.h"

namespace flashcore::verify {
namespace {

struct Case {
  std::int64_t q_len, kv_len;
};

std::string options_name(const Options& o) {
  std::string text = o.causal ? "causal" : "";
  if (o.window_left >= 0 || o.window_right >= 0) {
    text += text.empty() ? "" : ", ";
    text += "window (" + decimal(o.window_left) + ", " + decimal(o.window_right) + ")";
  }
  return text;
}

/// Describes the worst row by the number of keys it seems to see.
std::string describe_visible_keys(const HostCall& call, const CallResult& result,
                                  const Judged& judged) {
  const auto v_dim = static_cast<std::size_t>(call.tensors.v.shape[3]);
  const std::size_t row = judged.worst_at / v_dim;
  double sum = 0;
  for (std::size_t c = 0; c < v_dim; ++c) sum += result.out[row * v_dim + c];
  const std::string name = row_name(call, row);
  if (!std::isfinite(sum)) return name + " is not finite";
  if (std::isinf(judged.oracle.lse[row]))
    return name + " has no visible key, but its output is not 0";
  double least = 1e300;  // weight of one key: 1 / (number of keys)
  for (std::size_t c = 0; c < v_dim; ++c) {
    const double p = result.out[row * v_dim + c];
    if (p > 0) least = std::min(least, p);
  }
  return name + " sees about " + number(least < 1e300 ? sum / least : 0) + " keys instead of " +
         number(std::exp(judged.oracle.lse[row])) +
         (std::fabs(sum - 1) > 0.01 ? " (its weights sum to " + number(sum) + ")" : "");
}

Finding check(ProbeSequence& probes, const Case& c, const Options& options, std::int64_t head_dim) {
  HostCall call = probes.call(probes.shape(c.q_len, c.kv_len, head_dim, c.q_len <= 5), options);
  fill_random(call.tensors.k, 1, probes.seed, 71);
  fill_folded_one_hot(call);
  const CallResult result = probes.impl.run(call);
  if (auto f = failure_of(probes, result, FaultStage::mask)) return *f;
  if (!result.ok()) return {};
  const Judged judged = probes.judge(call, result);
  if (judged.ok()) return {};
  return probes.finding(FaultStage::mask,
                        options_name(options) + ": " + describe_visible_keys(call, result, judged),
                        call, result, judged);
}

/// Scores under which hidden keys must not change the output.
struct Hidden {
  double first, step;  ///< score of key 0, and its increment per key
  FaultStage stage;
  const char* change;
};
/// 1: hidden keys score a little above visible ones. 2: all scores are below any finite value that
/// a kernel may give to hidden keys. 3: hidden keys score so far above that a maximum over them
/// flushes all visible weights.
constexpr Hidden kHidden[] = {
    {-30, 0.75, FaultStage::mask, ": hidden keys that score higher than visible ones change "},
    {-2000, 0, FaultStage::mask, ": with scores of -2000, hidden keys get weight in "},
    {-2000, 50, FaultStage::max, ": hidden keys that score far above the visible ones wipe out "},
};

Finding check_values(ProbeSequence& probes, const Options& options, std::int64_t head_dim) {
  for (const Hidden& hidden : kHidden) {
    HostCall call = probes.call(probes.shape(40, 40, head_dim, false), options);
    fill_scores_by_key(call, 0, [&](std::int64_t j) {
      return hidden.first + hidden.step * static_cast<double>(j);
    });
    Random random(probes.seed, 72);
    fill(call.tensors.v, [&](auto, auto, auto, auto) { return 0.5 + random.uniform(); });
    const CallResult result = probes.impl.run(call);
    if (auto f = failure_of(probes, result, FaultStage::mask)) return *f;
    if (!result.ok()) continue;
    const Judged judged = probes.judge(call, result);
    if (judged.ok()) continue;
    const auto v_dim = static_cast<std::size_t>(call.tensors.v.shape[3]);
    return probes.finding(
        hidden.stage,
        options_name(options) + hidden.change + row_name(call, judged.worst_at / v_dim), call,
        result, judged);
  }
  return {};
}

}  // namespace

Finding probe_mask(ProbeSequence& probes, std::int64_t head_dim) {
  Options options = probes.base();
  options.causal = true;
  std::vector<Case> cases{{5, 5},  {16, 16}, {64, 64}, {65, 65}, {130, 130}, {3, 70},
                          {1, 33}, {40, 9},  {70, 66}, {66, 70}, {20, 200},  {130, 70}};
  if (!probes.quick) cases.insert(cases.end(), {{2, 2}, {300, 300}, {17, 129}, {129, 17}});
  if (probes.quick && head_dim != probes.main_dim()) cases = {{5, 5}, {65, 65}, {3, 70}, {40, 9}};
  for (const Case& c : cases) {
    if (Finding f = check(probes, c, options, head_dim); f.found()) return f;
  }
  return check_values(probes, options, head_dim);
}

Finding probe_window(ProbeSequence& probes, std::int64_t head_dim) {
  struct Window {
    std::int64_t left, right;
    bool causal;
  };
  const Window windows[] = {{0, 0, false},  {3, 2, false},  {16, -1, false},
                            {-1, 5, false}, {63, 0, false}, {64, 64, false},
                            {20, -1, true}, {0, -1, true},  {7, 4, true}};
  for (const Window& w : windows) {
    Options options = probes.base();
    options.causal = w.causal || !probes.can.full;
    if (options.causal && !probes.can.causal) continue;
    options.window_left = w.left;
    options.window_right = w.right;
    for (const Case& c : {Case{33, 33}, {130, 130}, {20, 150}, {90, 40}}) {
      if (probes.quick && c.q_len > 100 && w.left < 63) continue;  // the window covers all keys
      if (Finding f = check(probes, c, options, head_dim); f.found()) return f;
    }
  }
  return {};
}

}  // namespace flashcore::verify
