#include "reference/cut_sums.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace flashcore::reference {
namespace {

/// The largest power of two that |x| reaches.
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

}  // namespace

Factor factor_of(double x, DType dtype, double scale) {
  Factor factor;
  factor.value = static_cast<float>(x);
  if (x == 0) return factor;
  const float size = std::fabs(factor.value), scale_size = static_cast<float>(std::fabs(scale));
  const bool is_16_bit = dtype == DType::f16 || dtype == DType::bf16;
  if (is_16_bit && std::isfinite(x)) factor.last_bit = static_cast<float>(last_bit_of(x));
  factor.alignment = is_16_bit ? power_of_two(factor.value) : size;
  // A subnormal f16 has the exponent of the smallest normal one. 8-bit values are f16 operands,
  // e4m3 as 2⁻⁸ times its value before sm_89.
  if (dtype == DType::f16) factor.alignment = std::max(factor.alignment, 0x1p-14f);
  if (dtype == DType::e4m3) factor.alignment = std::max(size, 0x1p-6f * scale_size);
  if (dtype == DType::e5m2) factor.alignment = std::max(size, 0x1p-14f * scale_size);
  return factor;
}

Factors::Factors(const std::vector<double>& row, DType dtype, double scale)
    : value(row.size()), alignment(row.size()), last_bit(row.size()) {
  for (std::size_t k = 0; k < row.size(); ++k) {
    const Factor factor = factor_of(row[k], dtype, scale);
    value[k] = factor.value;
    alignment[k] = factor.alignment;
    last_bit[k] = factor.last_bit;
  }
}

void FactorPanels::reset(std::size_t rows, std::size_t columns) {
  for (Panels<float>* part : {&value, &alignment, &last_bit}) part->reset(rows, columns);
}

void FactorPanels::set(std::size_t row, std::size_t column, const Factor& factor) {
  value.at(row, column) = factor.value;
  alignment.at(row, column) = factor.alignment;
  last_bit.at(row, column) = factor.last_bit;
}

void cut_sums(const Factors& x, const FactorPanels& y, std::size_t panel, double* bounds) {
  float found[kPanel];
  sums().cut(x.view(), y.panel(panel), x.value.size(), found);
  for (std::size_t i = 0; i < kPanel; ++i) bounds[i] = std::isfinite(found[i]) ? found[i] : 0.f;
}

}  // namespace flashcore::reference
