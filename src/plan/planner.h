// Parts of the planner that explain(), the checks and the tools share.
#pragma once

#include <string>
#include <vector>

#include "flashcore/plan.h"
#include "plan/kernel_traits.h"
#include "plan/model/model.h"

namespace flashcore {

/// The reason why a kernel cannot run a problem on a device, or why the planner prefers another
/// one.
enum class Reject {
  none,
  other_device,        // a GPU kernel on a CPU, or the reverse
  operation,           // computes gradients and not results, or the reverse
  not_compiled,        // not part of this build
  isa,                 // the CPU lacks the instruction set
  compute_capability,  // outside the family's range
  shared_memory,       // needs more than this GPU allows per CTA
  dtype,
  head_dim,         // the problem's dims exceed the kernel's
  wrong_size,       // a kernel with smaller dims wastes less work
  grid_too_small,   // large tiles would leave SMs idle
  grid_too_large,   // small tiles would read K and V too often
  missing_feature,  // see missing_features()
  strides,          // TMA cannot read q, k or v, or out is not contiguous
  input_format,     // q, k or v are 8-bit and must not be, or the reverse
  scales,           // scale blocks of k or v do not fit its tiles
  too_many_rows,    // its 32-bit counters would overflow
  packed_mask,      // a block mask as bits would take too much memory
  softcap,          // above the largest cap that it computes exactly
  dout_format,      // dout is f32 and must not be
  dout_strides,     // TMA cannot read the rows of dout
  gradient_format,  // dq, dk or dv is f32, or has rows that 8-byte stores cannot write
  gradient_subset,  // dq, or both dk and dv, are not wanted
  some_gradients,   // dq, dk or dv is not wanted
  slower_family,
  slower_isa,
  slower_tile,
};

/// The kernels of one operation, family, inputs and dtype: small head dims first. May be empty.
std::span<const KernelInfo> kernels_of(Operation op, Family family, Inputs inputs,
                                       DType dtype) noexcept;

/// True if q, k and v may be 8-bit.
bool takes_8_bits(const KernelInfo& kernel) noexcept;
/// True if k and v must be 8-bit.
constexpr bool needs_8_bits(const KernelInfo& kernel) noexcept {
  return kernel.inputs != Inputs::native;
}
/// True if q, k and v must be e4m3.
constexpr bool needs_e4m3(const KernelInfo& kernel) noexcept {
  return kernel.inputs == Inputs::fp8;
}
/// fp8 kernels: scale blocks of k have a multiple of this many rows, those of v a multiple of
/// tile_k.
inline constexpr std::int64_t kMinKeysPerScale = 8;

/// True if gradients and dout need q's dtype and aligned rows: TMA reads dout.
constexpr bool takes_aligned_gradients(const KernelInfo& kernel) noexcept {
  return traits_of(kernel).loads == Loads::tma;
}

/// True if dout may be f32 beside a 16-bit q. Tensor cores take operands in q's dtype.
constexpr bool takes_f32_dout(const KernelInfo& kernel) noexcept {
  return !uses_tensor_cores(traits_of(kernel));
}

/// True if TMA can read the tensor: 16-byte aligned contiguous rows, and no broadcast dimension.
bool has_tensor_map(const Layout& layout, std::int64_t rows, std::int64_t heads,
                    std::int64_t batch) noexcept;

/// True if a launch has at most one CTA per SM, which loops over work tiles.
constexpr bool is_persistent(const KernelInfo& kernel) noexcept {
  return traits_of(kernel).persistent;
}

/// The features that a problem needs.
Features features_of(const Problem& problem) noexcept;

/// The features that a problem needs and a kernel lacks.
Features missing_features(const KernelInfo& kernel, const Problem& problem) noexcept;

/// "bias", "paged KV", ...: the names of a set of features.
std::vector<std::string> feature_names(Features features);

/// The first reason why a kernel cannot run a problem. `needed` is features_of(problem).
Reject supports(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device,
                Features needed) noexcept;
inline Reject supports(const KernelInfo& kernel, const Problem& problem,
                       const DeviceInfo& device) noexcept {
  return supports(kernel, problem, device, features_of(problem));
}

struct KernelChoice {
  const KernelInfo* kernel = nullptr;
  Estimate estimate{};  // among the kernels of its family
};

/// The planner's choice for a problem that names no kernel; kernel is null if none supports it.
KernelChoice choose_kernel(const Problem& problem, const DeviceInfo& device) noexcept;

/// The reason why the planner prefers another kernel. `kernel` supports the problem. Reject::none
/// if it is the planner's choice.
Reject preference(const KernelInfo& kernel, const Problem& problem,
                  const DeviceInfo& device) noexcept;

/// Sets the workspace offsets and size of a plan from its tiles and splits.
Status plan_workspace(Plan& plan) noexcept;
/// Workspace of a boolean or block mask as bits (core/packed_mask.h); 0 without a mask.
std::size_t packed_mask_bytes(const Problem& problem) noexcept;
/// A block mask is much smaller than its bits. Kernels that pack it refuse larger ones.
inline constexpr std::size_t kMaxPackedMaskBytes = std::size_t{1} << 33;

/// True if a kernel can split the tiles of a last partial wave along the keys: all tiles have the
/// same length, every split has keys, and the result may depend on the batch.
bool can_split_tail(const KernelInfo& kernel, const Problem& problem) noexcept;

/// Splits each of the last `tiles` tiles of a plan into `splits` (fewer if there are fewer KV
/// tiles) and enlarges the workspace. The kernel must support tail splits.
Status apply_tail_split(Plan& plan, std::int64_t tiles, std::int64_t splits) noexcept;

/// True if a kernel reads the keys of the problem in ranges of fixed length (core/key_ranges.h).
bool has_key_ranges(const KernelInfo& kernel, const Problem& problem) noexcept;

/// Sets the key ranges of a plan whose kernel has them, and enlarges the workspace. They are apart
/// if that gives idle SMs work and takes little workspace.
Status apply_key_ranges(Plan& plan) noexcept;

/// The reason as text, with the numbers of this kernel, problem and device.
std::string to_message(Reject reject, const KernelInfo& kernel, const Problem& problem,
                       const DeviceInfo& device);

}  // namespace flashcore
