#include "reference/cut_sums.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace flashcore::reference {
namespace {

// Products that are added at once: the fewest, after which a sum is cut, and the most, which are
// aligned to one another.
constexpr std::size_t kFewest = 8, kStep = 16;
constexpr std::size_t kBlock = 64;  // sums that are found side by side
constexpr float kUnit = 0x1p-24f;

/// The largest power of two that |x| reaches. No branch, so that loops become vector code.
float power_of_two(float x) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0x7f800000u);
}

/// The power of two that x, a normal number, is an odd multiple of.
double last_bit_of(double x) {
  constexpr std::uint64_t kOne = std::uint64_t{1} << 52;  // the bit before the mantissa
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const std::uint64_t digits = (bits & (kOne - 1)) | kOne;
  const auto power = std::bit_cast<double>(bits & 0x7ff0000000000000u);
  return power * 0x1p-52 * static_cast<double>(digits & (~digits + 1));
}

/// Up to kBlock sums that grow by one product each at a time.
class Block {
 public:
  explicit Block(std::size_t count) : count_(count) {}

  void add(const Factors& x, std::size_t k, const Factors& y, std::size_t at);
  void end(double* bounds);

 private:
  using Floats = std::array<float, kBlock>;

  void cut_results();
  void cut_products();

  std::size_t count_, products_ = 0;           // products of this step
  Floats sum_{}, start_{}, middle_{}, end_{};  // sums, and their powers of two in this step
  Floats largest_{};                           // alignment in this step
  Floats from_products_{}, difference_{};      // from all; from positive less from negative ones
  Floats from_sums_{};
  std::array<Floats, kStep> product_, last_bit_;
};

/// Adds x[k]·y[at + i] to sum i.
void Block::add(const Factors& x, std::size_t k, const Factors& y, std::size_t at) {
  const float value = x.value[k], alignment = x.alignment[k], last_bit = x.last_bit[k];
  const float* const values = y.value.data() + at;
  const float* const alignments = y.alignment.data() + at;
  const float* const last_bits = y.last_bit.data() + at;
  Floats& product = product_[products_];
  Floats& bit = last_bit_[products_];
  for (std::size_t i = 0; i < count_; ++i) {
    product[i] = value * values[i];
    bit[i] = last_bit * last_bits[i];
    sum_[i] += product[i];
    largest_[i] = std::max(largest_[i], alignment * alignments[i]);
  }
  if (++products_ % kFewest == 0) cut_results();
  if (products_ == kStep) cut_products();
}

/// A sum is cut to f32.
void Block::cut_results() {
  for (std::size_t i = 0; i < count_; ++i) {
    end_[i] = power_of_two(sum_[i]);
    from_sums_[i] += 2 * kUnit * end_[i];
  }
  if (products_ == kFewest) middle_ = end_;
}

/// An addend that is a multiple of g loses at most a unit of the largest less g, and at most all.
void Block::cut_products() {
  if (products_ <= kFewest) middle_.fill(0);
  Floats unit;
  for (std::size_t i = 0; i < count_; ++i) {
    unit[i] = kUnit * std::max(largest_[i], std::max(start_[i], middle_[i]));
    // A sum has 24 bits.
    from_sums_[i] += start_[i] > 0 ? std::max(unit[i] - 2 * kUnit * start_[i], 0.f) : 0.f;
    from_sums_[i] += middle_[i] > 0 ? std::max(unit[i] - 2 * kUnit * middle_[i], 0.f) : 0.f;
    start_[i] = end_[i];
    largest_[i] = 0;
  }
  for (std::size_t k = 0; k < products_; ++k) {
    for (std::size_t i = 0; i < count_; ++i) {
      const float product = product_[k][i];
      const float cut = std::min(std::fabs(product), std::max(unit[i] - last_bit_[k][i], 0.f));
      from_products_[i] += cut;
      difference_[i] += std::copysign(cut, product);
    }
  }
  products_ = 0;
}

void Block::end(double* bounds) {
  if (products_ % kFewest != 0) cut_results();
  if (products_ > 0) cut_products();
  for (std::size_t i = 0; i < count_; ++i) {
    const float one_sign = (from_products_[i] + std::fabs(difference_[i])) / 2;
    const float bound = (one_sign + from_sums_[i]) / kUnit;
    bounds[i] = std::isfinite(bound) ? bound : 0.f;
  }
}

}  // namespace

void Factors::add(double x, DType dtype, double scale) {
  const auto narrow = static_cast<float>(x);
  const float size = std::fabs(narrow), factor = static_cast<float>(std::fabs(scale));
  value.push_back(narrow);
  const bool is_16_bit = dtype == DType::f16 || dtype == DType::bf16;
  last_bit.push_back(is_16_bit && x != 0 && std::isfinite(x) ? static_cast<float>(last_bit_of(x))
                                                             : 0.f);
  float aligned = is_16_bit ? power_of_two(narrow) : size;
  // A subnormal f16 has the exponent of the smallest normal one. 8-bit values are f16 operands,
  // e4m3 as 2⁻⁸ times its value before sm_89.
  if (dtype == DType::f16) aligned = std::max(aligned, 0x1p-14f);
  if (dtype == DType::e4m3) aligned = std::max(size, 0x1p-6f * factor);
  if (dtype == DType::e5m2) aligned = std::max(size, 0x1p-14f * factor);
  alignment.push_back(x == 0 ? 0.f : aligned);
}

std::vector<double> cut_sums(const Factors& x, const Factors& y, std::size_t count) {
  std::vector<double> bounds(count);
  for (std::size_t first = 0; first < count; first += kBlock) {
    Block block(std::min(kBlock, count - first));
    for (std::size_t k = 0; k < x.value.size(); ++k) block.add(x, k, y, k * count + first);
    block.end(bounds.data() + first);
  }
  return bounds;
}

}  // namespace flashcore::reference
