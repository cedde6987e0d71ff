#include "verify/implementation.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "verify/inputs/block.h"
#include "verify/inputs/decimal.h"

namespace flashcore::verify {

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

flashcore_verify_call options_of(const HostCall& call) {
  const Options& o = call.options;
  const double default_scale = 1.0 / std::sqrt(static_cast<double>(call.tensors.q.shape[3]));
  flashcore_verify_call c{};
  c.struct_size = sizeof c;
  c.window_left = o.window_left;
  c.window_right = o.window_right;
  c.scale = o.scale.value_or(default_scale);
  c.softcap = o.softcap;
  c.has_scale = o.scale ? 1 : 0;
  c.causal = o.causal ? 1 : 0;
  c.num_splits = o.num_splits;
  return c;
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
    block.place(lse, "lse", format, {batch, q_heads, t.q.shape[2]}, setting.of_rows);
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
  fill_output(out, base, setting.out_before);
  if (has_lse) fill_output(lse, base, std::nan(""));
  return scales;
}

flashcore_verify_call Implementation::PlacedCall::descriptor(const HostCall& call, char* reason,
                                                             std::size_t size) const {
  flashcore_verify_call c = options_of(call);
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
  c.message = reason;
  c.message_bytes = size;
  return c;
}

CallResult Implementation::run(HostCall& call, const Setting& setting) {
  PlacedCall placed(call.tensors, formats_, setting);
  std::byte* base = target_.block(static_cast<std::size_t>(placed.block.bytes()));
  last_scales_ = placed.write(call.tensors, setting, base);
  const std::vector<std::byte> before(base, base + placed.block.bytes());
  char reason[kReasonBytes] = {};
  CallResult result;
  last_call_ = describe(call);
  const std::int32_t code =
      target_.call(placed.descriptor(call, reason, sizeof reason), &result.message);
  if (!note_end(code, reason, result)) return result;
  read_output(placed.out, base, before, result.out, result.bits, result.unwritten,
              &result.is_unwritten);
  if (setting.lse) {
    read_output(placed.lse, base, before, result.lse, result.bits, result.lse_unwritten, nullptr);
  }
  note_stray(placed.block, before, base, result);
  return result;
}

bool Implementation::note_end(std::int32_t code, const char* reason, CallOutcome& result) {
  ++calls_;
  if (result.message.empty()) result.message.assign(reason, strnlen(reason, kReasonBytes - 1));
  if (target_.died()) {
    result.kind = CallOutcome::Kind::died;
    ++deaths_;
    return false;
  }
  if (code != FLASHCORE_OK) note_error(code, result);
  return code == FLASHCORE_OK;
}

void Implementation::note_stray(const Block& block, const std::vector<std::byte>& before,
                                const std::byte* base, CallOutcome& result) {
  const auto difference = std::mismatch(before.begin(), before.end(), base);
  if (difference.first == before.end()) return;
  result.stray = block.owner(difference.first - before.begin());
  if (!first_stray_.empty()) return;
  first_stray_ = result.stray;
  first_stray_call_ = last_call_;
}

void Implementation::note_error(std::int32_t code, CallOutcome& result) {
  result.kind = code == FLASHCORE_UNSUPPORTED                 ? CallResult::Kind::refused
                : code == FLASHCORE_VERIFY_OUT_MISSHAPEN      ? CallResult::Kind::out_misshapen
                : code == FLASHCORE_VERIFY_LSE_MISSHAPEN      ? CallResult::Kind::lse_misshapen
                : code == FLASHCORE_VERIFY_GRADIENT_MISSHAPEN ? CallResult::Kind::gradient_misshapen
                                                              : CallResult::Kind::failed;
  if (result.message.empty()) result.message = "the function returned " + decimal(code);
  if (result.kind == CallResult::Kind::refused && refused_++ == 0) {
    first_refusal_ = last_call_ + ": " + result.message;
  }
}

}  // namespace flashcore::verify
