// Calls of the backward pass.
#include <cmath>
#include <cstring>

#include "verify/implementation.h"
#include "verify/inputs/block.h"

namespace flashcore::verify {
namespace {

TensorView view_of(const std::vector<double>& values, const Placed& p) {
  TensorView view;
  view.data = const_cast<double*>(values.data());  // written by rounding, which changes nothing
  view.dtype = DType::f64;
  view.rank = p.rank;
  std::copy(p.shape, p.shape + 4, view.shape);
  return view;
}

/// The tensors of one call in the block.
struct PlacedGradients {
  PlacedGradients(const GradientCall& call, const ImplementationFormats& formats,
                  const Setting& setting);
  void write(const GradientCall& call, const Setting& setting, std::byte* base);

  Block block;
  Placed q, k, v, out, lse, dout, dlse;
  Placed gradients[kGradients];
};

PlacedGradients::PlacedGradients(const GradientCall& call, const ImplementationFormats& formats,
                                 const Setting& setting) {
  const Tensors& t = call.forward.tensors;
  const auto shape = [](const TensorView& view) {
    return std::vector<std::int64_t>(view.shape, view.shape + view.rank);
  };
  const Format wide = formats.dtype == Format::f64 ? Format::f64 : Format::f32;
  block.place(q, "q", formats.dtype, shape(t.q), setting.inputs);
  block.place(k, "k", formats.dtype, shape(t.k), setting.inputs);
  block.place(v, "v", formats.dtype, shape(t.v), setting.inputs);
  block.place(out, "out", formats.out, shape(t.out), setting.inputs);
  block.place(lse, "lse", wide, shape(t.lse), setting.of_rows);
  block.place(dout, "dout", formats.out, shape(t.out), setting.inputs);
  if (!call.dlse.empty()) block.place(dlse, "dlse", wide, shape(t.lse), setting.of_rows);
  const TensorView* like[] = {&t.q, &t.k, &t.v};
  for (int g = 0; g < kGradients; ++g) {
    block.place(gradients[g], kGradientNames[g], formats.dtype, shape(*like[g]), setting.out);
  }
}

void PlacedGradients::write(const GradientCall& call, const Setting& setting, std::byte* base) {
  const Tensors& t = call.forward.tensors;
  block.fill(base, setting.guard);
  block.describe(base);
  const auto put = [&](const TensorView& values, const Placed& p) {
    write_input(values, p, base, nullptr, {}, false);
  };
  put(t.q, q), put(t.k, k), put(t.v, v), put(t.out, out), put(t.lse, lse);
  put(view_of(call.dout, dout), dout);
  if (!call.dlse.empty()) put(view_of(call.dlse, dlse), dlse);
  for (const Placed& g : gradients) fill_output(g, base, setting.out_before);
}

}  // namespace

std::string describe(const GradientCall& call) {
  return describe(call.forward) + (call.dlse.empty() ? "" : ", dlse");
}

GradientResult Implementation::run_backward(const GradientCall& call, const Setting& setting) {
  PlacedGradients placed(call, formats_, setting);
  std::byte* base = target_.block(static_cast<std::size_t>(placed.block.bytes()));
  placed.write(call, setting, base);
  const std::vector<std::byte> before(base, base + placed.block.bytes());
  char reason[kReasonBytes] = {};
  flashcore_verify_call forward = options_of(call.forward);
  forward.q = &placed.q.descriptor;
  forward.k = &placed.k.descriptor;
  forward.v = &placed.v.descriptor;
  forward.out = &placed.out.descriptor;
  forward.lse = &placed.lse.descriptor;
  forward.message = reason;
  forward.message_bytes = sizeof reason;
  flashcore_verify_backward_call c{};
  c.struct_size = sizeof c;
  c.forward = &forward;
  c.dout = &placed.dout.descriptor;
  if (!call.dlse.empty()) c.dlse = &placed.dlse.descriptor;
  c.dq = &placed.gradients[kDq].descriptor;
  c.dk = &placed.gradients[kDk].descriptor;
  c.dv = &placed.gradients[kDv].descriptor;
  GradientResult result;
  last_call_ = describe(call);
  const std::int32_t code = target_.call_backward(c, &result.message);
  if (!note_end(code, reason, result)) return result;
  for (int g = 0; g < kGradients; ++g) {
    read_output(placed.gradients[g], base, before, result.value[g], result.bits,
                result.unwritten[g], nullptr);
  }
  note_stray(placed.block, before, base, result);
  return result;
}

}  // namespace flashcore::verify
