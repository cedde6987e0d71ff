#include "verify/gradient_call.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "verify/inputs/compare_bwd.h"
#include "verify/inputs/decimal.h"
#include "verify/inputs/lengths.h"

namespace flashcore::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// Rows and columns of a gradient in the report.
constexpr std::int64_t kEvidenceRows = 48, kEvidenceColumns = 96;
/// The elements of a row share the error of its dS, so their mean needs several rows.
constexpr std::int64_t kRowsOfMean = 8;

std::size_t count_of(const TensorView& t) {
  std::size_t count = 1;
  for (int i = 0; i < t.rank; ++i) count *= static_cast<std::size_t>(t.shape[i]);
  return count;
}

const TensorView& tensor_of(const GradientCall& call, int gradient) {
  const Tensors& t = call.forward.tensors;
  return gradient == kDq ? t.q : gradient == kDk ? t.k : t.v;
}

void round_to(Format format, double* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) values[i] = rounded(format, values[i]);
}

void round_tensor(Format format, const TensorView& t) {
  round_to(format, static_cast<double*>(t.data), count_of(t));
}

Problem problem_of(const GradientCall& call) {
  Options options = call.forward.options;
  options.num_splits = 0;
  return *make_problem(call.forward.tensors, options);
}

TensorView like(const TensorView& t, const std::vector<double>& values) {
  TensorView view = t;
  view.data = const_cast<double*>(values.data());  // the oracle only reads
  return view;
}

reference::GradientArithmetic arithmetic_of(const ProbeSequence& probes,
                                            const reference::Oracle& forward) {
  const Arithmetic a = probes.impl.arithmetic();
  reference::GradientArithmetic g{a.sum_unit, false, a.score_unit, a.score_unit, {}};
  // The implementation may use the out of its own forward pass.
  g.out_error.resize(forward.out.size());
  const auto v_dim = static_cast<std::size_t>(forward.v_dim);
  for (std::size_t at = 0; at < g.out_error.size(); ++at) {
    g.out_error[at] = out_bound(forward, at / v_dim, at % v_dim, a);
  }
  return g;
}

JudgedGradient judge(const reference::Gradient& want, const std::vector<double>& got,
                     const TensorView& shape, const Arithmetic& arithmetic) {
  JudgedGradient j;
  j.bound.resize(got.size());
  j.ratio.resize(got.size());
  const auto per_head = static_cast<std::size_t>(shape.shape[2] * shape.shape[3]);
  double error2 = 0, want2 = 0, ratio2 = 0;
  for (std::size_t at = 0; at < got.size(); ++at) {
    j.bound[at] = gradient_bound(want, at, arithmetic);
    const double error = std::fabs(got[at] - want.value[at]);
    double& ratio = j.ratio[at];
    if (!std::isfinite(got[at])) {
      ratio = kInfinity;
      ++j.non_finite;
    } else {
      ratio = error == 0 ? 0 : error / j.bound[at];
      error2 += error * error;
      want2 += want.value[at] * want.value[at];
      ratio2 += ratio * ratio;
    }
    if (!(ratio <= 1)) ++j.wrong;
    if (ratio > j.worst) {
      j.worst = ratio;
      j.worst_at = at;
    }
    if ((at + 1) % per_head != 0) continue;
    if (shape.shape[2] >= kRowsOfMean) {
      j.rms = std::max(j.rms, 2 * std::sqrt(ratio2 / static_cast<double>(per_head)));
    }
    ratio2 = 0;
  }
  j.relative_error = want2 > 0 ? std::sqrt(error2 / want2) : std::sqrt(error2);
  return j;
}

}  // namespace

GradientCall gradient_call(const ProbeSequence& probes, const Shape& shape,
                           const Options& options) {
  GradientCall call;
  call.forward = probes.call(shape, options);
  call.forward.options.num_splits = 0;
  call.forward.place(&Tensors::lse, DType::f64, {shape.batch, shape.q_heads, shape.q_len});
  call.dout.assign(count_of(call.forward.tensors.out), 0.0);
  return call;
}

std::vector<std::int64_t> gradient_lengths(const ProbeSequence& probes) {
  const std::int64_t step = probes.can.length_step;
  std::vector<std::int64_t> lengths = lengths_to_try(probes.quick, step);
  if (!probes.quick) return lengths;
  std::erase_if(lengths, [&](std::int64_t n) {
    const bool at_tile = n % 16 <= 1 || n % 16 == 15;
    return n > 20 * step && n != 100 && (!at_tile || n > 257 * step);
  });
  return lengths;
}

void fill_random(std::vector<double>& values, double sigma, std::uint64_t seed,
                 std::uint64_t stream) {
  Random random(seed, stream);
  for (double& x : values) x = sigma * random.normal();
}

void fill_random(GradientCall& call, double sigma, std::uint64_t seed) {
  const Tensors& t = call.forward.tensors;
  fill_random(t.q, sigma, seed, 201);
  fill_random(t.k, sigma, seed, 202);
  fill_random(t.v, 1, seed, 203);
  fill_random(call.dout, 1, seed, 204);
}

void shift_scores(GradientCall& call, double shift) {
  const Tensors& t = call.forward.tensors;
  const double root = std::sqrt(static_cast<double>(t.q.shape[3]));
  for (const TensorView* view : {&t.q, &t.k}) {
    auto* x = static_cast<double*>(view->data);
    for (std::size_t at = 0; at < count_of(*view); at += static_cast<std::size_t>(t.q.shape[3])) {
      x[at] = view == &t.q ? shift : root;
    }
  }
}

int RanGradients::worst() const {
  int worst = kDv;
  for (const int g : {kDv, kDq, kDk}) {
    if (judged[g].worst > judged[worst].worst) worst = g;
  }
  if (judged[worst].worst > 1) return worst;
  for (const int g : {kDv, kDq, kDk}) {
    if (!judged[g].ok()) return g;
  }
  return worst;
}

reference::Oracle prepare(const ProbeSequence& probes, GradientCall& call) {
  const ImplementationFormats& formats = probes.impl.formats();
  const Tensors& t = call.forward.tensors;
  for (const TensorView* view : {&t.q, &t.k, &t.v}) round_tensor(formats.dtype, *view);
  round_to(formats.out, call.dout.data(), call.dout.size());
  const Format wide = formats.dtype == Format::f64 ? Format::f64 : Format::f32;
  round_to(wide, call.dlse.data(), call.dlse.size());
  const Problem problem = problem_of(call);
  reference::Oracle forward =
      reference::compute(problem, t, reference::all_rows(problem, t), true, 1);
  std::copy(forward.out.begin(), forward.out.end(), static_cast<double*>(t.out.data));
  round_tensor(formats.out, t.out);
  auto* lse = static_cast<double*>(t.lse.data);
  const double base = probes.conventions.lse_base_2 ? std::log(2.0) : 1.0;
  for (std::size_t r = 0; r < forward.lse.size(); ++r) {
    lse[r] = std::isinf(forward.lse[r]) ? probes.conventions.empty_lse : forward.lse[r] / base;
  }
  round_tensor(wide, t.lse);
  return forward;
}

GradientResult run_only(ProbeSequence& probes, GradientCall& call, const Setting& setting) {
  prepare(probes, call);
  return probes.impl.run_backward(call, setting);
}

RanGradients run_gradients(ProbeSequence& probes, GradientCall& call, const Setting& setting) {
  RanGradients ran;
  ran.expected.forward = prepare(probes, call);
  ran.result = probes.impl.run_backward(call, setting);
  if (!ran.result.ok()) return ran;
  const Tensors& t = call.forward.tensors;
  Gradients given;
  given.dout = like(t.out, call.dout);
  if (!call.dlse.empty()) given.dlse = like(t.lse, call.dlse);
  ran.expected.gradients = reference::compute_gradients(problem_of(call), t, given,
                                                        arithmetic_of(probes, ran.expected.forward),
                                                        ran.expected.forward, true);
  Arithmetic arithmetic = probes.impl.arithmetic();
  arithmetic.out_unit = unit_of(probes.impl.formats().dtype);
  arithmetic.out_smallest = smallest_of(probes.impl.formats().dtype);
  for (int g = 0; g < kGradients; ++g) {
    ran.judged[g] = judge(ran.expected.of(g), ran.result.value[g], tensor_of(call, g), arithmetic);
  }
  return ran;
}

bool are_few_large_errors(std::vector<double> ratio) {
  constexpr double kLarge = 32;
  const auto wrong = std::partition(ratio.begin(), ratio.end(), [](double x) { return x <= 1; });
  if (2 * (ratio.end() - wrong) >= static_cast<std::ptrdiff_t>(ratio.size())) return false;
  const auto middle = wrong + (ratio.end() - wrong) / 2;
  if (middle == ratio.end()) return false;
  std::nth_element(wrong, middle, ratio.end());
  return *middle > kLarge;
}

bool is_imprecise(const JudgedGradient& j) {
  constexpr double kNoise = 0x1p-5;
  return j.non_finite == 0 && j.relative_error < kNoise && !are_few_large_errors(j.ratio);
}

std::string element_name(const GradientCall& call, int gradient, std::size_t at) {
  const TensorView& t = tensor_of(call, gradient);
  const auto heads = static_cast<std::size_t>(t.shape[1]),
             rows = static_cast<std::size_t>(t.shape[2]),
             columns = static_cast<std::size_t>(t.shape[3]);
  return std::string(kGradientNames[gradient]) + " of batch " +
         decimal(at / columns / rows / heads) + ", head " + decimal(at / columns / rows % heads) +
         (gradient == kDq ? ", row " : ", key ") + decimal(at / columns % rows) + ", column " +
         decimal(at % columns);
}

std::string worst_element(const GradientCall& call, const RanGradients& ran, int gradient) {
  const JudgedGradient& j = ran.judged[gradient];
  const std::size_t at = j.worst_at;
  std::string text = element_name(call, gradient, at) + " is " +
                     number(ran.result.value[gradient][at]) + " instead of " +
                     number(ran.expected.of(gradient).value[at]);
  if (j.wrong == 0) {
    return text + "; no element exceeds its bound, but the RMS error of a head is " +
           number(j.rms) + " times half of it";
  }
  return text + ", off by " + number(j.worst) + " times its bound; " + decimal(j.wrong) + " of " +
         decimal(j.ratio.size()) + " are wrong";
}

std::string unwritten_elements(const GradientResult& result) {
  for (int g = 0; g < kGradients; ++g) {
    if (result.unwritten[g] == 0) continue;
    return decimal(result.unwritten[g]) + " of " + decimal(result.value[g].size()) +
           " elements of " + kGradientNames[g] + " are never written";
  }
  return "";
}

bool outranks_coverage(FaultStage stage) {
  return stage == FaultStage::layout || stage == FaultStage::tail || stage == FaultStage::bounds ||
         stage == FaultStage::determinism;
}

Finding gradient_finding(const ProbeSequence& probes, FaultStage stage, std::string detail,
                         const GradientCall& call, const RanGradients& ran, int gradient) {
  const std::string unwritten = unwritten_elements(ran.result);
  if (!unwritten.empty() && stage != FaultStage::coverage && !outranks_coverage(stage)) {
    stage = FaultStage::coverage;
    detail = unwritten + ": " + detail;
  }
  Finding f = probes.finding(stage, std::move(detail));
  f.call = describe(call);
  const TensorView& t = tensor_of(call, gradient);
  Evidence& e = f.evidence;
  e.title = std::string(kGradientNames[gradient]) + ": " + f.call;
  e.heads = t.shape[0] * t.shape[1];
  e.rows = t.shape[2];
  const auto columns = static_cast<std::size_t>(t.shape[3]),
             rows = static_cast<std::size_t>(e.rows);
  e.error.assign(static_cast<std::size_t>(e.heads) * rows, 0.0);
  e.by_column.assign(columns, 0.0);
  const JudgedGradient& j = ran.judged[gradient];
  for (std::size_t at = 0; at < j.ratio.size(); ++at) {
    const double ratio = std::min(j.ratio[at], 1e30);
    e.error[at / columns] = std::max(e.error[at / columns], ratio);
    e.by_column[at % columns] = std::max(e.by_column[at % columns], ratio);
  }
  e.p_rows = std::min(e.rows, kEvidenceRows);
  e.p_columns = std::min(t.shape[3], kEvidenceColumns);
  const std::size_t head = j.worst_at / columns / rows;
  for (std::int64_t i = 0; i < e.p_rows; ++i) {
    for (std::int64_t c = 0; c < e.p_columns; ++c) {
      const std::size_t at =
          (head * rows + static_cast<std::size_t>(i)) * columns + static_cast<std::size_t>(c);
      e.p_got.push_back(ran.result.value[gradient][at]);
      e.p_want.push_back(ran.expected.of(gradient).value[at]);
    }
  }
  return f;
}

std::optional<Finding> failure_of(const ProbeSequence& probes, const GradientResult& result,
                                  FaultStage stage) {
  CallResult as_forward;
  static_cast<CallOutcome&>(as_forward) = result;
  return failure_of(probes, as_forward, stage);
}

}  // namespace flashcore::verify
