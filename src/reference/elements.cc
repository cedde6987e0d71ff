#include "reference/elements.h"

#include <bit>
#include <limits>

namespace flashcore::reference {
namespace {

/// A double of the value 2^power.
constexpr double power_of_two(int power) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(power + 1023) << 52);
}

/// Decodes a small IEEE format by its definition.
template <int kExponentBits, int kMantissaBits>
double small_float(std::uint32_t bits) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  const std::uint64_t sign = (bits >> (kExponentBits + kMantissaBits)) & 1u;
  const std::uint64_t exponent = (bits >> kMantissaBits) & ((1u << kExponentBits) - 1);
  const std::uint64_t mantissa = bits & ((1u << kMantissaBits) - 1);
  if (exponent == 0) {
    const double x = static_cast<double>(mantissa) * power_of_two(1 - kBias - kMantissaBits);
    return sign != 0 ? -x : x;
  }
  // Infinities and NaN have the largest exponent in both formats.
  const std::uint64_t wide = exponent == (1u << kExponentBits) - 1 ? 2047 : exponent + 1023 - kBias;
  return std::bit_cast<double>(sign << 63 | wide << 52 | mantissa << (52 - kMantissaBits));
}

/// Decodes OCP's e4m3: no infinity, one NaN of each sign, otherwise IEEE's rules.
double e4m3(std::uint32_t bits) {
  if ((bits & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const double sign = (bits & 0x80) != 0 ? -1.0 : 1.0;
  const auto exponent = static_cast<int>((bits >> 3) & 15);
  const double fraction = static_cast<double>(bits & 7) / 8.0;
  return sign * (exponent == 0 ? fraction * 0x1p-6 : (1.0 + fraction) * power_of_two(exponent - 7));
}

/// decode(element) for each element.
template <typename Stored, typename Decode>
void read_all(const void* data, std::int64_t first, std::int64_t stride, std::int64_t count,
              double* values, Decode decode) {
  const Stored* stored = static_cast<const Stored*>(data) + first;
  for (std::int64_t i = 0; i < count; ++i) values[i] = decode(stored[i * stride]);
}

std::int64_t int_at(const TensorView& t, std::int64_t index) {
  return static_cast<const std::int32_t*>(t.data)[index * (t.shape[0] > 1 ? t.strides[0] : 0)];
}

}  // namespace

void read_elements(const void* data, DType dtype, std::int64_t first, std::int64_t stride,
                   std::int64_t count, double* values) {
  const auto read = [&](auto stored, auto decode) {
    read_all<decltype(stored)>(data, first, stride, count, values, decode);
  };
  using Half = std::uint16_t;
  using Byte = std::uint8_t;
  const auto same = [](auto x) { return static_cast<double>(x); };
  switch (dtype) {
    case DType::f64: return read(double{}, same);
    case DType::f32: return read(float{}, same);
    case DType::f16: return read(Half{}, [](Half x) { return small_float<5, 10>(x); });
    case DType::bf16: return read(Half{}, [](Half x) { return small_float<8, 7>(x); });
    case DType::i32: return read(std::int32_t{}, same);
    case DType::boolean: return read(Byte{}, [](Byte x) { return x != 0 ? 1.0 : 0.0; });
    case DType::e4m3: return read(Byte{}, [](Byte x) { return e4m3(x); });
    case DType::e5m2: return read(Byte{}, [](Byte x) { return small_float<5, 2>(x); });
    case DType::int8: return read(std::int8_t{}, same);
    case DType::u8:
      return read(Byte{}, [](Byte x) { return (static_cast<double>(x) - 128.0) * 448.0 / 127.0; });
    case DType::none: break;
  }
  for (std::int64_t i = 0; i < count; ++i) values[i] = 0.0;
}

double element(const void* data, DType dtype, std::int64_t index) {
  double value = 0;
  read_elements(data, dtype, index, 0, 1, &value);
  return value;
}

void read_key(const Problem& p, const Tensors& t, const Operand& operand, std::int64_t b,
              std::int64_t kv_head, const Lengths& lengths, std::int64_t j, std::int64_t count,
              double* values) {
  const TensorView& table = t.block_table;
  if (!table.given()) return operand.read(b, kv_head, lengths.k_row + j, count, values);
  const std::int64_t row_of_table = table.shape[0] > 1 ? b * table.strides[0] : 0;
  const std::int64_t page =
      static_cast<const std::int32_t*>(table.data)[row_of_table + j / p.page_size];
  operand.read(page, kv_head, j % p.page_size, count, values);
}

double scale_at(const TensorView& scale, std::int64_t b, std::int64_t h, std::int64_t row,
                std::int64_t block_rows) {
  if (!scale.given()) return 1.0;
  std::int64_t at = 0;
  if (scale.rank >= 2) at += b * scale.strides[0] + h * scale.strides[1];
  if (scale.rank == 3) at += row / block_rows * scale.strides[2];
  return static_cast<const float*>(scale.data)[at];
}

Lengths lengths_of(const Problem& p, const Tensors& t, std::int64_t b) {
  Lengths l{p.q_len, p.kv_len, 0, 0, 0, 0};
  if (t.cu_seqlens_q.given()) {
    l.q_row = int_at(t.cu_seqlens_q, b);
    l.q_len = int_at(t.cu_seqlens_q, b + 1) - l.q_row;
  }
  if (t.cu_seqlens_k.given()) {
    l.k_row = int_at(t.cu_seqlens_k, b);
    l.kv_len = int_at(t.cu_seqlens_k, b + 1) - l.k_row;
  }
  if (t.seqused_k.given()) l.kv_len = int_at(t.seqused_k, b);
  l.q_start = t.q_start.given() ? int_at(t.q_start, b) : l.kv_len - l.q_len;
  l.k_start = t.k_start.given() ? int_at(t.k_start, b) : 0;
  return l;
}

}  // namespace flashcore::reference
