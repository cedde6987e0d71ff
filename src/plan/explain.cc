// explain(): prints a plan, and the reason against every other kernel.
#include <cstdarg>
#include <cstdio>
#include <string>
#include <vector>

#include "core/softcap.h"
#include "plan/planner.h"
#include "plan/problem_line.h"

namespace flashcore {
namespace {

[[gnu::format(printf, 2, 3)]] void append(std::string& text, const char* format, ...) {
  char line[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  text += line;
}

using ll = long long;

std::string choice_text(const Plan& plan) {
  const Problem& p = plan.problem;
  if (p.options.kernel != nullptr) return "requested by the caller";
  if (plan.kernel->device == DeviceType::cpu) {
    return std::string("the widest instruction set of this CPU with kernels is ") +
           to_string(plan.kernel->isa);
  }
  std::string text;
  append(text, "the smallest size for dims %lld/%lld, %d rows per tile %s", ll{p.head_dim},
         ll{p.v_dim}, plan.tile_q,
         plan.num_tiles / plan.splits < plan.device.sm_count ? "to use as many SMs as possible"
                                                             : "fill the SMs");
  return text;
}

/// Describes the loads and stores of rows.
const char* access_line(const Problem& p) {
  for (const Layout& layout : {p.q, p.k, p.v, p.out}) {
    if (layout.column != 1) {
      return "element by element: a last dimension is not contiguous (slower)";
    }
  }
  for (const Layout& layout : {p.q, p.k, p.v, p.out}) {
    if (layout.alignment_bytes < 16) return "element by element: rows are not 16-byte aligned";
  }
  return "16 bytes at a time";
}

const char* combine_text(CombineMode mode) {
  switch (mode) {
    case CombineMode::none: break;
    case CombineMode::kernel: return "combined by a second kernel";
    case CombineMode::last_cta: return "combined by the last CTA to finish";
    case CombineMode::cluster: return "combined in clusters of CTAs";
  }
  return "";
}

void append_tiles(std::string& text, const Plan& plan) {
  append(text, "tiles      %d rows", plan.tile_q);
  if (plan.heads_in_tile > 1) append(text, " of %d heads", plan.heads_in_tile);
  append(text, " x %d keys, %lld work tiles\n", plan.tile_k, ll{plan.num_tiles});
  if (plan.tail_tiles > 0) {
    append(text, "           tail: the last %lld in %d splits of %lld keys\n", ll{plan.tail_tiles},
           plan.tail_splits, ll{plan.keys_per_tail_split});
  }
  if (plan.key_ranges > 1) {
    append(text, "           up to %d ranges of %lld keys, %s, merged in order\n", plan.key_ranges,
           ll{plan.keys_per_range}, plan.ranges_apart ? "on several CTAs" : "one after the other");
  }
  append(text, "splits     %d", plan.splits);
  if (plan.splits > 1) {
    append(text, " of %lld keys, %s", ll{plan.keys_per_split}, combine_text(plan.combine));
  }
  append(text, "\naccess     %s\n", access_line(plan.problem));
}

void append_workspace(std::string& text, const Plan& plan) {
  append(text, "workspace  %zu bytes (header %zu", plan.workspace_bytes, kWorkspaceHeaderBytes);
  if (plan.scratch_bytes_per_thread > 0) {
    append(text, ", scratch %d x %zu", plan.device.threads, plan.scratch_bytes_per_thread);
  }
  if (plan.splits > 1 || plan.tail_tiles > 0 || plan.key_ranges > 1) {
    append(text, ", partials %zu", plan.workspace_bytes - plan.partial_out_offset);
  }
  text += ")\n";
}

void append_roofline(std::string& text, const Plan& plan) {
  const Cost c = cost(plan.problem);
  const DeviceInfo& d = plan.device;
  append(text, "work       %.4g GFLOP on %.4g visible pairs, %.4g MB of tensors\n", c.flops / 1e9,
         c.visible_pairs, c.bytes / 1e6);
  const bool tensor_cores = uses_tensor_cores(traits_of(*plan.kernel));
  // fp8 GEMMs have twice the rate of 16-bit ones.
  const double tflops = plan.kernel->inputs == Inputs::fp8 ? 2 * d.tensor16_tflops
                        : tensor_cores                     ? d.tensor16_tflops
                                                           : d.f32_tflops;
  if (tflops <= 0 || d.memory_gbs <= 0) {
    text += "roofline   unknown: measure_rates() has not been called for this device\n";
    return;
  }
  const double arithmetic_us = c.flops / (tflops * 1e6);
  const double memory_us = c.bytes / (d.memory_gbs * 1e3);
  append(text, "roofline   arithmetic %.3g us (%s at %.4g TFLOP/s), memory %.3g us (%.4g GB/s)\n",
         arithmetic_us, tensor_cores ? "tensor cores" : "f32 FMA", tflops, memory_us, d.memory_gbs);
  if (!tensor_cores && d.tensor16_tflops > 0 && plan.problem.dtype != DType::f32) {
    append(text,
           "           with tensor cores %.3g us (%.4g TFLOP/s); this kernel does not use them\n",
           c.flops / (d.tensor16_tflops * 1e6), d.tensor16_tflops);
  }
  append(text, "bound      %s\n", arithmetic_us >= memory_us ? "arithmetic" : "memory");
}

struct NamedFeature {
  Features feature;
  const char* name;
};
constexpr NamedFeature kFeatureNames[] = {
    {Features::bias, "bias"},
    {Features::mask, "mask tensor"},
    {Features::alibi, "ALiBi"},
    {Features::softcap, "softcap"},
    {Features::sinks, "sinks"},
    {Features::window, "window"},
    {Features::varlen, "variable lengths"},
    {Features::paged, "paged KV"},
    {Features::any_stride, "strided or unaligned rows"},
    {Features::f32_out, "f32 output"},
    {Features::partial, "partial results"},
    {Features::num_splits, "num_splits"},
    {Features::block_scales, "block scales"},
    {Features::batch_invariant_scales, "batch-invariant block scales of v"},
};

std::string dtype_message(const KernelInfo& kernel, const Problem& problem) {
  std::string text;
  if (is_8bit(problem.q.dtype)) {
    append(text, "computes with %s; an 8-bit q with this output needs %s", to_string(kernel.dtype),
           to_string(problem.dtype));
  } else {
    append(text, "takes %s, q is %s", to_string(kernel.dtype), to_string(problem.dtype));
  }
  return text;
}

const char* format_message(Inputs inputs) {
  switch (inputs) {
    case Inputs::native: break;
    case Inputs::kv8: return "takes 8-bit k and v only";
    case Inputs::fp8: return "takes e4m3 q, k and v only";
  }
  return "takes q, k and v in its own dtype only, not 8-bit ones";
}

/// The reason why the device cannot run the kernel.
std::string device_message(Reject reject, const KernelInfo& kernel, const DeviceInfo& device) {
  std::string text;
  if (reject == Reject::other_device) append(text, "runs on %s", to_string(kernel.device));
  if (reject == Reject::isa) {
    append(text, "needs %s, this CPU has %s", to_string(kernel.isa), to_string(device.isa));
  }
  if (reject == Reject::compute_capability) {
    const int least = kernel.min_compute_capability, most = kernel.max_compute_capability;
    append(text, "needs sm_%d", least);
    if (most == least) append(text, " exactly");
    if (most == kAnyCc) append(text, " or later");
    if (most != least && most != kAnyCc) append(text, " to sm_%d", most);
    append(text, ", this GPU is sm_%d", device.compute_capability);
  }
  if (reject == Reject::shared_memory) {
    append(text, "needs %d bytes of shared memory, a CTA on this GPU can have %d",
           kernel.smem_bytes, device.smem_per_block_bytes);
  }
  return text;
}

}  // namespace

std::vector<std::string> feature_names(Features features) {
  std::vector<std::string> names;
  for (const NamedFeature& named : kFeatureNames) {
    if (any(features & named.feature)) names.push_back(named.name);
  }
  return names;
}

static std::string lacks_message(Features missing) {
  std::string text = "lacks";
  for (const std::string& name : feature_names(missing)) {
    text += (text == "lacks" ? " " : ", ") + name;
  }
  return text;
}

std::string to_message(Reject reject, const KernelInfo& kernel, const Problem& problem,
                       const DeviceInfo& device) {
  std::string text;
  switch (reject) {
    case Reject::none: return "can run the problem";
    case Reject::not_compiled: return "is not part of this build";
    case Reject::operation:
      return kernel.op == Operation::bwd ? "computes gradients, for run_backward()"
                                         : "computes results, for run()";
    case Reject::other_device:
    case Reject::isa:
    case Reject::compute_capability:
    case Reject::shared_memory: return device_message(reject, kernel, device);
    case Reject::dtype: return dtype_message(kernel, problem);
    case Reject::input_format: return format_message(kernel.inputs);
    case Reject::scales:
      append(text, "needs scale blocks of a multiple of %lld rows of k and %d rows of v",
             ll{kMinKeysPerScale}, kernel.tile_k);
      break;
    case Reject::head_dim:
      append(text, "takes dims up to %d/%d, got %lld/%lld", kernel.head_dim, kernel.v_dim,
             ll{problem.head_dim}, ll{problem.v_dim});
      break;
    case Reject::wrong_size:
      append(text, "wastes work: its dims are %d/%d", kernel.head_dim, kernel.v_dim);
      break;
    case Reject::grid_too_small:
      append(text, "would leave SMs idle with %d rows per tile", kernel.tile_q);
      break;
    case Reject::grid_too_large:
      append(text, "would read K and V more often than needed with %d rows per tile",
             kernel.tile_q);
      break;
    case Reject::missing_feature: return lacks_message(missing_features(kernel, problem));
    case Reject::softcap:
      append(text, "takes a softcap of at most %g", core::kLargestShortCap);
      break;
    case Reject::dout_format: return "takes dout in q's dtype only";
    case Reject::dout_strides:
      return "needs a dout with contiguous, 16-byte aligned rows that are not broadcast";
    case Reject::gradient_format:
      return "writes dq, dk and dv in q's dtype or f32, to contiguous, 8-byte aligned rows";
    case Reject::gradient_subset: return "computes dq together with dk or dv only";
    case Reject::some_gradients: return "computes dq, dk and dv together only";
    case Reject::strides: return "needs contiguous, 16-byte aligned rows that are not broadcast";
    case Reject::too_many_rows: return "counts rows and work tiles in 32 bits";
    case Reject::packed_mask: return "would turn the block mask into more than 8 GiB of bits";
    case Reject::slower_family: return "is slower by estimate than another family";
    case Reject::slower_isa: return "uses a narrower instruction set";
    case Reject::slower_tile: return "is slower for this number of rows";
  }
  return text;
}

std::string explain(const Plan& plan) {
  if (plan.kernel == nullptr) return "an empty plan; use make_plan()\n";
  std::string text;
  append(text, "problem    %s\n", problem_line(plan.problem).c_str());
  append(text, "device     %s\n", device_line(plan.device).c_str());
  append(text, "kernel     %s: %s%s\n", plan.kernel->id, choice_text(plan).c_str(),
         plan.kernel->compiled ? "" : "; not part of this build");
  append_tiles(text, plan);
  append_workspace(text, plan);
  append_roofline(text, plan);
  text += "not used\n";
  const Features needed = features_of(plan.problem);
  for (const KernelInfo& kernel : kernels()) {
    if (&kernel == plan.kernel || kernel.op != Operation::fwd ||
        kernel.device != plan.kernel->device || kernel.dtype != plan.problem.dtype) {
      continue;
    }
    Reject reject = supports(kernel, plan.problem, plan.device, needed);
    if (reject == Reject::none) reject = preference(kernel, plan.problem, plan.device);
    append(text, "  %-24s %s\n", kernel.id,
           to_message(reject, kernel, plan.problem, plan.device).c_str());
  }
  return text;
}

}  // namespace flashcore
