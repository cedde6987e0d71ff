#include "cpu/backward.h"

#include "core/element.h"
#include "core/error.h"
#include "core/row_offset.h"
#include "core/seq_info.h"
#include "cpu/backward_kernel.h"
#include "cpu/cpu_info.h"
#include "cpu/thread_pool.h"

namespace flashcore::cpu {
namespace {

constexpr double kInlineBackwardFlops = 2e5;  // other threads would cost more time than they save

/// Null if this build has no kernels for the instruction set.
const BackwardKernels* backward_kernels(Isa isa) noexcept {
  switch (isa) {
    case Isa::generic: return &kGenericBackwardKernels;
#if defined(__aarch64__)
    case Isa::neon: return &kNeonBackwardKernels;
#elif defined(__x86_64__)
    case Isa::avx2: return &kAvx2BackwardKernels;
    case Isa::avx512: return &kAvx512BackwardKernels;
#endif
    default: return nullptr;
  }
}

BackwardFunction backward_function(const KernelInfo& kernel) noexcept {
  const BackwardKernels* kernels = backward_kernels(kernel.isa);
  if (kernels == nullptr || !isa_available(kernel.isa)) return nullptr;
  switch (kernel.dtype) {
    case DType::f64: return kernels->f64;
    case DType::f32: return kernels->f32;
    case DType::f16: return kernels->f16;
    case DType::bf16: return kernels->bf16;
    default: return nullptr;
  }
}

/// Zeroes a varlen gradient, because rows between the sequences belong to no work tile.
void zero_rows(void* data, core::Element element, const core::Strides& strides, std::int32_t rows,
               std::int32_t heads, std::int32_t columns) noexcept {
  if (data == nullptr) return;
  for (std::int32_t row = 0; row < rows; ++row) {
    for (std::int32_t h = 0; h < heads; ++h) {
      const std::int64_t at = core::row_offset(strides, 0, h, row);
      for (std::int32_t c = 0; c < columns; ++c) {
        core::store_element(data, element, at + c * strides.column, 0.0);
      }
    }
  }
}

Status check_lengths(const core::AttentionParams& p) noexcept {
  for (std::int32_t b = 0; b < p.batch; ++b) {
    const core::ErrorSlot found = core::seq_info_of(p, b).error;
    if (found.code == 0) continue;
    if (p.checked) *p.error = found;
    return describe_error(found);
  }
  return {};
}

}  // namespace

Status run_backward(const BackwardPlan& plan, const core::BackwardParams& params,
                    const std::int32_t* cancel) noexcept {
  struct Job {
    BackwardFunction function;
    const core::BackwardParams* params;
    core::BackwardStep step;
    char* scratch;
    std::size_t scratch_stride;
    const std::int32_t* cancel;
  } job{backward_function(*plan.kernel),
        &params,
        core::BackwardStep::row_stats,
        reinterpret_cast<char*>(params.fwd.error) + plan.scratch_offset,
        plan.scratch_bytes_per_thread,
        cancel};
  if (job.function == nullptr) {
    return unsupported("kernel %s: this CPU cannot execute it", plan.kernel->id);
  }
  const core::AttentionParams& f = params.fwd;
  // Lengths and starts are in host memory: check all of them before any write.
  FLASHCORE_RETURN_IF_ERROR(check_lengths(f));
  if (f.cu_seqlens_q != nullptr) {
    zero_rows(params.dq, params.dq_element, params.dq_strides, f.total_q, f.q_heads, f.head_dim);
  }
  if (f.cu_seqlens_k != nullptr) {
    zero_rows(params.dk, params.dk_element, params.dk_strides, f.total_k, f.kv_heads, f.head_dim);
    zero_rows(params.dv, params.dv_element, params.dv_strides, f.total_k, f.kv_heads, f.v_dim);
  }
  const int threads = cost(plan.problem).flops < kInlineBackwardFlops ? 1 : plan.device.threads;
  for (const core::BackwardStep step :
       {core::BackwardStep::row_stats, core::BackwardStep::pairs, core::BackwardStep::dq,
        core::BackwardStep::dbias, core::BackwardStep::dsinks}) {
    job.step = step;
    parallel_for(
        threads, core::backward_tiles(params, step),
        [](void* context, std::int64_t index, int slot) {
          const Job& j = *static_cast<const Job*>(context);
          j.function(*j.params, j.step, index,
                     j.scratch + static_cast<std::size_t>(slot) * j.scratch_stride, j.cancel);
        },
        &job, cancel);
    FLASHCORE_RETURN_IF_ERROR(check_cancel(cancel));
  }
  return {};
}

}  // namespace flashcore::cpu
