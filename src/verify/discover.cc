// Discovers capabilities and conventions with random calls. Runs before the probes.
#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/inputs/lengths.h"
#include "verify/probe_sequence.h"

namespace flashcore::verify {
namespace {

constexpr std::int64_t kCommonDims[] = {64, 128, 32, 80, 256, 16, 96, 72};

HostCall random_normal_call(const ProbeSequence& probes, const Shape& shape,
                            const Options& options) {
  HostCall call = probes.call(shape, options);
  fill_random(call.tensors.q, 1, 1, 1);
  fill_random(call.tensors.k, 1, 1, 2);
  fill_random(call.tensors.v, 1, 1, 3);
  return call;
}

/// Tries calls and records capabilities.
class Explorer {
 public:
  Explorer(ProbeSequence& probes, Discovery& found) : probes_(probes), found_(found) {}

  /// True if the implementation accepts the call. Otherwise message() is the reason.
  bool accepts(const Shape& shape, const Options& options, const Setting* setting = nullptr) {
    HostCall call = random_normal_call(probes_, shape, options);
    const Setting defaults = probes_.impl.default_setting();
    last_ = probes_.impl.run(call, setting != nullptr ? *setting : defaults);
    return last_.ok();
  }
  const std::string& message() const { return last_.message; }
  bool died() const { return last_.kind == CallResult::Kind::died; }
  const CallResult& last() const { return last_; }

  /// Sets and records a capability: as declared, or the result of `attempt`.
  template <typename Attempt>
  void determine(const char* name, std::int32_t declared, bool& can, Attempt attempt) {
    last_ = {};
    can = declared >= 0 ? declared != 0 : attempt();
    // A call that ends its process or returns another shape is a fault, not a refusal. The
    // capability then counts as present, and the probe that needs it reports the fault.
    if (declared < 0 && (last_.kind == CallResult::Kind::died || last_.misshapen())) can = true;
    std::string line = std::string(name) + ": " + (can ? "yes" : "no");
    if (declared >= 0) {
      line += " (declared)";
    } else if (!can && !last_.message.empty()) {
      line += " (" + last_.message + ")";
    }
    found_.capabilities.push_back(line);
  }

 private:
  ProbeSequence& probes_;
  Discovery& found_;
  CallResult last_;
};

/// Finds a shape and options of a call that works.
Status find_working_call(ProbeSequence& probes, Explorer& explorer, Discovery& found,
                         const flashcore_verify_options& o, Shape& shape, Options& options) {
  std::vector<std::int64_t> dims(std::begin(kCommonDims), std::end(kCommonDims));
  if (o.head_dims[0] > 0) {
    dims.clear();
    for (const std::int64_t d : o.head_dims) {
      if (d > 0) dims.push_back(d);
    }
  }
  std::string first;
  int deaths = 0;
  for (const bool causal : {false, true}) {
    for (const std::int64_t length : {5, 64, 128}) {
      for (const std::int64_t d : dims) {
        shape = {1, 1, 1, length, length, d, d};
        options = {};
        options.causal = causal;
        if (explorer.accepts(shape, options)) {
          probes.can.full = !causal;
          return {};
        }
        if (explorer.last().misshapen()) {
          found.fault = *failure_of(probes, explorer.last(), FaultStage::layout);
          probes.can.head_dims = {d};
          return {};
        }
        if (first.empty()) first = explorer.message();
        if (explorer.died() && ++deaths == kMaxDeaths) {
          return {StatusCode::invalid_argument, "no call works; the first error: " + first};
        }
      }
    }
  }
  return {StatusCode::invalid_argument, "no call works; the first error: " + first};
}

void find_dims(ProbeSequence& probes, Explorer& explorer, Discovery& found,
               const flashcore_verify_options& o, const Shape& working, const Options& options) {
  probes.can.head_dims.clear();
  std::string line = "head dims:";
  if (o.head_dims[0] > 0) {
    for (const std::int64_t d : o.head_dims) {
      if (d > 0) probes.can.head_dims.push_back(d);
    }
  } else {
    for (const std::int64_t d : kCommonDims) {
      // A quick run uses two head dims, and one that is not a multiple of 32.
      const std::size_t have = probes.can.head_dims.size();
      if (probes.quick && (have == 3 || (have == 2 && d % 32 == 0))) continue;
      Shape shape = working;
      shape.head_dim = shape.v_dim = d;
      if (explorer.accepts(shape, options)) probes.can.head_dims.push_back(d);
    }
  }
  for (const std::int64_t d : probes.can.head_dims) line.append(" ").append(decimal(d));
  found.capabilities.push_back(line + (o.head_dims[0] > 0 ? " (declared)" : ""));
}

/// Finds the causal alignment with Q = 0 and q_len != kv_len.
void find_alignment(ProbeSequence& probes, Discovery& found, const flashcore_verify_options& o) {
  const std::string declared = o.causal_alignment != nullptr ? o.causal_alignment : "";
  if (!declared.empty()) {
    probes.conventions.top_left = declared == "top-left";
    found.conventions.push_back("causal: " + declared + " (declared)");
    return;
  }
  if (!probes.can.causal || !probes.can.cross) return;
  Options options = probes.base();
  options.causal = true;
  double wrong[2] = {};
  for (const bool top_left : {false, true}) {
    probes.conventions.top_left = top_left;
    for (const auto& [q_len, kv_len] : {std::pair{6, 24}, {24, 6}, {2, 9}}) {
      HostCall call = probes.call(probes.shape(q_len, kv_len, probes.main_dim(), false), options);
      fill_folded_one_hot(call);
      const CallResult result = probes.impl.run(call);
      if (!result.ok()) continue;
      const Judged judged = probes.judge(call, result);
      wrong[top_left ? 1 : 0] += static_cast<double>(judged.wrong);
    }
  }
  probes.conventions.top_left = wrong[1] < wrong[0];
  found.conventions.push_back(std::string("causal: ") + (probes.conventions.top_left
                                                             ? "top-left (query 0 is at key 0)"
                                                             : "bottom-right (the last query is at "
                                                               "the last key)"));
}

/// Reports the LSE of rows that see no key. Any number but NaN is accepted.
void find_empty_rows(ProbeSequence& probes, Discovery& found) {
  if (!probes.can.causal || !probes.can.cross || !probes.can.lse || probes.conventions.top_left) {
    return;
  }
  Options options = probes.base();
  options.causal = true;
  HostCall call = probes.call(probes.shape(9, 4, probes.main_dim(), false), options);
  if (call.tensors.q.shape[2] <= call.tensors.k.shape[2]) return;
  Setting setting = probes.impl.default_setting();
  setting.lse = true;
  const CallResult result = probes.impl.run(call, setting);
  if (result.ok()) {
    probes.conventions.empty_lse = result.lse[0];
    found.conventions.push_back("LSE of a row without visible keys: " + number(result.lse[0]));
  }
}

}  // namespace

Discovery discover(ProbeSequence& probes, const flashcore_verify_options& o) {
  Discovery found;
  Explorer explorer(probes, found);
  Shape working;
  Options options;
  probes.can.splits = false;
  found.status = find_working_call(probes, explorer, found, o, working, options);
  if (!found.status.ok() || found.fault.found()) return found;
  find_dims(probes, explorer, found, o, working, options);
  Capabilities& can = probes.can;
  const auto with = [&](auto change) {
    Shape s = working;
    Options opts = options;
    change(s, opts);
    return explorer.accepts(s, opts);
  };
  for (can.length_step = 1; can.length_step < 128; can.length_step *= 2) {
    const std::int64_t step = can.length_step;
    if (with([&](Shape& s, Options&) { s.q_len = s.kv_len = step; }) &&
        with([&](Shape& s, Options&) { s.q_len = s.kv_len = 3 * step; })) {
      break;
    }
  }
  if (can.length_step > 1) {
    found.capabilities.push_back("lengths: multiples of " + decimal(can.length_step));
  }
  const std::int64_t unit = std::max(can.length_step, std::int64_t{8});
  working.q_len = working.kv_len = unit;
  explorer.determine("batch", o.batch, can.batch,
                     [&] { return with([](Shape& s, Options&) { s.batch = 2; }); });
  explorer.determine("gqa", o.gqa, can.gqa, [&] {
    return with([](Shape& s, Options&) { s.q_heads = 6, s.kv_heads = 2; });
  });
  explorer.determine("cross", o.cross, can.cross, [&] {
    return with([&](Shape& s, Options&) { s.kv_len = 2 * unit; }) &&
           with([&](Shape& s, Options&) { s.q_len = 2 * unit; });
  });
  explorer.determine("causal", o.causal, can.causal,
                     [&] { return with([](Shape&, Options& x) { x.causal = true; }); });
  explorer.determine("window", o.window, can.window, [&] {
    return with([](Shape&, Options& x) { x.window_left = 3, x.window_right = 1; });
  });
  explorer.determine("scale", o.scale, can.scale,
                     [&] { return with([](Shape&, Options& x) { x.scale = 0.2; }); });
  explorer.determine("softcap", o.softcap, can.softcap,
                     [&] { return with([](Shape&, Options& x) { x.softcap = 5; }); });
  explorer.determine("splits", o.splits, can.splits, [&] {
    return with([](Shape&, Options& x) { x.num_splits = 1; }) && with([](Shape& s, Options& x) {
             s.kv_len = std::max<std::int64_t>(s.kv_len, 64), s.q_len = s.kv_len, x.num_splits = 2;
           });
  });
  explorer.determine("v_dim", o.v_dim, can.v_dim,
                     [&] { return with([](Shape& s, Options&) { s.v_dim = s.head_dim / 2; }); });
  explorer.determine("lse", o.lse, can.lse, [&] {
    Setting setting = probes.impl.default_setting();
    setting.lse = true;
    return explorer.accepts(working, options, &setting);
  });
  explorer.determine("strides", o.strides, can.strides, [&] {
    Setting setting = probes.impl.default_setting();
    setting.inputs = setting.out = MemoryLayout::padded;
    return explorer.accepts(working, options, &setting);
  });
  probes.conventions.lse_base_2 = o.lse_base != nullptr && std::string(o.lse_base) == "2";
  if (can.lse) {
    found.conventions.push_back(std::string("LSE: base ") +
                                (probes.conventions.lse_base_2 ? "2 (declared)" : "e"));
  }
  find_alignment(probes, found, o);
  find_empty_rows(probes, found);
  return found;
}

}  // namespace flashcore::verify
