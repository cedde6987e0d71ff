#include "verify/inputs/block.h"

#include <cmath>
#include <cstring>

#include "verify/inputs/decimal.h"

namespace flashcore::verify {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kGuardBytes = 4096;  // several rows at any head dim
/// Elements between rows and heads of a padded layout, times the number of the tensor: no two
/// tensors of a call have the same strides.
constexpr std::int64_t kSlack = 8;

DType poisoned_dtype(Format format) {
  switch (format) {
    case Format::f64: return DType::f64;
    case Format::f16: return DType::f16;
    case Format::bf16: return DType::bf16;
    default: return DType::f32;
  }
}

/// Scale of an 8-bit tensor: a power of two (times the step of the byte format), so that small
/// integers and powers of two are exact.
double base_scale(Format format, double largest) {
  if (largest == 0) return 1;
  // Rounds the largest value first, so that the scale does not change if the call is rounded again.
  const int mantissa_bits = format == Format::e4m3 ? 3 : format == Format::e5m2 ? 2 : 5;
  const double digits = std::ldexp(1.0, mantissa_bits - std::ilogb(largest));
  largest = std::nearbyint(largest * digits) / digits;
  if (format == Format::e4m3 || format == Format::e5m2) {
    return std::ldexp(1.0, std::ilogb(largest) - 7);
  }
  const double step = std::ldexp(1.0, std::ilogb(largest) - 5);  // encodings up to 63
  return format == Format::byte8 ? static_cast<float>(step * 127.0 / 448.0) : step;
}

double largest_of(const TensorView& t, const std::vector<double>& factors) {
  double largest = 0;
  const std::int64_t per_head = t.shape[2] * t.shape[3];
  for_each_element(t, [&](std::int64_t at) {
    const double factor = factors.empty() ? 1.0 : factors[static_cast<std::size_t>(at / per_head)];
    largest = std::max(largest, std::fabs(static_cast<const double*>(t.data)[at] / factor));
  });
  return largest;
}

}  // namespace

Placed& Block::place(Placed& p, const char* name, Format format, std::vector<std::int64_t> shape,
                     MemoryLayout layout) {
  p.name = name;
  p.format = format;
  p.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), p.shape);
  std::vector<int> order;  // axes from fastest to slowest
  for (int i = p.rank - 1; i >= 0; --i) order.push_back(i);
  if (layout == MemoryLayout::rows_first && p.rank == 4) std::swap(order[1], order[2]);
  const std::int64_t slack = kSlack * static_cast<std::int64_t>(all_.size() + 1);
  std::int64_t stride = layout == MemoryLayout::strided_columns && p.rank == 4 ? 2 : 1;
  for (const int axis : order) {
    p.strides[axis] = stride;
    stride *= std::max<std::int64_t>(p.shape[axis], 1);
    if (layout == MemoryLayout::padded) stride += slack;
  }
  p.reach = 1;
  for (int i = 0; i < p.rank; ++i) p.reach += (p.shape[i] - 1) * p.strides[i];
  p.offset = (bytes_ + kGuardBytes + kAlignment - 1) / kAlignment * kAlignment;
  bytes_ = p.offset + p.reach * size_of(format) + kGuardBytes;
  all_.push_back(&p);
  return p;
}

void Block::fill(std::byte* base, double guard) const {
  std::memset(base, 0, static_cast<std::size_t>(bytes_));
  if (guard == 0) return;
  for (const Placed* p : all_) {
    const std::int64_t size = size_of(p->format), span = kGuardBytes / size;
    for (std::int64_t i = -span; i < p->reach + span; ++i) {
      encode(p->format, base + p->offset, i, guard);
    }
  }
}

void Block::describe(std::byte* base) {
  for (Placed* p : all_) {
    p->descriptor = {base + p->offset, {FLASHCORE_CPU, 0}, p->rank, c_dtype(p->format),
                     p->shape,         p->strides,         0};
  }
}

std::string Block::owner(std::int64_t byte) const {
  const Placed* nearest = all_.front();
  std::int64_t distance = bytes_;
  for (const Placed* p : all_) {
    const std::int64_t end = p->offset + p->reach * size_of(p->format);
    const std::int64_t away = byte < p->offset ? p->offset - byte : byte >= end ? byte - end : -1;
    if (away < distance) {
      distance = away;
      nearest = p;
    }
  }
  const std::string name = nearest->name;
  const std::int64_t size = size_of(nearest->format);
  const std::int64_t element = (byte - nearest->offset) / size;
  if (byte < nearest->offset) {
    return name + ", " + decimal((nearest->offset - byte + size - 1) / size) +
           " elements before its start";
  }
  if (element >= nearest->reach) {
    return name + ", " + decimal(element - nearest->reach + 1) + " elements past its end";
  }
  return name + ", " + decimal(element) + " elements from its start";
}

double write_input(const TensorView& master, const Placed& p, std::byte* base, const Placed* scales,
                   const std::vector<double>& factors, bool unit_scale) {
  auto* values = static_cast<double*>(master.data);
  const std::int64_t per_head = p.shape[2] * p.shape[3];
  // The factors do not enter the scale, so the encodings do not depend on them.
  const double scale =
      scales == nullptr || unit_scale ? 1 : base_scale(p.format, largest_of(master, factors));
  const auto scale_of = [&](std::int64_t head) {
    const double factor = factors.empty() ? 1.0 : factors[static_cast<std::size_t>(head)];
    return static_cast<double>(static_cast<float>(scale * factor));
  };
  if (scales != nullptr) {
    for (std::int64_t head = 0; head < p.shape[0] * p.shape[1]; ++head) {
      encode(Format::f32, base + scales->offset, head, scale_of(head));
    }
  }
  p.each([&](std::int64_t position, std::int64_t at) {
    const double s = scales != nullptr ? scale_of(position / per_head) : 1;
    encode(p.format, base + p.offset, at, values[position] / s);
    values[position] = decode(p.format, base + p.offset, at) * s;
  });
  return scale;
}

void fill_output(const Placed& p, std::byte* base, double content) {
  const std::uint64_t bits = poison(poisoned_dtype(p.format));
  const auto size = static_cast<std::size_t>(size_of(p.format));
  p.each([&](std::int64_t, std::int64_t at) {
    if (!std::isnan(content)) {
      encode(p.format, base + p.offset, at, content);
    } else {
      std::memcpy(base + p.offset + at * static_cast<std::int64_t>(size), &bits, size);
    }
  });
}

void read_output(const Placed& p, std::byte* base, const std::vector<std::byte>& before,
                 std::vector<double>& values, std::vector<std::byte>& bits, std::int64_t& unwritten,
                 std::vector<std::uint8_t>* is_unwritten) {
  const auto size = static_cast<std::size_t>(size_of(p.format));
  values.resize(static_cast<std::size_t>(p.count()));
  if (is_unwritten != nullptr) is_unwritten->assign(values.size(), 0);
  p.each([&](std::int64_t position, std::int64_t at) {
    std::byte* place = base + p.offset + at * static_cast<std::int64_t>(size);
    const std::byte* old = before.data() + (place - base);
    values[static_cast<std::size_t>(position)] = decode(p.format, base + p.offset, at);
    if (std::memcmp(place, old, size) == 0) {
      ++unwritten;
      if (is_unwritten != nullptr) (*is_unwritten)[static_cast<std::size_t>(position)] = 1;
    }
    bits.insert(bits.end(), place, place + size);
    std::memcpy(place, old, size);
  });
}

}  // namespace flashcore::verify
