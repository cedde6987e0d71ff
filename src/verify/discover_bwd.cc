// Discovers which calls the backward pass accepts.
#include <algorithm>

#include "verify/gradient_call.h"
#include "verify/inputs/decimal.h"

namespace flashcore::verify {
namespace {

/// Head dims that are probed by a few calls, if they are none of the run's own; also v_dims.
constexpr std::int64_t kOtherDims[] = {256, 16, 20, 100, 7};
constexpr std::int64_t kOtherValueDims[] = {20, 7};

class BackwardExplorer {
 public:
  BackwardExplorer(ProbeSequence& probes, Discovery& found) : probes_(probes), found_(found) {}

  /// True unless the call is refused: any other failure is a fault that the probes report.
  bool accepts(const Shape& shape, const Options& options, bool with_dlse = false,
               MemoryLayout layout = {}) {
    return run(shape, options, with_dlse, layout).kind != CallOutcome::Kind::refused;
  }
  /// True if the call succeeds, for what the forward pass has not been asked for.
  bool works(const Shape& shape, const Options& options) {
    return run(shape, options, false, {}).ok();
  }
  const std::string& message() const { return message_; }
  /// True if the forward pass, with its LSE, is correct.
  bool forward_is_correct(const Shape& shape, const Options& options, const Setting& setting) {
    HostCall call = probes_.call(shape, options);
    fill_random(call.tensors.q, 1, probes_.seed, 1);
    fill_random(call.tensors.k, 1, probes_.seed, 2);
    fill_random(call.tensors.v, 1, probes_.seed, 3);
    const CallResult result = probes_.impl.run(call, setting);
    if (!result.ok()) return false;
    const Judged judged = probes_.judge(call, result);
    return judged.ok() && judged.lse_wrong == 0;
  }

  /// Restricts a capability of the forward pass.
  template <typename Attempt>
  void restrict(const char* name, bool& can, Attempt attempt) {
    if (!can || attempt()) return;
    can = false;
    found_.capabilities.push_back("gradients with " + std::string(name) + ": no (" + message_ +
                                  ")");
  }

 private:
  GradientResult run(const Shape& shape, const Options& options, bool with_dlse,
                     MemoryLayout layout) {
    GradientCall call = gradient_call(probes_, shape, options);
    fill_random(call, 1, probes_.seed);
    if (with_dlse) {
      call.dlse.assign(static_cast<std::size_t>(shape.batch * shape.q_heads * shape.q_len), 0.5);
    }
    Setting setting = probes_.impl.default_setting();
    if (layout != MemoryLayout{}) setting.inputs = setting.out = layout;
    GradientResult result = run_only(probes_, call, setting);
    message_ = result.message;
    return result;
  }

  ProbeSequence& probes_;
  Discovery& found_;
  std::string message_;
};

/// Finds dims that are no multiples of 8 or 16, if nothing else is declared.
void find_other_dims(BackwardExplorer& explorer, const flashcore_verify_options& o,
                     const Options& base, const Shape& plain, Capabilities& can) {
  const auto has = [](const std::vector<std::int64_t>& dims, std::int64_t d) {
    return std::find(dims.begin(), dims.end(), d) != dims.end();
  };
  const auto works = [&](std::int64_t head_dim, std::int64_t v_dim) {
    Shape shape = plain;
    shape.head_dim = head_dim, shape.v_dim = v_dim;
    return explorer.works(shape, base);
  };
  if (o.head_dims[0] == 0) {
    for (const std::int64_t d : kOtherDims) {
      if (!has(can.head_dims, d) && works(d, d)) can.other_dims.push_back(d);
    }
  }
  for (const std::int64_t d : kOtherValueDims) {
    if (can.v_dim && o.v_dim != 0 && works(plain.head_dim, d)) can.other_v_dims.push_back(d);
  }
}

/// Finds out with what the forward pass is correct although no probe asks it.
void find_unusual_calls(ProbeSequence& probes, BackwardExplorer& explorer, Discovery& found,
                        const Options& base, Shape shape, Capabilities& can) {
  const Setting defaults = probes.impl.default_setting();
  const bool had_strays = !probes.impl.first_stray().empty();
  // Longer than a vector and with a rest, so that what is masked in a tile shows.
  if (can.length_step == 1) shape.q_len = shape.kv_len = 13;
  const auto note = [&](const char* name, bool& here, const Options& options,
                        const Setting& setting) {
    here = explorer.forward_is_correct(shape, options, setting);
    if (!here) {
      found.capabilities.push_back("gradients with " + std::string(name) +
                                   ": not probed, the forward pass does not take it");
    }
  };
  const bool is_own_order = defaults.inputs == MemoryLayout::heads_first;
  Setting setting = defaults;
  setting.inputs = setting.out = MemoryLayout::strided_columns;
  if (can.strides && is_own_order) note("strided columns", can.strided_columns, base, setting);
  setting = defaults;
  setting.lse = true;
  setting.of_rows = MemoryLayout::padded;
  if (can.strides && can.lse) note("a strided LSE", can.strided_rows, base, setting);
  Options options = base;
  options.scale = -0.4;
  if (can.scale) note("a negative scale", can.negative_scale, options, defaults);
  options.scale = 0;
  if (can.scale) note("a scale of 0", can.zero_scale, options, defaults);
  // A function that ignores strides writes between the elements.
  if (!had_strays) probes.impl.forget_strays();
}

}  // namespace

Discovery discover_backward(ProbeSequence& probes, const flashcore_verify_options& o) {
  Discovery found;
  BackwardExplorer explorer(probes, found);
  Capabilities& can = probes.can;
  const Options base = probes.base();
  const std::int64_t unit = std::max(can.length_step, std::int64_t{8});
  std::vector<std::int64_t> dims;
  std::string refusal;
  const auto plain = [&](std::int64_t d) { return Shape{1, 1, 1, unit, unit, d, d}; };
  for (const std::int64_t d : can.head_dims) {
    if (explorer.accepts(plain(d), base)) {
      dims.push_back(d);
    } else if (refusal.empty()) {
      refusal = explorer.message();
    }
  }
  if (dims.empty()) {
    found.status = {StatusCode::invalid_argument, refusal};
    return found;
  }
  std::string line = "gradients at head dims:";
  for (const std::int64_t d : dims) line.append(" ").append(decimal(d));
  found.capabilities.push_back(line);
  can.head_dims = dims;
  const auto with = [&](auto change) {
    Shape shape = plain(dims.front());
    Options options = base;
    change(shape, options);
    return explorer.accepts(shape, options);
  };
  explorer.restrict("batch > 1", can.batch,
                    [&] { return with([](Shape& s, Options&) { s.batch = 2; }); });
  explorer.restrict("GQA", can.gqa, [&] {
    return with([](Shape& s, Options&) { s.q_heads = 6, s.kv_heads = 2; });
  });
  explorer.restrict("q_len != kv_len", can.cross, [&] {
    return with([&](Shape& s, Options&) { s.kv_len = 2 * unit; }) &&
           with([&](Shape& s, Options&) { s.q_len = 2 * unit; });
  });
  explorer.restrict("a causal mask", can.causal,
                    [&] { return with([](Shape&, Options& x) { x.causal = true; }); });
  explorer.restrict("a window", can.window, [&] {
    return with([](Shape&, Options& x) { x.window_left = 3, x.window_right = 1; });
  });
  explorer.restrict("another scale", can.scale,
                    [&] { return with([](Shape&, Options& x) { x.scale = 0.2; }); });
  explorer.restrict("a softcap", can.softcap,
                    [&] { return with([](Shape&, Options& x) { x.softcap = 5; }); });
  explorer.restrict("v_dim != head_dim", can.v_dim,
                    [&] { return with([](Shape& s, Options&) { s.v_dim = s.head_dim / 2; }); });
  can.wide_values = can.v_dim && o.v_dim != 0;
  if (can.wide_values) {
    Shape shape = plain(dims.front());
    shape.v_dim *= 2;
    can.wide_values = explorer.works(shape, base);
  }
  find_other_dims(explorer, o, base, plain(dims.front()), can);
  explorer.restrict("strides", can.strides, [&] {
    return explorer.accepts(plain(dims.front()), base, false, MemoryLayout::padded);
  });
  find_unusual_calls(probes, explorer, found, base, plain(dims.front()), can);
  can.dlse = o.dlse >= 0 ? o.dlse != 0 : explorer.accepts(plain(dims.front()), base, true);
  found.capabilities.push_back(std::string("dlse: ") + (can.dlse ? "yes" : "no") +
                               (o.dlse >= 0 ? " (declared)"
                                : can.dlse  ? ""
                                            : " (" + explorer.message() + ")"));
  probes.deterministic = o.deterministic == 1;
  return found;
}

}  // namespace flashcore::verify
