// Shows that each mutant of the third and fourth table of the backward pass, and each unseen one,
// is wrong on a legal problem of modest size, in each of its dtypes, and that the correct backward
// pass is not. It uses neither the verifier nor its inputs.
//
//   flashcore_check_frozen_mutants [--show] [--unguarded]
//
// A gradient is wrong if an element is off by more than 16 roundings of the largest one of its
// tensor (f32: 3e-5 of it). A mutant of `determinism` must give such differences between calls, one
// of `bounds` must change memory that is not a gradient, or read it, and the others neither.
// --unguarded leaves mutants of `bounds` out and gives tensors no more memory than they have, so
// that a sanitizer sees every other access.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>

#include "mutants/bwd_faults.h"
#include "mutants/frozen_backward.h"

namespace flashcore::mutants {
namespace {

using verify::Format;

constexpr double kDefault = std::numeric_limits<double>::quiet_NaN();

struct Problem {
  const char* name;
  std::int64_t batch = 1, heads = 1, kv_heads = 1, m = 1, n = 1, d = 16, dv_dim = 16;
  bool causal = false;
  std::int64_t left = -1, right = -1;
  double softcap = 0, scale = kDefault;
  double size_of_q = 1, size_of_dout = 1;
  bool has_dlse = false;  ///< of size 1
  std::int64_t row_gap = 0, column_stride = 1;
  double mean_of_k = 0;
  bool opposed = false;  ///< q and k have different signs: all scores are negative
  bool first_query_is_0 = false;
};

/// A tensor whose elements stand among bytes of 0xff: NaN in all formats.
class Block {
 public:
  Block(std::vector<std::int64_t> shape, Format format, std::int64_t row_gap = 0,
        std::int64_t column_stride = 1)
      : shape_(std::move(shape)), strides_(shape_.size()) {
    const bool is_matrix = shape_.size() > 3;
    std::int64_t stride = is_matrix ? column_stride : 1;
    std::int64_t last = 0;
    for (std::size_t axis = shape_.size(); axis-- > 0;) {
      strides_[axis] = stride;
      last += (shape_[axis] - 1) * stride;
      stride *= shape_[axis];
      if (is_matrix && axis == 3) stride += row_gap;
    }
    const std::int64_t bytes = format == Format::f32 ? 4 : 2;
    bytes_.assign(static_cast<std::size_t>((last + 1 + 2 * guard) * bytes), 0xff);
    is_element_.assign(bytes_.size(), false);
    t.data = bytes_.data() + guard * bytes;
    t.ndim = static_cast<std::int32_t>(shape_.size());
    t.dtype.code = format == Format::bf16 ? FLASHCORE_BFLOAT : FLASHCORE_FLOAT;
    t.dtype.bits = static_cast<std::uint8_t>(8 * bytes);
    t.dtype.lanes = 1;
    t.shape = shape_.data();
    t.strides = strides_.data();
    for_each([&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t c) {
      std::int64_t offset = guard;
      const std::int64_t index[] = {b, h, i, c};
      for (std::size_t axis = 0; axis < shape_.size(); ++axis)
        offset += index[axis] * strides_[axis];
      std::fill_n(is_element_.begin() + offset * bytes, bytes, true);
    });
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  template <typename Element>
  void for_each(Element element) const {
    for (std::int64_t b = 0; b < shape_[0]; ++b) {
      for (std::int64_t h = 0; h < shape_[1]; ++h) {
        for (std::int64_t i = 0; i < shape_[2]; ++i) {
          for (std::int64_t c = 0; c < (shape_.size() > 3 ? shape_[3] : 1); ++c) {
            element(b, h, i, c);
          }
        }
      }
    }
  }
  std::vector<double> values() const {
    std::vector<double> all;
    for_each([&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t c) {
      all.push_back(read(t, b, h, i, c));
    });
    return all;
  }
  void set(const std::vector<double>& values) {
    std::size_t at = 0;
    for_each([&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t c) {
      write(t, b, h, i, c, values[at++]);
    });
  }
  void poison() { std::fill(bytes_.begin(), bytes_.end(), std::uint8_t{0xff}); }
  const std::vector<std::uint8_t>& memory() const { return bytes_; }
  bool is_changed_beside_elements() const {
    for (std::size_t byte = 0; byte < bytes_.size(); ++byte) {
      if (!is_element_[byte] && bytes_[byte] != 0xff) return true;
    }
    return false;
  }

  flashcore_tensor t{};
  static inline std::int64_t guard = 4096;  ///< elements before the first and after the last one

 private:
  std::vector<std::int64_t> shape_, strides_;
  std::vector<std::uint8_t> bytes_;
  std::vector<bool> is_element_;
};

struct Gradients {
  std::vector<double> dq, dk, dv;
};

/// The tensors of a call, and its gradients in f64 by definition.
class Call {
 public:
  Call(const Problem& p, Format format);

  struct Outcome {
    Gradients got;
    bool has_changed_memory = false;
  };
  Outcome run(const VerifyBackwardFunction& function);
  double error(const Gradients& got) const;

  /// The largest error as a share of the largest element, without the format's steps near 0. NaN
  /// counts as infinite.
  double largest(const std::vector<double>& got, const std::vector<double>& want) const;

 private:
  void fill_inputs();
  void attend();  ///< forward pass and gradients
  bool sees(std::int64_t i, std::int64_t j) const {
    const std::int64_t ahead = j - (i + p_.n - p_.m);
    return !(p_.causal && ahead > 0) && !(p_.left >= 0 && -ahead > p_.left) &&
           !(p_.right >= 0 && ahead > p_.right);
  }

  const Problem p_;
  const Format format_;
  const double scale_;
  Block q_, k_, v_, out_, lse_, dout_, dlse_, dq_, dk_, dv_;
  flashcore_verify_call forward_{};
  flashcore_verify_backward_call call_{};
  Gradients want_;
};

Call::Call(const Problem& p, Format format)
    : p_(p),
      format_(format),
      scale_(std::isnan(p.scale) ? 1 / std::sqrt(static_cast<double>(p.d)) : p.scale),
      q_({p.batch, p.heads, p.m, p.d}, format, p.row_gap, p.column_stride),
      k_({p.batch, p.kv_heads, p.n, p.d}, format, p.row_gap, p.column_stride),
      v_({p.batch, p.kv_heads, p.n, p.dv_dim}, format, p.row_gap, p.column_stride),
      out_({p.batch, p.heads, p.m, p.dv_dim}, format, p.row_gap),
      lse_({p.batch, p.heads, p.m}, Format::f32),
      dout_({p.batch, p.heads, p.m, p.dv_dim}, format, 3 * p.row_gap, p.column_stride),
      dlse_({p.batch, p.heads, p.m}, Format::f32),
      dq_({p.batch, p.heads, p.m, p.d}, format, p.row_gap),
      dk_({p.batch, p.kv_heads, p.n, p.d}, format, p.row_gap),
      dv_({p.batch, p.kv_heads, p.n, p.dv_dim}, format, p.row_gap) {
  forward_.struct_size = sizeof forward_;
  forward_.q = &q_.t, forward_.k = &k_.t, forward_.v = &v_.t;
  forward_.out = &out_.t, forward_.lse = &lse_.t;
  forward_.window_left = p.left, forward_.window_right = p.right;
  forward_.scale = scale_, forward_.softcap = p.softcap;
  forward_.has_scale = std::isnan(p.scale) ? 0 : 1, forward_.causal = p.causal ? 1 : 0;
  call_.struct_size = sizeof call_;
  call_.forward = &forward_, call_.dout = &dout_.t;
  call_.dlse = p.has_dlse ? &dlse_.t : nullptr;
  call_.dq = &dq_.t, call_.dk = &dk_.t, call_.dv = &dv_.t;
  fill_inputs();
  attend();
}

void Call::fill_inputs() {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  const auto fill = [&](Block& block, double size, double mean, int sign) {
    block.for_each([&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t c) {
      const double x = size * normal(random);
      write(block.t, b, h, i, c, mean + (sign == 0 ? x : sign * std::fabs(x)));
    });
  };
  fill(q_, p_.size_of_q, 0, p_.opposed ? -1 : 0);
  fill(k_, 1, p_.mean_of_k, p_.opposed ? 1 : 0);
  fill(v_, 1, 0.5, 0);
  fill(dout_, p_.size_of_dout, 0, 0);
  fill(dlse_, 1, 0, 0);
  q_.for_each([&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t c) {
    if (p_.first_query_is_0 && i == 0) write(q_.t, b, h, i, c, 0);
  });
}

void Call::attend() {
  want_.dq.assign(static_cast<std::size_t>(p_.batch * p_.heads * p_.m * p_.d), 0.0);
  want_.dk.assign(static_cast<std::size_t>(p_.batch * p_.kv_heads * p_.n * p_.d), 0.0);
  want_.dv.assign(static_cast<std::size_t>(p_.batch * p_.kv_heads * p_.n * p_.dv_dim), 0.0);
  const auto keys = static_cast<std::size_t>(p_.n);
  for (std::int64_t row = 0; row < p_.batch * p_.heads * p_.m; ++row) {
    const std::int64_t i = row % p_.m, h = row / p_.m % p_.heads, b = row / p_.m / p_.heads;
    const std::int64_t kv = h / (p_.heads / p_.kv_heads);
    const auto dot = [&](const Block& x, const Block& y, std::int64_t j, std::int64_t columns) {
      double sum = 0;
      for (std::int64_t c = 0; c < columns; ++c)
        sum += read(x.t, b, h, i, c) * read(y.t, b, kv, j, c);
      return sum;
    };
    std::vector<double> p(keys, 0.0), dp(keys), slope(keys, 1.0);
    double most = -INFINITY, sum = 0;
    for (std::size_t j = 0; j < keys; ++j) {
      const auto key = static_cast<std::int64_t>(j);
      const double z = scale_ * dot(q_, k_, key, p_.d), t = std::tanh(z / p_.softcap);
      if (p_.softcap > 0) slope[j] = 1 - t * t;
      p[j] = !sees(i, key) ? -INFINITY : p_.softcap > 0 ? p_.softcap * t : z;
      dp[j] = dot(dout_, v_, key, p_.dv_dim);
      most = std::max(most, p[j]);
    }
    for (double& x : p) sum += x = std::isinf(most) ? 0.0 : std::exp(x - most);
    for (double& x : p) x = sum > 0 ? x / sum : 0.0;
    write(lse_.t, b, h, i, 0, sum > 0 ? most + std::log(sum) : -INFINITY);
    double delta = p_.has_dlse ? -read(dlse_.t, b, h, i, 0) : 0.0;
    for (std::size_t j = 0; j < keys; ++j) delta += p[j] * dp[j];
    for (std::int64_t c = 0; c < p_.dv_dim; ++c) {
      double x = 0;
      for (std::size_t j = 0; j < keys; ++j) {
        const auto key = static_cast<std::int64_t>(j);
        x += p[j] * read(v_.t, b, kv, key, c);
        want_.dv[at((b * p_.kv_heads + kv) * p_.n + key, p_.dv_dim, c)] +=
            p[j] * read(dout_.t, b, h, i, c);
      }
      write(out_.t, b, h, i, c, x);
    }
    for (std::size_t j = 0; j < keys; ++j) {
      const auto key = static_cast<std::int64_t>(j);
      const double ds = scale_ * slope[j] * p[j] * (dp[j] - delta);
      for (std::int64_t c = 0; c < p_.d; ++c) {
        want_.dq[at(row, p_.d, c)] += ds * read(k_.t, b, kv, key, c);
        want_.dk[at((b * p_.kv_heads + kv) * p_.n + key, p_.d, c)] += ds * read(q_.t, b, h, i, c);
      }
    }
  }
}

Call::Outcome Call::run(const VerifyBackwardFunction& function) {
  const Block* inputs[] = {&q_, &k_, &v_, &out_, &lse_, &dout_, &dlse_};
  std::vector<std::vector<std::uint8_t>> before;
  for (const Block* input : inputs) before.push_back(input->memory());
  const std::vector<double> out = out_.values(), dlse = dlse_.values();
  for (Block* result : {&dq_, &dk_, &dv_}) result->poison();
  if (function(call_, nullptr) != FLASHCORE_OK) std::printf("  %s: refused\n", p_.name);
  Outcome outcome{{dq_.values(), dk_.values(), dv_.values()}};
  for (std::size_t i = 0; i < before.size(); ++i) {
    outcome.has_changed_memory |= inputs[i]->memory() != before[i];
  }
  for (const Block* result : {&dq_, &dk_, &dv_}) {
    outcome.has_changed_memory |= result->is_changed_beside_elements();
  }
  out_.set(out), dlse_.set(dlse);
  return outcome;
}

double Call::largest(const std::vector<double>& got, const std::vector<double>& want) const {
  const double step = std::exp2(format_ == Format::f16 ? -24 : -126);
  double size = 0, error = 0;
  for (std::size_t e = 0; e < want.size(); ++e) {
    size = std::max(size, std::fabs(want[e]));
    const double here = std::fabs(got[e] - want[e]);
    error = std::isnan(here) ? INFINITY : std::max(error, here);
  }
  return error > step ? (error - step) / std::max(size, step) : 0.0;
}

double Call::error(const Gradients& got) const {
  return std::max(
      {largest(got.dq, want_.dq), largest(got.dk, want_.dk), largest(got.dv, want_.dv)});
}

/// Options that the mutants are about, each with others that do not hide it.
std::vector<Problem> problems() {
  return {
      {.name = "square", .heads = 2, .kv_heads = 2, .m = 48, .n = 48},
      {.name = "long", .m = 130, .n = 150, .d = 32, .dv_dim = 32, .size_of_q = 2},
      {.name = "group of 3",
       .batch = 2,
       .heads = 6,
       .kv_heads = 2,
       .m = 37,
       .n = 50,
       .d = 20,
       .dv_dim = 28,
       .has_dlse = true},
      {.name = "group of 6", .batch = 2, .heads = 6, .m = 33, .n = 35, .mean_of_k = 0.5},
      {.name = "causal", .heads = 2, .kv_heads = 2, .m = 64, .n = 64, .causal = true},
      {.name = "causal, more keys", .heads = 2, .m = 40, .n = 75, .causal = true},
      {.name = "causal, more queries",
       .heads = 2,
       .m = 75,
       .n = 40,
       .causal = true,
       .has_dlse = true},
      {.name = "window", .m = 70, .n = 50, .left = 9, .right = 3},
      {.name = "window, more keys", .m = 50, .n = 90, .left = 9, .right = 0},
      {.name = "window to the right", .m = 20, .n = 60, .right = 4},
      {.name = "causal window", .m = 60, .n = 60, .causal = true, .left = 7},
      {.name = "window of the own key", .m = 40, .n = 40, .left = 0, .right = 2},
      {.name = "softcap",
       .heads = 2,
       .m = 40,
       .n = 50,
       .dv_dim = 32,
       .softcap = 1.5,
       .has_dlse = true},
      {.name = "small softcap", .m = 20, .n = 20, .softcap = 0.02},
      {.name = "scale", .m = 30, .n = 30, .scale = 2},
      {.name = "scale, dlse", .m = 30, .n = 70, .scale = 0.5, .has_dlse = true},
      {.name = "negative scale", .m = 30, .n = 30, .scale = -0.4},
      {.name = "scale of 0", .m = 30, .n = 30, .scale = 0},
      {.name = "wide scores", .m = 30, .n = 50, .scale = 1, .size_of_q = 20},
      {.name = "causal, wide scores",
       .m = 30,
       .n = 30,
       .causal = true,
       .scale = 1,
       .size_of_q = 30},
      {.name = "low scores", .m = 30, .n = 50, .scale = 1, .size_of_q = 30, .opposed = true},
      {.name = "one key of score 0", .m = 20, .n = 20, .causal = true, .first_query_is_0 = true},
      {.name = "one query", .heads = 2, .m = 1, .n = 40},
      {.name = "dout of 0", .heads = 2, .m = 20, .n = 30, .size_of_dout = 0},
      {.name = "dout of 0, dlse", .m = 20, .n = 30, .size_of_dout = 0, .has_dlse = true},
      {.name = "small dout", .m = 20, .n = 30, .size_of_dout = 1e-8},
      {.name = "gaps and strides",
       .batch = 2,
       .heads = 2,
       .m = 20,
       .n = 24,
       .d = 24,
       .row_gap = 8,
       .column_stride = 2},
  };
}

struct Verdict {
  double error = 0, difference = 0;  ///< the largest of all problems
  bool has_changed_memory = false, has_nan = false;
  int wrong = 0;  ///< problems
  const char* worst = "none";
};

Verdict judge(const Mutant& mutant, std::vector<std::unique_ptr<Call>>& calls,
              const std::vector<Problem>& all, double limit) {
  Verdict verdict;
  const VerifyBackwardFunction function = mutant.make_backward();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    Gradients first;
    double most = 0;
    const bool is_race = mutant.stage == FaultStage::determinism;
    for (int repeat = 0; repeat < (is_race ? 8 : 2); ++repeat) {
      const Call::Outcome outcome = calls[i]->run(function);
      verdict.has_changed_memory |= outcome.has_changed_memory;
      const double error = calls[i]->error(outcome.got);
      most = std::max(most, error);
      if (repeat == 0) first = outcome.got;
      if (std::isinf(error)) break;
      for (const auto part : {&Gradients::dq, &Gradients::dk, &Gradients::dv}) {
        verdict.difference =
            std::max(verdict.difference, calls[i]->largest(outcome.got.*part, first.*part));
      }
    }
    verdict.has_nan |= std::isinf(most);
    verdict.wrong += most > limit ? 1 : 0;
    if (most > verdict.error) verdict.worst = all[i].name;
    verdict.error = std::max(verdict.error, most);
  }
  return verdict;
}

bool is_as_expected(const Mutant& mutant, const Verdict& verdict, double limit) {
  switch (mutant.stage) {
    case FaultStage::none:
      return verdict.error < limit && verdict.difference == 0 && !verdict.has_changed_memory;
    case FaultStage::determinism: return verdict.difference > limit && !verdict.has_changed_memory;
    case FaultStage::bounds: return verdict.has_changed_memory || verdict.has_nan;
    default: return verdict.error > limit && verdict.difference == 0 && !verdict.has_changed_memory;
  }
}

std::vector<Mutant> mutants_to_check(bool with_bounds) {
  std::vector<Mutant> all = frozen_backward_mutants();
  for (const auto& part :
       {bwd_third_values(), bwd_third_memory(), bwd_third_products(), bwd_third_options(),
        bwd_fourth_tiles(), bwd_fourth_rows(), bwd_fourth_arguments(), bwd_fourth_numbers()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  std::erase_if(all,
                [=](const Mutant& e) { return e.stage == FaultStage::bounds && !with_bounds; });
  all.push_back(backward("correct", FaultStage::none, "f32 bf16 f16", [](BackwardParts&) {}));
  return all;
}

bool has_dtype(const Mutant& mutant, const std::string& dtype) {
  std::istringstream dtypes(mutant.dtypes);
  for (std::string one; dtypes >> one;) {
    if (one == dtype) return true;
  }
  return false;
}

int check(bool show, bool with_bounds) {
  const std::vector<Problem> all = problems();
  const std::vector<Mutant> mutants = mutants_to_check(with_bounds);
  int failed = 0, shown = 0;
  for (const Format format : {Format::f32, Format::bf16, Format::f16}) {
    const char* dtype = format == Format::f32 ? "f32" : format == Format::bf16 ? "bf16" : "f16";
    const double limit = format == Format::f32    ? 3e-5
                         : format == Format::bf16 ? 16 * std::exp2(-8)
                                                  : 16 * std::exp2(-11);
    std::vector<std::unique_ptr<Call>> calls;
    for (const Problem& problem : all) calls.push_back(std::make_unique<Call>(problem, format));
    for (const Mutant& mutant : mutants) {
      if (!has_dtype(mutant, dtype)) continue;
      const Verdict verdict = judge(mutant, calls, all, limit);
      const bool ok = is_as_expected(mutant, verdict, limit);
      ++shown;
      failed += ok ? 0 : 1;
      if (!show && ok) continue;
      std::printf("%-45s %-4s %-12s error %8.1e, between calls %8.1e, memory %d; %2d of %d: %s%s\n",
                  mutant.name.c_str(), dtype,
                  mutant.stage == FaultStage::none ? "correct" : to_string(mutant.stage),
                  verdict.error, verdict.difference, verdict.has_changed_memory ? 1 : 0,
                  verdict.wrong, static_cast<int>(calls.size()), verdict.worst,
                  ok ? "" : "  <-- UNEXPECTED");
    }
  }
  std::printf("%d runs, %d not as expected\n", shown, failed);
  return failed == 0 && shown > 0 ? 0 : 1;
}

}  // namespace
}  // namespace flashcore::mutants

int main(int argc, char** argv) {
  bool show = false, is_unguarded = false;
  for (int i = 1; i < argc; ++i) {
    show |= std::strcmp(argv[i], "--show") == 0;
    is_unguarded |= std::strcmp(argv[i], "--unguarded") == 0;
  }
  if (is_unguarded) flashcore::mutants::Block::guard = 0;
  return flashcore::mutants::check(show, !is_unguarded);
}
