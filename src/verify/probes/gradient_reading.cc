#include "verify/probes/gradient_reading.h"

#include <algorithm>
#include <cmath>

namespace flashcore::verify {
namespace {

/// Sizes of a call, and the slots of a KV head: the rows of all its query heads, one after the
/// other.
struct Sizes {
  std::int64_t batch, q_heads, kv_heads, rows, keys, head_dim, v_dim, group, slots;

  explicit Sizes(const GradientCall& call) {
    const Tensors& t = call.forward.tensors;
    batch = t.q.shape[0], q_heads = t.q.shape[1], kv_heads = t.k.shape[1];
    rows = t.q.shape[2], keys = t.k.shape[2], head_dim = t.q.shape[3], v_dim = t.v.shape[3];
    group = q_heads / kv_heads;
    slots = group * rows;
  }
  std::int64_t slot(std::int64_t head, std::int64_t row) const { return head % group * rows + row; }
};

Reading blank_reading(int from, const Sizes& s, double scale) {
  Reading r;
  r.from = from;
  r.heads = s.batch * s.q_heads, r.rows = s.rows, r.keys = s.keys;
  r.scale = scale;
  r.head_dim = static_cast<double>(s.head_dim);
  r.v_dim_scale = 1.0 / std::sqrt(static_cast<double>(s.v_dim));
  const auto count = static_cast<std::size_t>(r.heads * r.rows * r.keys);
  for (std::vector<double>* values : {&r.got, &r.want, &r.bound, &r.p, &r.dscore})
    values->assign(count, 0.0);
  r.delta.assign(static_cast<std::size_t>(r.heads * r.rows), 0.0);
  r.lse = r.delta;
  return r;
}

/// Copies element `at` of the gradient to an entry of the reading. `unit` is the value of an entry
/// of 1.
void take(const RanGradients& ran, std::size_t at, std::size_t entry, double unit, Reading& r) {
  r.got[entry] = ran.result.value[r.from][at] / unit;
  r.want[entry] = ran.expected.of(r.from).value[at] / unit;
  r.bound[entry] = ran.judged[r.from].bound[at] / std::fabs(unit);
}

void take_context(const ExpectedGradients& expected, double softcap, Reading& r) {
  for (std::size_t row = 0; row < r.delta.size(); ++row) {
    r.delta[row] = expected.gradients.delta[row];
    r.lse[row] = expected.forward.lse[row];
    const std::vector<double>& p = expected.forward.probabilities[row];
    const std::size_t first = row * static_cast<std::size_t>(r.keys);
    std::copy(p.begin(), p.end(), r.p.begin() + static_cast<std::ptrdiff_t>(first));
    for (std::size_t j = 0; j < p.size(); ++j) {
      const double capped = softcap > 0 ? (std::log(p[j]) + r.lse[row]) / softcap : 0;
      r.dscore[first + j] = p[j] > 0 ? p[j] * (1 - capped * capped) : 0;
    }
  }
}

/// Counts wrong elements in columns without an entry, which should be 0.
void count_moved(const RanGradients& ran, const Sizes& s, std::int64_t score_dims,
                 std::int64_t first_entry, std::int64_t entries, Reading& r) {
  const std::vector<double>& ratio = ran.judged[r.from].ratio;
  for (std::size_t at = 0; at < ratio.size(); ++at) {
    const std::int64_t c = static_cast<std::int64_t>(at) % s.head_dim;
    const bool is_entry = c >= first_entry && c < first_entry + entries;
    if (c >= score_dims && !is_entry && !(ratio[at] <= 1)) ++r.moved;
  }
}

/// Runs a block of a reading. False if it has no result.
bool run_block(ProbeSequence& probes, GradientCall& call, Readings& readings, RanGradients& ran) {
  ran = run_gradients(probes, call);
  if (readings.unwritten.empty()) readings.unwritten = unwritten_elements(ran.result);
  if (ran.result.ok()) return true;
  readings.failure = failure_of(probes, ran.result, FaultStage::unlocalised);
  readings.all.clear();
  return false;
}

}  // namespace

Readings read_p(ProbeSequence& probes, const GradientCall& base) {
  const Sizes s(base);
  Readings readings;
  readings.all.push_back(blank_reading(kDv, s, 1));
  RanGradients ran;
  for (std::int64_t first = 0; first < s.slots; first += s.v_dim) {
    GradientCall call = base;
    std::fill(call.dout.begin(), call.dout.end(), 0.0);
    const auto each_slot = [&](auto visit) {
      for (std::int64_t head = 0; head < s.batch * s.q_heads; ++head) {
        for (std::int64_t i = 0; i < s.rows; ++i) {
          const std::int64_t column = s.slot(head % s.q_heads, i) - first;
          if (column >= 0 && column < s.v_dim) visit(head, i, column);
        }
      }
    };
    each_slot([&](std::int64_t head, std::int64_t i, std::int64_t column) {
      call.dout[static_cast<std::size_t>((head * s.rows + i) * s.v_dim + column)] = 1;
    });
    if (!run_block(probes, call, readings, ran)) return readings;
    Reading& r = readings.all[0];
    if (first == 0) take_context(ran.expected, call.forward.options.softcap, r);
    each_slot([&](std::int64_t head, std::int64_t i, std::int64_t column) {
      const std::int64_t kv_head = head / s.q_heads * s.kv_heads + head % s.q_heads / s.group;
      for (std::int64_t j = 0; j < s.keys; ++j) {
        const auto at = static_cast<std::size_t>((kv_head * s.keys + j) * s.v_dim + column);
        take(ran, at, r.at(head, i, j), 1, r);
      }
    });
  }
  return readings;
}

Readings read_ds(ProbeSequence& probes, const GradientCall& base, std::int64_t score_dims) {
  const Sizes s(base);
  const std::int64_t width = (s.head_dim - score_dims) / 2;
  const double scale =
      base.forward.options.scale.value_or(1.0 / std::sqrt(static_cast<double>(s.head_dim)));
  Readings readings;
  readings.all.push_back(blank_reading(kDq, s, scale));
  readings.all.push_back(blank_reading(kDk, s, scale));
  RanGradients ran;
  for (std::int64_t first = 0; first < std::max(s.keys, s.slots); first += width) {
    GradientCall call = base;
    const Tensors& t = call.forward.tensors;
    // Columns: scores, one-hot keys, one-hot queries.
    const auto set_hot = [&](const TensorView& view, std::int64_t begin, auto index) {
      auto* x = static_cast<double*>(view.data);
      for (std::int64_t row = 0; row < view.shape[0] * view.shape[1] * view.shape[2]; ++row) {
        const std::int64_t hot = index(row / view.shape[2] % view.shape[1], row % view.shape[2]);
        for (std::int64_t c = score_dims; c < s.head_dim; ++c) {
          x[row * s.head_dim + c] =
              hot >= first && hot < first + width && c == begin + hot - first ? 1 : 0;
        }
      }
    };
    set_hot(t.k, score_dims, [](std::int64_t, std::int64_t j) { return j; });
    set_hot(t.q, score_dims + width,
            [&](std::int64_t head, std::int64_t i) { return s.slot(head, i); });
    if (!run_block(probes, call, readings, ran)) return readings;
    Reading &of_dq = readings.all[0], &of_dk = readings.all[1];
    if (first == 0) {
      for (Reading* r : {&of_dq, &of_dk}) {
        take_context(ran.expected, call.forward.options.softcap, *r);
      }
    }
    count_moved(ran, s, score_dims, score_dims, std::min(width, s.keys - first), of_dq);
    count_moved(ran, s, score_dims, score_dims + width, std::min(width, s.slots - first), of_dk);
    for (std::int64_t head = 0; head < s.batch * s.q_heads; ++head) {
      const std::int64_t kv_head = head / s.q_heads * s.kv_heads + head % s.q_heads / s.group;
      for (std::int64_t i = 0; i < s.rows; ++i) {
        const std::int64_t slot = s.slot(head % s.q_heads, i) - first;
        for (std::int64_t j = 0; j < s.keys; ++j) {
          const std::size_t entry = of_dq.at(head, i, j);
          if (j >= first && j < first + width) {
            const std::int64_t column = score_dims + j - first;
            take(ran, static_cast<std::size_t>((head * s.rows + i) * s.head_dim + column), entry,
                 scale, of_dq);
          }
          if (slot >= 0 && slot < width) {
            const std::int64_t column = score_dims + width + slot;
            take(ran, static_cast<std::size_t>((kv_head * s.keys + j) * s.head_dim + column), entry,
                 scale, of_dk);
          }
        }
      }
    }
  }
  return readings;
}

std::size_t worst_entry(const Reading& r) {
  std::size_t worst = 0;
  double most = -1;
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    double ratio = std::fabs(r.got[e] - r.want[e]) / std::max(r.bound[e], 1e-300);
    if (!std::isfinite(r.got[e])) ratio = INFINITY;
    if (ratio > most) most = ratio, worst = e;
  }
  return worst;
}

bool Reading::wrong(std::size_t entry) const {
  const double error = std::fabs(got[entry] - want[entry]);
  return !(error == 0 || error <= bound[entry]);
}

}  // namespace flashcore::verify
