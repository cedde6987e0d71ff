#include "verify/implementation.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "verify/inputs/case_memory.h"
#include "verify/inputs/decimal.h"

namespace flashcore::verify {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kGuardBytes = 4096;  // several rows at any head dim
constexpr std::int64_t kSlack = 8;          // elements between rows and heads of a padded layout

/// One tensor of a call in the block.
struct Placed {
  const char* name = "";
  Format format = Format::f32;
  std::int64_t offset = 0, reach = 0;  ///< bytes from the start of the block; elements spanned
  int rank = 0;
  std::int64_t shape[4] = {}, strides[4] = {};
  flashcore_tensor descriptor{};

  std::int64_t count() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  /// visit(position in row-major order, element offset)
  template <typename Visit>
  void each(Visit visit) const {
    TensorView view;
    view.rank = rank;
    std::copy(shape, shape + 4, view.shape);
    std::copy(strides, strides + 4, view.strides);
    std::int64_t position = 0;
    for_each_element(view, [&](std::int64_t at) { visit(position++, at); });
  }
};

/// Places tensors one after the other, with guard bands between them.
class Block {
 public:
  Placed& place(Placed& p, const char* name, Format format, std::vector<std::int64_t> shape,
                MemoryLayout layout) {
    p.name = name;
    p.format = format;
    p.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), p.shape);
    std::vector<int> order;  // axes from fastest to slowest
    for (int i = p.rank - 1; i >= 0; --i) order.push_back(i);
    if (layout == MemoryLayout::rows_first && p.rank == 4) std::swap(order[1], order[2]);
    std::int64_t stride = 1;
    for (const int axis : order) {
      p.strides[axis] = stride;
      stride *= std::max<std::int64_t>(p.shape[axis], 1);
      if (layout == MemoryLayout::padded && p.rank == 4) stride += kSlack;
    }
    p.reach = 1;
    for (int i = 0; i < p.rank; ++i) p.reach += (p.shape[i] - 1) * p.strides[i];
    p.offset = (bytes_ + kGuardBytes + kAlignment - 1) / kAlignment * kAlignment;
    bytes_ = p.offset + p.reach * size_of(format) + kGuardBytes;
    all_.push_back(&p);
    return p;
  }

  std::int64_t bytes() const { return bytes_; }

  /// Fills the block with the guard value, in the format of the nearest tensor.
  void fill(std::byte* base, double guard) const {
    std::memset(base, 0, static_cast<std::size_t>(bytes_));
    if (guard == 0) return;
    for (const Placed* p : all_) {
      const std::int64_t size = size_of(p->format), span = kGuardBytes / size;
      for (std::int64_t i = -span; i < p->reach + span; ++i) {
        encode(p->format, base + p->offset, i, guard);
      }
    }
  }

  void describe(std::byte* base) {
    for (Placed* p : all_) {
      p->descriptor = {base + p->offset, {FLASHCORE_CPU, 0}, p->rank, c_dtype(p->format),
                       p->shape,         p->strides,         0};
    }
  }

  /// "v, 3 elements past its end": the tensor a byte belongs to, or the nearest one.
  std::string owner(std::int64_t byte) const {
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

 private:
  std::int64_t bytes_ = 0;
  std::vector<Placed*> all_;
};

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

/// Writes one input in its format and replaces the values of `master` by the rounded ones. Returns
/// the scale without factors.
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

void poison_output(const Placed& p, std::byte* base) {
  const std::uint64_t bits = poison(poisoned_dtype(p.format));
  const auto size = static_cast<std::size_t>(size_of(p.format));
  p.each([&](std::int64_t, std::int64_t at) {
    std::memcpy(base + p.offset + at * static_cast<std::int64_t>(size), &bits, size);
  });
}

/// Reads an output and restores its bytes to those before the call. Any byte of the block that
/// still differs was written outside the outputs.
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

}  // namespace

std::string to_string(const Shape& s) {
  std::string text = "batch " + decimal(s.batch) + ", heads " + decimal(s.q_heads);
  if (s.kv_heads != s.q_heads) text.append("/").append(decimal(s.kv_heads));
  text += ", q_len " + decimal(s.q_len) + ", kv_len " + decimal(s.kv_len) + ", head_dim " +
          decimal(s.head_dim);
  if (s.v_dim != s.head_dim) text += ", v_dim " + decimal(s.v_dim);
  return text;
}

std::string describe(const HostCall& call) {
  const Tensors& t = call.tensors;
  const Options& o = call.options;
  std::string text = to_string(Shape{t.q.shape[0], t.q.shape[1], t.k.shape[1], t.q.shape[2],
                                     t.k.shape[2], t.q.shape[3], t.v.shape[3]});
  const auto number = [](double x) {
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, "%g", x);
    return std::string(buffer);
  };
  if (o.causal) text += ", causal";
  if (o.window_left >= 0 || o.window_right >= 0) {
    text += ", window (" + decimal(o.window_left) + ", " + decimal(o.window_right) + ")";
  }
  if (o.scale) text += ", scale " + number(*o.scale);
  if (o.softcap > 0) text += ", softcap " + number(o.softcap);
  if (o.num_splits > 0) text += ", splits " + decimal(o.num_splits);
  return text;
}

Arithmetic Implementation::arithmetic() const {
  const Format p = formats_.arithmetic;
  const bool wide = p == Format::f64 || p == Format::f32;
  // Lazy rescaling allows weights up to 2^8; the rescale factor may be flushed (arithmetic_of()).
  const double p_smallest = p == Format::bf16 ? 0x1p8 * smallest_of(p) : smallest_of(p);
  Arithmetic a{unit_of(formats_.out), unit_of(p), p == Format::f64 ? 0x1p-52 : 0x1p-24,
               smallest_of(formats_.out), p_smallest};
  // Kernels often multiply 8-bit inputs as f16, or in a matrix unit of no higher precision.
  a.score_unit = wide ? 0 : is_8bit(p) ? unit_of(Format::f16) : unit_of(p);
  return a;
}

/// The tensors of one call in the block.
struct Implementation::PlacedCall {
  PlacedCall(const Tensors& t, const ImplementationFormats& formats, const Setting& setting);
  /// Fills the block: guards, inputs, poisoned outputs. Returns the scales of q, k and v.
  std::vector<double> write(const Tensors& t, const Setting& setting, std::byte* base);
  flashcore_verify_call descriptor(const HostCall& call, char* reason, std::size_t size) const;

  bool scaled, has_lse;
  Block block;
  Placed q, k, v, out, lse, q_scale, k_scale, v_scale;
};

Implementation::PlacedCall::PlacedCall(const Tensors& t, const ImplementationFormats& formats,
                                       const Setting& setting)
    : scaled(is_8bit(formats.dtype)), has_lse(setting.lse) {
  const std::int64_t batch = t.q.shape[0], q_heads = t.q.shape[1], kv_heads = t.k.shape[1];
  const auto shape = [](const TensorView& view) {
    return std::vector<std::int64_t>(view.shape, view.shape + 4);
  };
  block.place(q, "q", formats.dtype, shape(t.q), setting.inputs);
  block.place(k, "k", formats.dtype, shape(t.k), setting.inputs);
  block.place(v, "v", formats.dtype, shape(t.v), setting.inputs);
  block.place(out, "out", formats.out, shape(t.out), setting.out);
  if (has_lse) {
    const Format format = formats.dtype == Format::f64 ? Format::f64 : Format::f32;
    block.place(lse, "lse", format, {batch, q_heads, t.q.shape[2]}, MemoryLayout{});
  }
  if (scaled) {
    block.place(q_scale, "q_scale", Format::f32, {batch, q_heads}, MemoryLayout{});
    block.place(k_scale, "k_scale", Format::f32, {batch, kv_heads}, MemoryLayout{});
    block.place(v_scale, "v_scale", Format::f32, {batch, kv_heads}, MemoryLayout{});
  }
}

std::vector<double> Implementation::PlacedCall::write(const Tensors& t, const Setting& setting,
                                                      std::byte* base) {
  block.fill(base, setting.guard);
  block.describe(base);
  const auto write_tensor = [&](const TensorView& master, const Placed& p, const Placed& scale,
                                const std::vector<double>& factors, bool unit_scale) {
    return write_input(master, p, base, scaled ? &scale : nullptr, factors, unit_scale);
  };
  std::vector<double> scales{
      write_tensor(t.q, q, q_scale, setting.q_factors, setting.q_unit_scale),
      write_tensor(t.k, k, k_scale, setting.k_factors, setting.k_unit_scale),
      write_tensor(t.v, v, v_scale, setting.v_factors, setting.v_unit_scale)};
  poison_output(out, base);
  if (!std::isnan(setting.out_before)) {
    out.each([&](std::int64_t, std::int64_t at) {
      encode(out.format, base + out.offset, at, setting.out_before);
    });
  }
  if (has_lse) poison_output(lse, base);
  return scales;
}

flashcore_verify_call Implementation::PlacedCall::descriptor(const HostCall& call, char* reason,
                                                             std::size_t size) const {
  const Options& o = call.options;
  const double default_scale = 1.0 / std::sqrt(static_cast<double>(call.tensors.q.shape[3]));
  flashcore_verify_call c{};
  c.struct_size = sizeof c;
  c.q = &q.descriptor;
  c.k = &k.descriptor;
  c.v = &v.descriptor;
  c.out = &out.descriptor;
  if (has_lse) c.lse = &lse.descriptor;
  if (scaled) {
    c.q_scale = &q_scale.descriptor;
    c.k_scale = &k_scale.descriptor;
    c.v_scale = &v_scale.descriptor;
  }
  c.window_left = o.window_left;
  c.window_right = o.window_right;
  c.scale = o.scale.value_or(default_scale);
  c.softcap = o.softcap;
  c.has_scale = o.scale ? 1 : 0;
  c.causal = o.causal ? 1 : 0;
  c.num_splits = o.num_splits;
  c.message = reason;
  c.message_bytes = size;
  return c;
}

CallResult Implementation::run(HostCall& call, const Setting& setting) {
  PlacedCall placed(call.tensors, formats_, setting);
  std::byte* base = target_.block(static_cast<std::size_t>(placed.block.bytes()));
  last_scales_ = placed.write(call.tensors, setting, base);
  const std::vector<std::byte> before(base, base + placed.block.bytes());
  char reason[512] = {};
  CallResult result;
  ++calls_;
  last_call_ = describe(call);
  const std::int32_t code =
      target_.call(placed.descriptor(call, reason, sizeof reason), &result.message);
  reason[sizeof reason - 1] = '\0';
  if (result.message.empty() && reason[0] != '\0') result.message = reason;
  if (target_.died()) {
    result.kind = CallResult::Kind::died;
    ++deaths_;
    return result;
  }
  if (code != FLASHCORE_OK) {
    note_error(code, result);
    return result;
  }
  read_output(placed.out, base, before, result.out, result.bits, result.unwritten,
              &result.is_unwritten);
  if (setting.lse) {
    read_output(placed.lse, base, before, result.lse, result.bits, result.lse_unwritten, nullptr);
  }
  const auto difference = std::mismatch(before.begin(), before.end(), base);
  if (difference.first != before.end()) {
    result.stray = placed.block.owner(difference.first - before.begin());
    if (first_stray_.empty()) {
      first_stray_ = result.stray;
      first_stray_call_ = last_call_;
    }
  }
  return result;
}

void Implementation::note_error(std::int32_t code, CallResult& result) {
  result.kind = code == FLASHCORE_UNSUPPORTED            ? CallResult::Kind::refused
                : code == FLASHCORE_VERIFY_OUT_MISSHAPEN ? CallResult::Kind::out_misshapen
                : code == FLASHCORE_VERIFY_LSE_MISSHAPEN ? CallResult::Kind::lse_misshapen
                                                         : CallResult::Kind::failed;
  if (result.message.empty()) result.message = "the function returned " + decimal(code);
  if (result.kind == CallResult::Kind::refused && refused_++ == 0) {
    first_refusal_ = last_call_ + ": " + result.message;
  }
}

}  // namespace flashcore::verify
