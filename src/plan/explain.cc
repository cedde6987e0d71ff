// A plan in words.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

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

std::string device_line(const DeviceInfo& d) {
  std::string text = d.name;
  if (d.device.type == DeviceType::cpu) {
    append(text, " (%s, %d threads)", to_string(d.isa), d.threads);
  } else {
    append(text, " (sm_%d, %d SMs, %d KiB shared memory per block)", d.compute_capability,
           d.sm_count, d.smem_per_block_bytes / 1024);
  }
  return text;
}

std::string why(const Plan& plan) {
  const Problem& p = plan.problem;
  if (p.options.kernel != nullptr) return "asked for by name";
  if (plan.kernel->device == DeviceType::cpu) {
    return std::string("the widest instruction set of this CPU with kernels is ") +
           to_string(plan.kernel->isa);
  }
  std::string text;
  append(text, "the smallest size for dims %lld/%lld", ll{p.head_dim}, ll{p.v_dim});
  switch (preference(*plan.kernel, p, plan.device)) {
    case Reject::none:
      append(text, ", %d rows per block %s", plan.tile_q,
             plan.num_tiles / plan.splits < plan.device.sm_count ? "to use as many SMs as possible"
                                                                 : "fill the SMs");
      break;
    default: break;
  }
  return text;
}

/// Rows are contiguous and aligned for 16-byte accesses, or not and slower.
const char* access_line(const Problem& p) {
  for (const Layout& layout : {p.q, p.k, p.v, p.out}) {
    if (layout.column != 1)
      return "element by element: a last dimension is not contiguous (slower)";
  }
  for (const Layout& layout : {p.q, p.k, p.v, p.out}) {
    if (layout.alignment_bytes < 16) return "element by element: rows are not 16-byte aligned";
  }
  return "16 bytes at a time";
}

/// Tensor cores take P in the inputs' format; every other kernel keeps it in f32 or f64.
bool on_tensor_cores(const KernelInfo& kernel) {
  return kernel.probability_dtype != DType::f32 && kernel.probability_dtype != DType::f64;
}

void append_floors(std::string& text, const Plan& plan) {
  const Cost c = cost(plan.problem);
  const DeviceInfo& d = plan.device;
  append(text, "work       %.4g GFLOP on %.4g visible pairs, %.4g MB of tensors\n", c.flops / 1e9,
         c.visible_pairs, c.bytes / 1e6);
  const bool tensor_cores = on_tensor_cores(*plan.kernel);
  // 8-bit operands go through at twice the rate.
  const double tflops = needs_e4m3(*plan.kernel) ? 2 * d.tensor16_tflops
                        : tensor_cores           ? d.tensor16_tflops
                                                 : d.f32_tflops;
  if (tflops <= 0 || d.memory_gbs <= 0) {
    text += "floor      unknown: measure_rates() has not been called for this device\n";
    return;
  }
  const double arithmetic_us = c.flops / (tflops * 1e6);
  const double memory_us = c.bytes / (d.memory_gbs * 1e3);
  append(text, "floor      arithmetic %.3g us (%s at %.4g TFLOP/s), memory %.3g us (%.4g GB/s)\n",
         arithmetic_us, tensor_cores ? "tensor cores" : "f32 FMA", tflops, memory_us, d.memory_gbs);
  if (!tensor_cores && d.tensor16_tflops > 0 && plan.problem.dtype != DType::f32) {
    append(text,
           "           with tensor cores %.3g us (%.4g TFLOP/s); this kernel does not use them\n",
           c.flops / (d.tensor16_tflops * 1e6), d.tensor16_tflops);
  }
  append(text, "bound      %s\n", arithmetic_us >= memory_us ? "arithmetic" : "memory");
}

}  // namespace

std::string describe(Reject reject, const KernelInfo& kernel, const Problem& problem,
                     const DeviceInfo& device) {
  std::string text;
  switch (reject) {
    case Reject::none: text = "could be used"; break;
    case Reject::other_device: append(text, "runs on %s", to_string(kernel.device)); break;
    case Reject::not_compiled: text = "not part of this build"; break;
    case Reject::isa:
      append(text, "needs %s, this CPU has %s", to_string(kernel.isa), to_string(device.isa));
      break;
    case Reject::compute_capability:
      append(text, "needs sm_%d%s, this GPU is sm_%d", kernel.min_compute_capability,
             kernel.uses_tma ? " and no other" : "", device.compute_capability);
      break;
    case Reject::shared_memory:
      append(text, "needs %d bytes of shared memory, a block here can have %d", kernel.smem_bytes,
             device.smem_per_block_bytes);
      break;
    case Reject::dtype:
      if (is_8bit(problem.q.dtype)) {
        append(text, "computes with %s; an 8-bit q with this output with %s",
               to_string(kernel.dtype), to_string(problem.dtype));
      } else {
        append(text, "takes %s, q is %s", to_string(kernel.dtype), to_string(problem.dtype));
      }
      break;
    case Reject::input_format:
      text = needs_e4m3(kernel)     ? "takes e4m3 q, k and v only"
             : needs_8_bits(kernel) ? "takes 8-bit k and v only"
                                    : "takes 16-bit q, k and v; sm80_8bit and simt take 8-bit ones";
      break;
    case Reject::scales:
      append(text, "takes blocks of k's scales of a multiple of %lld rows, and of v's of %d",
             ll{kKeysOfAScale}, kernel.tile_k);
      break;
    case Reject::head_dim:
      append(text, "takes dims up to %d, got %lld/%lld", kernel.head_dim, ll{problem.head_dim},
             ll{problem.v_dim});
      break;
    case Reject::wrong_size:
      append(text, "made for dims up to %d: would waste work", kernel.head_dim);
      break;
    case Reject::grid_too_small:
      append(text, "%d rows per block would leave SMs idle", kernel.tile_q);
      break;
    case Reject::grid_too_large:
      append(text, "%d rows per block would read K and V more often than needed", kernel.tile_q);
      break;
    case Reject::missing_feature:
      text = needs_8_bits(kernel) && !kernel.uses_tma
                 ? "weighs values by the largest scale in sight: not batch-invariant where blocks "
                   "of v have scales"
                 : "takes no bias, mask tensor, pages or num_splits, and writes the inputs' format";
      break;
    case Reject::softcap:
      append(text, "takes a softcap of at most %g", core::kLargestShortCap);
      break;
    case Reject::strides:
      text = "wants rows that are contiguous, 16-byte aligned and not repeated";
      break;
    case Reject::too_many_rows: text = "counts rows and work items in 32 bits"; break;
    case Reject::slower_family: text = "another family is expected to be faster"; break;
    case Reject::slower_isa: text = "a wider instruction set is there"; break;
  }
  return text;
}

std::string explain(const Plan& plan) {
  if (plan.kernel == nullptr) return "an empty plan; use make_plan()\n";
  std::string text;
  append(text, "problem    %s\n", problem_line(plan.problem).c_str());
  append(text, "device     %s\n", device_line(plan.device).c_str());
  append(text, "kernel     %s: %s%s\n", plan.kernel->id, why(plan).c_str(),
         plan.kernel->compiled ? "" : "; not part of this build");
  append(text, "tiles      %d rows", plan.tile_q);
  if (plan.heads_in_tile > 1) append(text, " of %d heads", plan.heads_in_tile);
  append(text, " x %d keys, %lld work items\n", plan.tile_k, ll{plan.num_tiles});
  if (plan.tail_tiles > 0) {
    append(text,
           "           the last %lld in %d parts of %lld keys, joined by the last to arrive\n",
           ll{plan.tail_tiles}, plan.tail_splits, ll{plan.keys_per_tail_split});
  }
  append(text, "splits     %d", plan.splits);
  if (plan.splits > 1)
    append(text, " of %lld keys, %s", ll{plan.keys_per_split},
           plan.combines_in_cluster ? "joined in clusters of SMs"
           : plan.combines_itself   ? "joined by the last block to arrive"
                                    : "then combine");
  append(text, "\naccess     %s\n", access_line(plan.problem));
  append(text, "workspace  %zu bytes (header %zu", plan.workspace_bytes, kWorkspaceHeaderBytes);
  if (plan.scratch_bytes_per_thread > 0) {
    append(text, ", scratch %d x %zu", plan.device.threads, plan.scratch_bytes_per_thread);
  }
  if (plan.splits > 1 || plan.tail_tiles > 0) {
    append(text, ", partials %zu", plan.workspace_bytes - plan.partial_out_offset);
  }
  text += ")\n";
  append_floors(text, plan);
  text += "not used\n";
  for (const KernelInfo& kernel : kernels()) {
    if (&kernel == plan.kernel || kernel.device != plan.kernel->device ||
        kernel.dtype != plan.problem.dtype) {
      continue;
    }
    Reject reject = supports(kernel, plan.problem, plan.device);
    if (reject == Reject::none) reject = preference(kernel, plan.problem, plan.device);
    append(text, "  %-24s %s\n", kernel.id,
           describe(reject, kernel, plan.problem, plan.device).c_str());
  }
  return text;
}

}  // namespace flashcore
