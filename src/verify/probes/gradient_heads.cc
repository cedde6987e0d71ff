#include "verify/probes/gradient_heads.h"

#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"

namespace flashcore::verify {
namespace {

/// The inputs of a dq. Each may be of another head.
enum Input { kQ, kScoreK, kDqK, kV, kDpDout, kDeltaDout, kOut, kLse, kInputs };

/// One mistake: these inputs are of another head.
struct Mistake {
  unsigned inputs;
  bool of_kv;  ///< the other head is a KV head
  FaultStage stage;
  const char* name;
};

constexpr unsigned bit(Input input) { return 1u << input; }
constexpr Mistake kMistakes[] = {
    {bit(kScoreK) | bit(kDqK) | bit(kV), true, FaultStage::layout, "K and V"},
    {bit(kScoreK) | bit(kDqK), true, FaultStage::layout, "K"},
    {bit(kScoreK), true, FaultStage::dv, "K in the scores"},
    {bit(kDqK), true, FaultStage::dq, "K in the product of dS and K"},
    {bit(kV), true, FaultStage::dp, "V in dP"},
    {bit(kQ), false, FaultStage::layout, "Q"},
    {bit(kDpDout) | bit(kDeltaDout), false, FaultStage::layout, "dout"},
    {bit(kDpDout), false, FaultStage::dp, "dout in dP"},
    {bit(kDeltaDout), false, FaultStage::delta, "dout in delta"},
    {bit(kOut), false, FaultStage::delta, "out in delta"},
    {bit(kDeltaDout) | bit(kOut), false, FaultStage::delta, "delta"},
    {bit(kLse), false, FaultStage::dv, "the LSE"},
    {bit(kQ) | bit(kDpDout) | bit(kDeltaDout) | bit(kOut) | bit(kLse), false, FaultStage::dq, "dS"},
};

/// Relative error of a head that is explained. Another explanation of random numbers has one
/// near 1.
constexpr double kExplained = 0.05;

struct Sizes {
  std::size_t heads, kv_heads, rows, keys, head_dim, v_dim;  // heads of all batches
  double scale;

  explicit Sizes(const GradientCall& call) {
    const Tensors& t = call.forward.tensors;
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    heads = size(t.q.shape[0] * t.q.shape[1]), kv_heads = size(t.k.shape[0] * t.k.shape[1]);
    rows = size(t.q.shape[2]), keys = size(t.k.shape[2]);
    head_dim = size(t.q.shape[3]), v_dim = size(t.v.shape[3]);
    scale = call.forward.options.scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  }
};

double dot(const double* a, const double* b, std::size_t count) {
  double sum = 0;
  for (std::size_t c = 0; c < count; ++c) sum += a[c] * b[c];
  return sum;
}

const double* row_of(const TensorView& t, std::size_t row, std::size_t columns) {
  return static_cast<const double*>(t.data) + row * columns;
}

/// dq of a head from inputs of the heads `from`.
std::vector<double> dq_of(const GradientCall& call, const RanGradients& ran, const Sizes& s,
                          const std::size_t (&from)[kInputs]) {
  const Tensors& t = call.forward.tensors;
  std::vector<double> dq(s.rows * s.head_dim, 0.0);
  for (std::size_t i = 0; i < s.rows; ++i) {
    const auto row = [&](Input input) { return from[input] * s.rows + i; };
    const double delta = dot(call.dout.data() + row(kDeltaDout) * s.v_dim,
                             row_of(t.out, row(kOut), s.v_dim), s.v_dim);
    for (std::size_t j = 0; j < s.keys; ++j) {
      const auto key = [&](Input input) { return from[input] * s.keys + j; };
      const double score = s.scale * dot(row_of(t.q, row(kQ), s.head_dim),
                                         row_of(t.k, key(kScoreK), s.head_dim), s.head_dim);
      const double dp =
          dot(call.dout.data() + row(kDpDout) * s.v_dim, row_of(t.v, key(kV), s.v_dim), s.v_dim);
      const double ds = std::exp(score - ran.expected.forward.lse[row(kLse)]) * (dp - delta);
      const double* k = row_of(t.k, key(kDqK), s.head_dim);
      for (std::size_t c = 0; c < s.head_dim; ++c) dq[i * s.head_dim + c] += s.scale * ds * k[c];
    }
  }
  return dq;
}

/// The distance of two vectors relative to the second.
double distance(const double* got, const double* want, std::size_t count) {
  double error2 = 0, want2 = 0;
  for (std::size_t c = 0; c < count; ++c) {
    error2 += (got[c] - want[c]) * (got[c] - want[c]);
    want2 += want[c] * want[c];
  }
  return want2 > 0 ? std::sqrt(error2 / want2) : INFINITY;
}

bool head_is_wrong(const RanGradients& ran, int g, std::size_t head, std::size_t per_head) {
  for (std::size_t i = head * per_head; i < (head + 1) * per_head; ++i) {
    if (!(ran.judged[g].ratio[i] <= 1)) return true;
  }
  return false;
}

/// False for a head that was not written.
bool is_finite(const RanGradients& ran, int g, std::size_t head, std::size_t per_head) {
  const double* x = ran.result.value[g].data() + head * per_head;
  return std::all_of(x, x + per_head, [](double y) { return std::isfinite(y); });
}

/// The head whose tensor explains dq of a wrong head; -1: none.
std::int64_t other_head(const GradientCall& call, const RanGradients& ran, const Sizes& s,
                        const Mistake& mistake, std::size_t head) {
  const std::size_t own_kv = head / (s.heads / s.kv_heads);
  const std::size_t per_head = s.rows * s.head_dim;
  const double* got = ran.result.value[kDq].data() + head * per_head;
  for (std::size_t other = 0; other < (mistake.of_kv ? s.kv_heads : s.heads); ++other) {
    if (other == (mistake.of_kv ? own_kv : head)) continue;
    std::size_t from[kInputs];
    for (int input = 0; input < kInputs; ++input) {
      const bool of_kv = input == kScoreK || input == kDqK || input == kV;
      from[input] = (mistake.inputs >> input & 1) != 0 ? other : of_kv ? own_kv : head;
    }
    const std::vector<double> dq = dq_of(call, ran, s, from);
    if (distance(got, dq.data(), per_head) < kExplained) return static_cast<std::int64_t>(other);
  }
  return -1;
}

/// The head of gradient `of` whose elements all match a head of gradient g; -1: none.
std::int64_t head_that_matches(const RanGradients& ran, int g, int of, std::size_t head,
                               std::size_t per_head) {
  const std::vector<double>&want = ran.expected.of(of).value, &got = ran.result.value[g];
  for (std::size_t other = 0; other < want.size() / per_head; ++other) {
    if (of == g && other == head) continue;
    bool same = true;
    for (std::size_t i = 0; i < per_head && same; ++i) {
      const double bound = ran.judged[of].bound[other * per_head + i];
      same = std::fabs(got[head * per_head + i] - want[other * per_head + i]) <= 2 * bound;
    }
    if (same) return static_cast<std::int64_t>(other);
  }
  return -1;
}

/// "dk of head 1 holds dk of head 3", if every wrong head of g holds one of `of`.
std::string held_by(const GradientCall& call, const RanGradients& ran, int g, int of) {
  const Sizes s(call);
  const std::size_t heads[] = {s.heads, s.kv_heads, s.kv_heads};
  const std::size_t per_head = ran.judged[g].ratio.size() / heads[g];
  if (per_head != ran.judged[of].ratio.size() / heads[of]) return "";
  std::string text;
  for (std::size_t head = 0; head < heads[g]; ++head) {
    if (!head_is_wrong(ran, g, head, per_head) || !is_finite(ran, g, head, per_head)) continue;
    const std::int64_t other = head_that_matches(ran, g, of, head, per_head);
    if (other < 0) return "";
    if (text.empty()) {
      text = std::string(kGradientNames[g]) + " of head " + decimal(head) +
             " (counted over all batches) holds " + kGradientNames[of] + " of head " +
             decimal(other);
    }
  }
  return text;
}

/// A rule that gives a head another one. Heads count over all batches.
struct HeadMap {
  std::size_t batch, heads, group;  // heads of a batch
  int rule;

  static constexpr int kRules = 12;
  std::size_t operator()(std::size_t head) const {
    const std::size_t b = head / heads, h = head % heads;
    switch (rule) {
      case 0: return b * heads;
      case 1: return b * heads + h / group;
      case 2: return b * heads + h / group * group;
      case 3: return b * heads + heads - 1 - h;
      case 4: return h;
      case 5: return (batch - 1 - b) * heads + h;
      case 6: return b * heads + h % (heads / group);
      default: return b * heads + (h + static_cast<std::size_t>(rule - 6)) % heads;
    }
  }
};

/// dv of all KV heads with dout, or with P, of other heads; dk with Q, or with dS, of other heads.
std::vector<double> sum_of(const GradientCall& call, const RanGradients& ran, const Sizes& s, int g,
                           const HeadMap& map, bool of_weights) {
  const std::size_t columns = g == kDv ? s.v_dim : s.head_dim;
  const double* operands =
      g == kDv ? call.dout.data() : static_cast<const double*>(call.forward.tensors.q.data);
  std::vector<double> sum(s.kv_heads * s.keys * columns, 0.0);
  for (std::size_t head = 0; head < s.heads; ++head) {
    for (std::size_t i = 0; i < s.rows; ++i) {
      const std::size_t mapped = map(head) * s.rows + i;
      const std::size_t row = of_weights ? mapped : head * s.rows + i;
      const std::vector<double>& weights =
          g == kDv ? ran.expected.forward.probabilities[row] : ran.expected.gradients.ds[row];
      const double* x = operands + (of_weights ? head * s.rows + i : mapped) * columns;
      for (std::size_t j = 0; j < s.keys; ++j) {
        const double weight = g == kDv ? weights[j] : s.scale * weights[j];
        double* to = sum.data() + (head / (s.heads / s.kv_heads) * s.keys + j) * columns;
        for (std::size_t c = 0; c < columns; ++c) to[c] += weight * x[c];
      }
    }
  }
  return sum;
}

}  // namespace

HeadDiagnosis operand_of_another_head(const GradientCall& call, const RanGradients& ran) {
  const Sizes s(call);
  for (const int g : {kDv, kDk}) {
    const int other = g == kDv ? kDk : kDv;
    if (ran.judged[g].ok() || !ran.judged[kDq].ok() || !ran.judged[other].ok()) continue;
    HeadMap map{0, static_cast<std::size_t>(call.forward.tensors.q.shape[1]), s.heads / s.kv_heads,
                0};
    map.batch = s.heads / map.heads;
    for (; map.rule < HeadMap::kRules; ++map.rule) {
      for (const bool of_weights : {false, true}) {
        const std::vector<double> sum = sum_of(call, ran, s, g, map, of_weights);
        if (!(distance(ran.result.value[g].data(), sum.data(), sum.size()) < kExplained)) continue;
        const char* operand = g == kDv ? (of_weights ? "P" : "dout") : of_weights ? "dS" : "Q";
        return {
            g == kDv ? FaultStage::dv : FaultStage::dk,
            std::string(kGradientNames[g]) + " is the product with " + operand + " of other heads"};
      }
    }
  }
  return {};
}

HeadDiagnosis tensor_of_another_head(const GradientCall& call, const RanGradients& ran) {
  const Sizes s(call);
  const std::size_t per_head = s.rows * s.head_dim;
  for (const Mistake& mistake : kMistakes) {
    HeadDiagnosis found;
    for (std::size_t head = 0; head < s.heads; ++head) {
      if (!head_is_wrong(ran, kDq, head, per_head)) continue;
      const std::int64_t other = other_head(call, ran, s, mistake, head);
      if (other < 0) {
        found = {};
        break;
      }
      if (found.stage != FaultStage::none) continue;
      found = {mistake.stage, "dq of head " + decimal(head) +
                                  " (counted over all batches) is that with " + mistake.name +
                                  " of " + (mistake.of_kv ? "KV head " : "head ") + decimal(other)};
    }
    if (found.stage != FaultStage::none) return found;
  }
  return {};
}

HeadDiagnosis exchanged_gradients(const GradientCall& call, const RanGradients& ran) {
  for (const int g : {kDq, kDk, kDv}) {
    if (ran.judged[g].ok()) continue;
    for (const int of : {g, static_cast<int>(kDq), static_cast<int>(kDk), static_cast<int>(kDv)}) {
      if (const std::string text = held_by(call, ran, g, of); !text.empty()) {
        return {FaultStage::layout, text};
      }
    }
  }
  return {};
}

}  // namespace flashcore::verify
