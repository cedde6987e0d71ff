// The loops of sums.h for one instruction set. sums_<isa>.cc includes this file. Everything is in
// an anonymous namespace and uses nothing of the standard library: no symbol compiled for one
// instruction set may be visible to code compiled for another.
#pragma once

#include "reference/sums.h"

namespace flashcore::reference {
namespace {

#if defined(__AVX512F__)
#define FLASHCORE_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define FLASHCORE_VECTOR_BYTES 32
#else
#define FLASHCORE_VECTOR_BYTES 16
#endif

typedef double Doubles __attribute__((vector_size(FLASHCORE_VECTOR_BYTES)));
typedef float Floats __attribute__((vector_size(FLASHCORE_VECTOR_BYTES)));
typedef std::int64_t DoubleBits __attribute__((vector_size(FLASHCORE_VECTOR_BYTES)));
typedef std::int32_t FloatBits __attribute__((vector_size(FLASHCORE_VECTOR_BYTES)));
// In memory: aligned like one element.
typedef double LooseDoubles
    __attribute__((vector_size(FLASHCORE_VECTOR_BYTES), aligned(sizeof(double)), may_alias));
typedef float LooseFloats
    __attribute__((vector_size(FLASHCORE_VECTOR_BYTES), aligned(sizeof(float)), may_alias));

constexpr std::size_t kDoubles = FLASHCORE_VECTOR_BYTES / sizeof(double);
constexpr std::size_t kFloats = FLASHCORE_VECTOR_BYTES / sizeof(float);
#undef FLASHCORE_VECTOR_BYTES

// Vectors that a loop works on side by side: independent sums hide the time of an addition.
constexpr std::size_t kPair = 2;

inline Doubles load(const double* p) { return *reinterpret_cast<const LooseDoubles*>(p); }
inline Floats load(const float* p) { return *reinterpret_cast<const LooseFloats*>(p); }
inline void store(double* p, Doubles x) { *reinterpret_cast<LooseDoubles*>(p) = x; }
inline void store(float* p, Floats x) { *reinterpret_cast<LooseFloats*>(p) = x; }

inline Doubles size_of(Doubles x) { return (Doubles)((DoubleBits)x & 0x7fffffffffffffff); }
inline Floats size_of(Floats x) { return (Floats)((FloatBits)x & 0x7fffffff); }

/// a, unless b is larger: a NaN in b is ignored.
template <typename V>
inline V larger(V a, V b) {
  return a < b ? b : a;
}

/// Two vectors of a panel.
struct Pair {
  Doubles part[kPair];
};

inline Pair load_pair(const double* p) { return {{load(p), load(p + kDoubles)}}; }
inline void store_pair(double* p, const Pair& x) {
  store(p, x.part[0]);
  store(p + kDoubles, x.part[1]);
}
constexpr std::size_t kPairLanes = kPair * kDoubles;
static_assert(kPanel % kPairLanes == 0 && kPanel % kFloats == 0);

template <bool largest>
void sum_products(const double* x, const double* y, std::size_t count, double* sum,
                  double* magnitude, double* largest_product, double* largest_sum) {
  for (std::size_t lane = 0; lane < kPanel; lane += kPairLanes) {
    Pair total{}, sizes{}, product_size{}, sum_size{};
    for (std::size_t k = 0; k < count; ++k) {
      const double* row = y + k * kPanel + lane;
      for (std::size_t i = 0; i < kPair; ++i) {
        const Doubles product = x[k] * load(row + i * kDoubles), size = size_of(product);
        total.part[i] += product;
        sizes.part[i] += size;
        if (!largest) continue;
        product_size.part[i] = larger(product_size.part[i], size);
        sum_size.part[i] = larger(sum_size.part[i], size_of(total.part[i]));
      }
    }
    store_pair(sum + lane, total);
    store_pair(magnitude + lane, sizes);
    if (!largest) continue;
    store_pair(largest_product + lane, product_size);
    store_pair(largest_sum + lane, sum_size);
  }
}

void products(const double* x, const double* y, std::size_t count, double* sum, double* magnitude) {
  sum_products<false>(x, y, count, sum, magnitude, nullptr, nullptr);
}

template <bool all>
void sum_values(const WeightedRows& v, const ValueSums& sums) {
  const bool scaled = all && sums.scaled_mass != nullptr;
  for (std::size_t lane = 0; lane < kPanel; lane += kPairLanes) {
    Pair out{}, block{}, spread{}, mass{}, scaled_mass{};
    std::int32_t current = 0;
    for (std::size_t n = 0; n < v.count; ++n) {
      const std::int32_t key = v.rows[n];
      if (key / kValueBlock != current) {
        current = key / kValueBlock;
        for (std::size_t i = 0; i < kPair; ++i) out.part[i] += block.part[i];
        block = {};
      }
      const double* row = v.panel + static_cast<std::size_t>(key) * kPanel + lane;
      const double w = v.weight[n];
      for (std::size_t i = 0; i < kPair; ++i) {
        const Doubles x = load(row + i * kDoubles), term = w * x;
        block.part[i] += term;
        if (!all) continue;
        spread.part[i] += term * w * x;
        mass.part[i] += size_of(x);
        if (scaled) scaled_mass.part[i] += size_of(x) * sums.mass_ratio[n];
      }
    }
    for (std::size_t i = 0; i < kPair; ++i) out.part[i] += block.part[i];
    store_pair(sums.out + lane, out);
    if (!all) continue;
    store_pair(sums.spread + lane, spread);
    store_pair(sums.mass + lane, mass);
    if (scaled) store_pair(sums.scaled_mass + lane, scaled_mass);
  }
}

void outputs(const WeightedRows& v, double* out) {
  sum_values<false>(v, {out, nullptr, nullptr, nullptr, nullptr});
}

void deviations(const WeightedRows& v, const double* out, double* deviation) {
  for (std::size_t lane = 0; lane < kPanel; lane += kPairLanes) {
    const Pair mean = load_pair(out + lane);
    Pair sum{};
    for (std::size_t n = 0; n < v.count; ++n) {
      const double* row = v.panel + static_cast<std::size_t>(v.rows[n]) * kPanel + lane;
      for (std::size_t i = 0; i < kPair; ++i) {
        sum.part[i] += v.weight[n] * size_of(load(row + i * kDoubles) - mean.part[i]);
      }
    }
    store_pair(deviation + lane, sum);
  }
}

enum class Extra { none, sum, squares };

template <Extra kExtra>
void add_terms(const double* panel, const std::int32_t* rows, std::size_t count,
               const GradientWeights& weights, const GradientSlice& sums) {
  for (std::size_t lane = 0; lane < kPanel; lane += kPairLanes) {
    Pair value = load_pair(sums.value + lane), noise = load_pair(sums.noise + lane);
    Pair error = load_pair(sums.error + lane), mass = load_pair(sums.mass + lane);
    Pair extra{};
    if (kExtra != Extra::none) extra = load_pair(sums.extra + lane);
    for (std::size_t n = 0; n < count; ++n) {
      const auto at = static_cast<std::size_t>(rows[n]);
      const double* row = panel + at * kPanel + lane;
      const double w = weights.value[at];
      for (std::size_t i = 0; i < kPair; ++i) {
        const Doubles x = load(row + i * kDoubles), term = w * x, size = size_of(x);
        value.part[i] += term;
        noise.part[i] += term * w * x;
        error.part[i] += weights.error[at] * size;
        mass.part[i] += weights.mass[at] * size;
        if (kExtra == Extra::none) continue;
        const Doubles y = weights.extra[at] * x;
        extra.part[i] += kExtra == Extra::sum ? y : y * y;
      }
    }
    store_pair(sums.value + lane, value);
    store_pair(sums.noise + lane, noise);
    store_pair(sums.error + lane, error);
    store_pair(sums.mass + lane, mass);
    if (kExtra != Extra::none) store_pair(sums.extra + lane, extra);
  }
}

// Products that are added at once: the fewest, after which a sum is cut, and the most, which are
// aligned to one another.
constexpr std::size_t kFewest = 8, kStep = 16;
constexpr float kUnit = 0x1p-24f;

/// The largest power of two that |x| reaches.
inline Floats power_of_two(Floats x) { return (Floats)((FloatBits)x & 0x7f800000); }

/// kFloats sums, as tensor cores add them, and what they may cut.
struct CutSums {
  Floats sum{}, start{}, middle{}, end{};  // sums, and their powers of two in this step
  Floats from_products{}, difference{};    // from all; from positive less from negative ones
  Floats from_sums{};

  /// A sum is cut to f32.
  void cut_result() {
    end = power_of_two(sum);
    from_sums += 2 * kUnit * end;
  }

  /// An addend that is a multiple of g loses at most a unit of the largest less g, and at most all.
  /// A sum has 24 bits.
  void cut_sum(Floats unit, Floats power) {
    const Floats zero{};
    from_sums += power > zero ? larger(unit - 2 * kUnit * power, zero) : zero;
  }

  void cut_product(Floats unit, Floats product, Floats last_bit) {
    const Floats most = larger(unit - last_bit, Floats{}), size = size_of(product);
    const Floats cut = most < size ? most : size;
    from_products += cut;
    difference += (Floats)((FloatBits)cut | ((FloatBits)product & ~0x7fffffff));
  }

  /// Adds x[k]·y[k] for k < count.
  void add(const FactorView& x, const FactorView& y, std::size_t count) {
    Floats largest{};  // alignment
    for (std::size_t k = 0; k < count; ++k) {
      sum += x.value[k] * load(y.value + k * kPanel);
      largest = larger(largest, x.alignment[k] * load(y.alignment + k * kPanel));
      if ((k + 1) % kFewest == 0 || k + 1 == count) cut_result();
      if (k + 1 == kFewest) middle = end;
    }
    if (count <= kFewest) middle = Floats{};
    const Floats unit = kUnit * larger(largest, larger(start, middle));
    cut_sum(unit, start);
    cut_sum(unit, middle);
    start = end;
    for (std::size_t k = 0; k < count; ++k) {
      cut_product(unit, x.value[k] * load(y.value + k * kPanel),
                  x.last_bit[k] * load(y.last_bit + k * kPanel));
    }
  }

  Floats bound() const { return ((from_products + size_of(difference)) / 2 + from_sums) / kUnit; }
};

inline FactorView moved(const FactorView& f, std::size_t distance) {
  return {f.value + distance, f.alignment + distance, f.last_bit + distance};
}

void cut(const FactorView& x, const FactorView& y, std::size_t count, float* bounds) {
  for (std::size_t lane = 0; lane < kPanel; lane += kFloats) {
    CutSums sums;
    for (std::size_t k = 0; k < count; k += kStep) {
      const std::size_t products_of_step = count - k < kStep ? count - k : kStep;
      sums.add(moved(x, k), moved(y, k * kPanel + lane), products_of_step);
    }
    store(bounds + lane, sums.bound());
  }
}

constexpr Sums table(const char* isa) {
  return {isa,
          sum_products<true>,
          products,
          cut,
          sum_values<true>,
          outputs,
          deviations,
          add_terms<Extra::none>,
          add_terms<Extra::sum>,
          add_terms<Extra::squares>};
}

}  // namespace
}  // namespace flashcore::reference
