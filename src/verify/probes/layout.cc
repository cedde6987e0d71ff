// Probes layout and key_layout: with one key O = V at any score, so V encodes its own address.
#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probe_sequence.h"

namespace flashcore::verify {
namespace {

/// Digits are 0 to 7, stored as 1 to 8: exact in every format.
constexpr std::int64_t kBase = 8;

struct Field {
  const char* name;
  std::int64_t (*digit)(std::int64_t b, std::int64_t h, std::int64_t c);
};
const Field kFields[] = {
    {"batch", [](std::int64_t b, std::int64_t, std::int64_t) { return b % kBase; }},
    {"KV head", [](std::int64_t, std::int64_t h, std::int64_t) { return h % kBase; }},
    {"column", [](std::int64_t, std::int64_t, std::int64_t c) { return c % kBase; }},
    {"column", [](std::int64_t, std::int64_t, std::int64_t c) { return c / kBase % kBase; }},
    {"column", [](std::int64_t, std::int64_t, std::int64_t c) { return c / kBase / kBase; }}};
constexpr std::size_t kFirstColumnField = 2;

/// Tolerance of an output v: roundings of P and of the output. P sums to 1, so 8-bit P is exact.
double tolerance(const ProbeSequence& probes, double v) {
  const Arithmetic a = probes.impl.arithmetic();
  return v * (2 * a.out_unit + 4 * std::min(a.p_unit, 0x1p-8) + 0x1p-20);
}

HostCall one_key_call(const ProbeSequence& probes, const Shape& shape) {
  HostCall call = probes.call(shape);
  fill_random(call.tensors.q, 1, probes.seed, 41);
  fill_random(call.tensors.k, 1, probes.seed, 42);
  return call;
}

/// V = 1: the output is 1 for any address of V. One key is too few to explain another value, so
/// probe_uniform explains it.
Finding check_ones(ProbeSequence& probes, const Shape& shape) {
  HostCall call = one_key_call(probes, shape);
  fill(call.tensors.v, [](auto, auto, auto, auto) { return 1.0; });
  const CallResult result = probes.impl.run(call);
  if (auto f = failure_of(probes, result, FaultStage::layout)) return *f;
  if (!result.ok()) return {};
  for (std::size_t at = 0; at < result.out.size(); ++at) {
    if (std::fabs(result.out[at] - 1) <= tolerance(probes, 1)) continue;
    if (Finding f = probe_uniform(probes, shape.head_dim); f.found()) return f;
    const auto v_dim = static_cast<std::size_t>(call.tensors.v.shape[3]);
    return probes.finding(FaultStage::sum,
                          "one key, V = 1: the output is " + number(result.out[at]) + " at " +
                              row_name(call, at / v_dim) + " instead of 1: P is not normalised");
  }
  return {};
}

std::string strides_name(MemoryLayout layout) {
  switch (layout) {
    case MemoryLayout::rows_first: return "[batch, len, heads, dim] memory: ";
    case MemoryLayout::padded: return "padded rows and heads: ";
    default: return "";
  }
}

/// Stage of a wrong column order: column c of the output is column source[row][c] of V. Wrong
/// strides move all rows equally; exchanged fragments of P·V differ between and within rows.
FaultStage column_stage(const std::vector<std::vector<std::int64_t>>& source, std::int64_t v_dim) {
  bool same_in_all_rows = true, shifted = true;
  for (const std::vector<std::int64_t>& row : source) {
    if (row != source.front()) same_in_all_rows = false;
    const std::int64_t shift = (row[0] + v_dim) % v_dim;
    for (std::int64_t c = 0; c < v_dim; ++c) {
      if ((row[static_cast<std::size_t>(c)] - c + v_dim) % v_dim != shift) shifted = false;
    }
  }
  return same_in_all_rows || shifted ? FaultStage::layout : FaultStage::pv;
}

/// Reads all fields in one memory layout.
Finding check_fields(ProbeSequence& probes, const Shape& shape, const Setting& setting) {
  std::vector<std::vector<std::int64_t>> digits;  // per field, per output element
  std::int64_t group = shape.q_heads / shape.kv_heads;
  HostCall call = one_key_call(probes, shape);
  const std::string prefix =
      strides_name(setting.inputs != MemoryLayout{} ? setting.inputs : setting.out);
  const auto v_dim = static_cast<std::size_t>(shape.v_dim);
  for (std::size_t f = 0; f < std::size(kFields); ++f) {
    fill(call.tensors.v, [&](std::int64_t b, std::int64_t h, auto, std::int64_t c) {
      return static_cast<double>(1 + kFields[f].digit(b, h, c));
    });
    const CallResult result = probes.impl.run(call, setting);
    if (auto failed = failure_of(probes, result, FaultStage::layout)) return *failed;
    if (!result.ok()) return {};
    std::vector<std::int64_t> read(result.out.size());
    for (std::size_t at = 0; at < read.size(); ++at) {
      const std::size_t row = at / v_dim, head = row / static_cast<std::size_t>(shape.q_len);
      const auto b = static_cast<std::int64_t>(head) / shape.q_heads;
      const auto h = static_cast<std::int64_t>(head) % shape.q_heads;
      const auto c = static_cast<std::int64_t>(at % v_dim);
      const double nearest = std::round(result.out[at]);
      const std::int64_t want = kFields[f].digit(b, h / group, c);
      read[at] = static_cast<std::int64_t>(nearest) - 1;
      const bool is_digit = std::fabs(result.out[at] - nearest) <= tolerance(probes, nearest) &&
                            nearest >= 1 && nearest <= kBase;
      if (is_digit && (read[at] == want || f >= kFirstColumnField)) continue;
      const std::string seen =
          is_digit ? "is " + std::string(kFields[f].name) + " " + decimal(read[at]) + "'s"
                   : "is " + number(result.out[at]) + ", which is not a value of V";
      return probes.finding(FaultStage::layout, prefix + "V of " + row_name(call, row) + " " +
                                                    seen + "; wanted " + kFields[f].name + " " +
                                                    decimal(want) + "'s");
    }
    digits.push_back(std::move(read));
  }
  std::vector<std::vector<std::int64_t>> source(digits[0].size() / v_dim);
  std::optional<std::size_t> wrong;
  for (std::size_t at = 0; at < digits[0].size(); ++at) {
    const std::int64_t from = digits[2][at] + kBase * digits[3][at] + kBase * kBase * digits[4][at];
    source[at / v_dim].push_back(from);
    if (from != static_cast<std::int64_t>(at % v_dim) && !wrong) wrong = at;
  }
  if (!wrong) return {};
  const FaultStage stage = column_stage(source, shape.v_dim);
  return probes.finding(
      stage, prefix + "output column " + decimal(*wrong % v_dim) + " of " +
                 row_name(call, *wrong / v_dim) + " holds column " +
                 decimal(source[*wrong / v_dim][*wrong % v_dim]) +
                 (stage == FaultStage::pv ? " of V, other rows differ: fragments of P·V are "
                                            "exchanged"
                                          : " of V"));
}

}  // namespace

Finding probe_layout(ProbeSequence& probes, std::int64_t head_dim) {
  const Shape shape = probes.shape(40, 1, head_dim);
  if (Finding f = check_ones(probes, shape); f.found()) return f;
  const Setting native = probes.impl.default_setting();
  if (Finding f = check_fields(probes, shape, native); f.found()) return f;
  if (Finding f = check_fields(probes, probes.shape(1, 1, head_dim), native); f.found()) return f;
  if (!probes.can.strides) return {};
  const Shape short_shape = probes.shape(9, 1, head_dim);
  for (const MemoryLayout layout :
       {MemoryLayout::heads_first, MemoryLayout::rows_first, MemoryLayout::padded}) {
    for (const bool of_out : {false, true}) {
      Setting setting = native;
      (of_out ? setting.out : setting.inputs) = layout;
      if (layout == native.inputs) continue;
      if (Finding f = check_fields(probes, short_shape, setting); f.found()) return f;
    }
  }
  return {};
}

/// Q = 0 and several keys with the same V within a head: O = V if all keys are read from the
/// correct head.
Finding probe_key_layout(ProbeSequence& probes, std::int64_t head_dim) {
  std::vector<Setting> settings{probes.impl.default_setting()};
  if (probes.can.strides) {
    for (const MemoryLayout a : {MemoryLayout::rows_first, MemoryLayout::padded}) {
      settings.push_back(settings[0]);
      settings.back().inputs = settings.back().out = a;
    }
  }
  for (const Setting& setting : settings) {
    const Shape shape = probes.shape(5, 19, head_dim);
    HostCall call = probes.call(shape);
    fill_random(call.tensors.k, 1, probes.seed, 43);
    fill(call.tensors.v, [&](std::int64_t b, std::int64_t h, auto, std::int64_t c) {
      return static_cast<double>(1 + (2 * b + h + c) % kBase);
    });
    const CallResult result = probes.impl.run(call, setting);
    if (auto f = failure_of(probes, result, FaultStage::layout)) return *f;
    if (!result.ok()) continue;
    const Judged judged = probes.judge(call, result);
    if (judged.ok()) continue;
    return probes.finding(
        FaultStage::layout,
        strides_name(setting.inputs) + "V is the same for all keys of a head, but " +
            row_name(call, judged.worst_at / static_cast<std::size_t>(shape.v_dim)) + " has " +
            number(result.out[judged.worst_at]) + " instead of " +
            number(judged.oracle.out[judged.worst_at]) +
            ": keys are read from other heads or addresses",
        call, result, judged);
  }
  return {};
}

}  // namespace flashcore::verify
