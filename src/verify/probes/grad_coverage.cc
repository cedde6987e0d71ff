// Probes grad_coverage and grad_determinism: every element of the gradients is written, whatever
// was there, and the same call gives the same gradients.
#include <algorithm>
#include <cmath>

#include "verify/gradient_call.h"
#include "verify/inputs/decimal.h"
#include "verify/probes/gradient_heads.h"

namespace flashcore::verify {
namespace {

/// A number that memory may hold before a call.
constexpr double kOldContent = 3;

struct Kind {
  Shape shape;
  Options options;
  const char* name;
  bool dlse = false;
  enum class Zero { nothing, dout, first_heads, last_heads, some_rows, q, k, v } zero = {};
};

/// Sets an input to 0, or dout of some heads or rows: what they add may be skipped, but the
/// gradients must still be written.
void clear(const Kind& kind, GradientCall& call) {
  using Zero = Kind::Zero;
  const Tensors& t = call.forward.tensors;
  if (kind.zero == Zero::q) fill(t.q, [](auto...) { return 0.0; });
  if (kind.zero == Zero::k) fill(t.k, [](auto...) { return 0.0; });
  if (kind.zero == Zero::v) fill(t.v, [](auto...) { return 0.0; });
  const Shape& s = kind.shape;
  const std::int64_t group = s.q_heads / s.kv_heads;
  for (std::int64_t row = 0; row < s.batch * s.q_heads * s.q_len; ++row) {
    const std::int64_t head = row / s.q_len % s.q_heads;
    const bool is_cleared = kind.zero == Zero::dout ||
                            (kind.zero == Zero::first_heads && head < group) ||
                            (kind.zero == Zero::last_heads && head + group + 1 >= s.q_heads) ||
                            (kind.zero == Zero::some_rows && row % s.q_len < s.q_len - 1);
    if (!is_cleared) continue;
    const auto first = call.dout.begin() + static_cast<std::ptrdiff_t>(row * s.v_dim);
    std::fill(first, first + static_cast<std::ptrdiff_t>(s.v_dim), 0.0);
  }
}

GradientCall call_of(const ProbeSequence& probes, const Kind& kind) {
  GradientCall call = gradient_call(probes, kind.shape, kind.options);
  fill_random(call, 1, probes.seed);
  if (kind.dlse) {
    call.dlse.resize(call.dout.size() / static_cast<std::size_t>(kind.shape.v_dim));
    fill_random(call.dlse, 1, probes.seed, 251);
  }
  clear(kind, call);
  return call;
}

/// Runs a call over `content`. False: the call failed.
bool run_over(ProbeSequence& probes, GradientCall& call, double content, GradientResult& result,
              std::optional<Finding>& failure) {
  Setting setting = probes.impl.default_setting();
  setting.out_before = content;
  result = run_only(probes, call, setting);
  if (!result.ok()) failure = failure_of(probes, result, FaultStage::coverage);
  return result.ok();
}

/// The fault of one call: elements that stay, or results that depend on what was there. Empty:
/// none.
std::string uncovered(ProbeSequence& probes, const Kind& kind, bool over_numbers,
                      std::optional<Finding>& failure) {
  GradientCall call = call_of(probes, kind);
  GradientResult clean, over;
  if (!run_over(probes, call, std::nan(""), clean, failure)) return failure ? failure->detail : "";
  // Old content that matters shows over NaN first.
  bool suspect = over_numbers;
  for (int g = 0; g < kGradients && !suspect; ++g) {
    suspect = clean.unwritten[g] > 0 || std::any_of(clean.value[g].begin(), clean.value[g].end(),
                                                    [](double x) { return !std::isfinite(x); });
  }
  if (!suspect) return "";
  if (!run_over(probes, call, kOldContent, over, failure)) return failure ? failure->detail : "";
  for (int g = 0; g < kGradients; ++g) {
    const std::vector<double>&a = clean.value[g], &b = over.value[g];
    for (std::size_t at = 0; at < a.size(); ++at) {
      if (clean.unwritten[g] > 0 && over.unwritten[g] > 0 && b[at] == kOldContent) {
        return decimal(clean.unwritten[g]) + " of " + decimal(a.size()) +
               " elements are never written, the first: " + element_name(call, g, at);
      }
      const bool stale = std::isnan(a[at]) && std::isfinite(b[at]);
      const bool moved = std::fabs(b[at] - a[at] - kOldContent) < 1e-3 && clean.unwritten[g] == 0;
      if (stale || moved) {
        return element_name(call, g, at) + " is " + number(b[at]) + " over an old " +
               number(kOldContent) + " and " + number(a[at]) + " over NaN: old content is added";
      }
    }
  }
  return "";
}

/// Inputs of 0, tiles that nothing sees, other dims.
void add_other_kinds(const ProbeSequence& probes, std::vector<Kind>& kinds) {
  using Zero = Kind::Zero;
  const Options base = probes.base();
  const std::int64_t head_dim = probes.main_dim();
  const auto add = [&](std::int64_t q_len, std::int64_t kv_len, const char* name,
                       bool wide = false) -> Kind& {
    return kinds.emplace_back(Kind{probes.shape(q_len, kv_len, head_dim, wide), base, name});
  };
  add(5, 9, "dout of 0: ").zero = Zero::dout;
  add(5, 9, "dout of 0 in the first heads: ", true).zero = Zero::first_heads;
  add(5, 9, "dout of 0 in the last heads: ", true).zero = Zero::last_heads;
  add(200, 9, "dout of 0 in most rows: ").zero = Zero::some_rows;
  add(5, 9, "Q of 0: ").zero = Zero::q;
  add(5, 9, "K of 0: ").zero = Zero::k;
  add(5, 9, "V of 0: ").zero = Zero::v;
  if (probes.can.dlse) {
    Kind& kind = add(5, 9, "dout of 0, dlse: ");
    kind.zero = Zero::dout, kind.dlse = true;
  }
  if (probes.can.zero_scale) add(5, 9, "a scale of 0: ").options.scale = 0;
  if (probes.can.causal && probes.can.cross) {
    add(300, 3, "tiles of rows without keys: ").options.causal = true;
  }
  if (probes.can.window && probes.can.cross) {
    Options& options = add(3, 300, "tiles of keys that no row sees: ").options;
    options.window_left = options.window_right = 2;
  }
  for (const std::int64_t d : probes.can.other_dims) {
    Shape& shape = add(5, 9, "another head dim: ").shape;
    shape.head_dim = shape.v_dim = d;
  }
  for (const std::int64_t d : probes.can.other_v_dims) add(5, 9, "another v_dim: ").shape.v_dim = d;
}

/// Several heads and batches, rows that see no key, keys that no row sees, values narrower and
/// wider than keys, long sequences.
std::vector<Kind> kinds_of_calls(const ProbeSequence& probes, std::int64_t head_dim) {
  const Options base = probes.base();
  std::vector<Kind> kinds{{probes.shape(5, 9, head_dim), base, ""}};
  const auto add = [&](std::int64_t q_len, std::int64_t kv_len, const char* name) -> Kind& {
    return kinds.emplace_back(Kind{probes.shape(q_len, kv_len, head_dim, false), base, name});
  };
  if (head_dim == probes.main_dim()) {
    for (const bool of_keys : {false, true}) {
      Shape& s = add(of_keys ? 1 : 1100, of_keys ? 1100 : 1, "long: ").shape;
      s.q_heads = s.kv_heads;
    }
    if (!probes.pinned) {
      Shape& s = add(2, 3, "many heads: ").shape;
      s.batch = probes.can.batch ? 3 : 1;
      s.q_heads = 8;
      s.kv_heads = probes.can.gqa ? 4 : 8;
    }
    if (probes.can.causal && probes.can.cross) {
      add(9, 5, "rows without keys: ").options.causal = true;
    }
    if (probes.can.window && probes.can.cross) {
      Options& options = add(4, 40, "keys that no row sees: ").options;
      options.window_left = options.window_right = 3;
    }
    if (probes.can.softcap) add(5, 9, "softcap: ").options.softcap = 2;
    if (probes.can.scale) add(5, 9, "another scale: ").options.scale = 0.3;
    if (probes.can.dlse) add(5, 9, "dlse: ").dlse = true;
    if (probes.can.v_dim) add(5, 9, "narrow values: ").shape.v_dim = head_dim / 2;
    if (probes.can.wide_values) add(5, 9, "wide values: ").shape.v_dim = 2 * head_dim;
    if (!probes.pinned) add_other_kinds(probes, kinds);
  }
  return kinds;
}

}  // namespace

Finding probe_grad_coverage(ProbeSequence& probes, std::int64_t head_dim) {
  for (const Kind& kind : kinds_of_calls(probes, head_dim)) {
    std::optional<Finding> failure;
    const std::string fault = uncovered(probes, kind, kind.shape.batch > 1, failure);
    if (failure) return *failure;
    if (fault.empty()) continue;
    GradientCall call = call_of(probes, kind);
    const RanGradients ran = run_gradients(probes, call);
    // Written, but to the place of another head.
    const HeadDiagnosis d = ran.result.ok() ? exchanged_gradients(call, ran) : HeadDiagnosis{};
    if (d.stage == FaultStage::none) return probes.finding(FaultStage::coverage, kind.name + fault);
    return probes.finding(d.stage, kind.name + fault + "; " + d.text);
  }
  return {};
}

Finding probe_grad_determinism(ProbeSequence& probes, std::int64_t head_dim) {
  const int most = probes.quick ? 8 : 20;
  for (const auto& [q_len, kv_len] : {std::pair{9, 70}, {70, 40}, {97, 97}, {33, 33}, {20, 35}}) {
    const int times = q_len == 9 ? most : most / 2;
    Shape shape = probes.shape(q_len, kv_len, head_dim, kv_len == 70);
    if (q_len == 97) shape.q_heads = shape.kv_heads;
    Options options = probes.base();
    if (q_len == 33) options.causal = probes.can.causal;
    if (q_len == 33 && options.causal == probes.base().causal) continue;
    const bool has_all = q_len == 20;
    if (has_all) {
      if (probes.can.softcap) options.softcap = 3;
      if (probes.can.window) options.window_left = 20, options.window_right = 9;
      if (probes.can.scale) options.scale = 0.2;
    }
    GradientCall call = gradient_call(probes, shape, options);
    fill_random(call, 1, probes.seed);
    if (has_all && probes.can.dlse) {
      call.dlse.resize(call.dout.size() / static_cast<std::size_t>(shape.v_dim));
      fill_random(call.dlse, 1, probes.seed, 271);
    }
    GradientCall other = call;
    fill_random(other, 1, probes.seed + 1);
    const RanGradients first = run_gradients(probes, call);
    if (auto f = failure_of(probes, first.result, FaultStage::determinism)) return *f;
    if (!first.result.ok()) continue;
    for (int i = 1; i < times; ++i) {
      // Nothing of another call may stay.
      if (i == times / 2) run_only(probes, other, probes.impl.default_setting());
      const GradientResult again = probes.impl.run_backward(call, probes.impl.default_setting());
      if (auto f = failure_of(probes, again, FaultStage::determinism)) return *f;
      if (!again.ok() || again.bits == first.result.bits) continue;
      // Sums in no fixed order differ within rounding; a race does not.
      double worst = -1;
      std::string text;
      for (int g = 0; g < kGradients; ++g) {
        for (std::size_t at = 0; at < again.value[g].size(); ++at) {
          const double a = first.result.value[g][at], b = again.value[g][at];
          if (a == b || (std::isnan(a) && std::isnan(b))) continue;
          const double off =
              std::isnan(a - b) ? INFINITY : std::fabs(a - b) / first.judged[g].bound[at];
          if (off <= worst) continue;
          worst = off;
          text = element_name(call, g, at) + " is " + number(a) + " in the first run and " +
                 number(b) + " in run " + decimal(i + 1) + " of the same call, " + number(off) +
                 " times its bound apart";
        }
      }
      probes.conventions.gradients_vary = true;
      if (probes.deterministic || worst > 2) return probes.finding(FaultStage::determinism, text);
    }
  }
  return {};
}

}  // namespace flashcore::verify
