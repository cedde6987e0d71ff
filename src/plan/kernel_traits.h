// Kernel families as data: one row per family. The planner, the launcher and the scripts use this
// table and never compare family names. scripts/lib/families reads names and source_dirs from it.
#pragma once

#include <cstddef>
#include <span>

#include "core/score_mods.h"
#include "core/sm80_traits.h"
#include "core/sm90_fused_traits.h"
#include "core/sm90_traits.h"
#include "core/step_schedule.h"
#include "flashcore/plan.h"

namespace flashcore {

enum class Loads { scalar, cp_async, tma };  // global memory to shared memory
enum class Math { fma, mma, wgmma };

enum class GqaPacking {
  none,          // a tile has rows of one query head
  group,         // a tile has rows of all query heads that share K and V
  power_of_two,  // a power of two of these heads, in shapes that enable it (Sm90Traits::packs_gqa)
};

/// A bit set of CombineMode.
constexpr unsigned modes(CombineMode mode) noexcept { return 1u << static_cast<unsigned>(mode); }
template <typename... Modes>
constexpr unsigned modes(CombineMode mode, Modes... others) noexcept {
  return modes(mode) | modes(others...);
}

inline constexpr int kAnyCc = 1 << 16;  // no upper limit: later GPUs run the PTX
inline constexpr Features kAllFeatures = ~Features::none;

/// Pages, 8-bit tensors and splits have no gradients.
inline constexpr Features kBackwardFeatures =
    kAllFeatures & ~(Features::paged | Features::num_splits | Features::block_scales |
                     Features::batch_invariant_scales);

struct FamilyTraits {
  Family family;
  const char* names[3];  // printed name by Inputs; null if the family has no kernels for them
  DeviceType device;
  int min_cc, max_cc;  // range of compute capabilities; 0 on a CPU
  Loads loads;
  Math math;
  Features features;  // supported by its kernels; see features_of_kernel()
  unsigned combine_modes;
  GqaPacking gqa_packing;
  bool pdl;                   // programmatic dependent launch on sm_90, but see uses_pdl()
  bool persistent;            // at most one CTA per SM, which loops over work tiles
  int index_bits;             // width of its row and tile counters
  std::uint8_t general_mods;  // core::ScoreMods that take the general path
  bool general_layouts;       // calls without AttentionParams::fast_layout take it, too
  const char* source_dirs;    // sources of its fingerprint; "dir/*": without subdirectories
};

inline constexpr FamilyTraits kFamilies[] = {
    {.family = Family::cpu,
     .names = {"cpu", nullptr, nullptr},
     .device = DeviceType::cpu,
     .min_cc = 0,
     .max_cc = 0,
     .loads = Loads::scalar,
     .math = Math::fma,
     .features = kAllFeatures,
     .combine_modes = modes(CombineMode::kernel),
     .gqa_packing = GqaPacking::group,
     .pdl = false,
     .persistent = false,
     .index_bits = 64,
     .general_mods = core::kElementMods | core::kMaskMod,  // Q is scaled when it is loaded
     .general_layouts = false,
     .source_dirs = "src/cpu src/core"},
    {.family = Family::simt,
     .names = {"simt", nullptr, nullptr},
     .device = DeviceType::cuda,
     .min_cc = 75,
     .max_cc = kAnyCc,
     .loads = Loads::scalar,
     .math = Math::fma,
     .features = kAllFeatures,
     .combine_modes = modes(CombineMode::kernel),
     .gqa_packing = GqaPacking::none,
     .pdl = false,
     .persistent = false,
     .index_bits = 64,
     .general_mods = core::kElementMods | core::kMaskMod,  // Q is scaled when it is loaded
     .general_layouts = false,
     .source_dirs = "src/cuda/simt src/cuda/* src/cuda/common src/cuda/primitives src/core"},
    {.family = Family::sm80,
     .names = {"sm80", "sm80_8bit", nullptr},
     .device = DeviceType::cuda,
     .min_cc = 80,
     .max_cc = kAnyCc,
     .loads = Loads::cp_async,
     .math = Math::mma,
     .features = kAllFeatures,
     .combine_modes = modes(CombineMode::kernel, CombineMode::last_cta, CombineMode::cluster),
     .gqa_packing = GqaPacking::group,
     .pdl = true,
     .persistent = false,
     .index_bits = 32,
     .general_mods = core::kElementMods | core::kMaskMod | core::kNonPositiveScaleMod,
     .general_layouts = true,
     .source_dirs = "src/cuda/sm80 src/cuda/* src/cuda/common src/cuda/primitives src/core"},
    {.family = Family::sm90,
     .names = {"sm90", nullptr, "sm90_e4m3"},
     .device = DeviceType::cuda,
     .min_cc = 90,
     .max_cc = 90,  // only sm_90a has wgmma and setmaxnreg
     .loads = Loads::tma,
     .math = Math::wgmma,
     .features = kAllFeatures & ~(Features::any_stride | Features::num_splits),
     .combine_modes = modes(CombineMode::none),
     .gqa_packing = GqaPacking::power_of_two,
     .pdl = true,
     .persistent = true,
     .index_bits = 32,
     .general_mods = core::kElementMods | core::kNonPositiveScaleMod | core::kBlockScalesMod,
     .general_layouts = false,
     .source_dirs = "src/cuda/sm90 src/cuda/* src/cuda/common src/cuda/primitives src/core"},
};

/// Families of a device type in the planner's order. The first one wins a tie, and a
/// batch-invariant plan takes the first one that supports the problem.
inline constexpr Family kCpuFamilies[] = {Family::cpu};
inline constexpr Family kCudaFamilies[] = {Family::sm90, Family::sm80, Family::simt};
constexpr std::span<const Family> families_of(DeviceType device) noexcept {
  if (device == DeviceType::cpu) return kCpuFamilies;
  return kCudaFamilies;
}

constexpr const FamilyTraits& traits_of(Family family) noexcept {
  return kFamilies[static_cast<std::size_t>(family)];
}
constexpr const FamilyTraits& traits_of(const KernelInfo& kernel) noexcept {
  return traits_of(kernel.family);
}
static_assert(
    [] {
      std::size_t row = 0;
      for (const FamilyTraits& traits : kFamilies) {
        if (static_cast<std::size_t>(traits.family) != row++) return false;
      }
      return true;
    }(),
    "kFamilies is indexed by Family");

constexpr const char* family_name(Family family, Inputs inputs) noexcept {
  return traits_of(family).names[static_cast<std::size_t>(inputs)];
}

constexpr bool uses_tensor_cores(const FamilyTraits& traits) noexcept {
  return traits.math != Math::fma;
}

/// True for kernels that add dQ tiles in memory, key tile by key tile. Their ids end with _fused.
constexpr bool is_fused(const KernelInfo& kernel) noexcept {
  return kernel.op == Operation::bwd && traits_of(kernel).loads == Loads::tma &&
         kernel.tile_q == core::kFusedStepRows && kernel.tile_k == core::kFusedTileRows;
}

/// Traits of an sm90 kernel without its pipeline depth.
constexpr core::Sm90Traits sm90_shape(const KernelInfo& kernel) noexcept {
  return {kernel.head_dim, kernel.tile_q, kernel.tile_k, 0, kernel.inputs == Inputs::fp8 ? 1 : 2};
}

/// True if the kernel's sm_90 SASS waits by griddepcontrol. That of large tiles of sm80, which take
/// much longer than a launch, comes from PTX for sm_80 (cmake/cuda_kernels.cmake).
constexpr bool uses_pdl(const KernelInfo& kernel) noexcept {
  const bool from_sm80 = traits_of(kernel).loads == Loads::cp_async &&
                         kernel.inputs == Inputs::native && core::is_large_tile(kernel.tile_q);
  return traits_of(kernel).pdl && !from_sm80;
}

/// True if the KV tiles of a query tile start at the first key of its window, not at a multiple of
/// tile_k. A batch-invariant row would then depend on the other rows of the tile, and pages, masks
/// and a bias are read in whole KV tiles of the sequence.
inline bool tiles_from_window(const KernelInfo& kernel, const Problem& problem) noexcept {
  return traits_of(kernel).loads == Loads::tma && kernel.inputs == Inputs::native &&
         problem.options.window_left >= 0 &&
         problem.options.reproducibility == Reproducibility::deterministic &&
         problem.page_size == 0 && !problem.mask.given() && !problem.mask_blocks.given() &&
         !problem.bias.given();
}

/// True if the kernel reads a boolean mask as bits (core/packed_mask.h).
constexpr bool packs_mask(const KernelInfo& kernel) noexcept {
  if (kernel.op != Operation::fwd) return false;
  const Loads loads = traits_of(kernel).loads;
  return loads == Loads::tma || (loads == Loads::cp_async && core::is_large_tile(kernel.tile_q));
}

/// Kernels with native inputs have no scales. kv8 kernels fold V's block scales into f16 P,
/// relative to the largest scale of the keys they read. Other keys change that scale, so the result
/// is not batch-invariant.
constexpr Features features_of_kernel(const FamilyTraits& traits,
                                      const KernelInfo& kernel) noexcept {
  const Inputs inputs = kernel.inputs;
  Features missing = Features::none;
  if (inputs == Inputs::kv8) missing = Features::batch_invariant_scales;
  if (inputs == Inputs::native && uses_tensor_cores(traits)) {
    missing = Features::block_scales | Features::batch_invariant_scales;
  }
  if (traits.loads == Loads::tma) {
    const core::Sm90Traits shape = sm90_shape(kernel);
    const bool fwd = kernel.op == Operation::fwd;
    if (!fwd || !shape.takes_mask()) missing = missing | Features::mask;
    if (!fwd || !shape.takes_bias()) missing = missing | Features::bias;
  }
  if (is_fused(kernel)) missing = missing | Features::softcap | Features::alibi;
  return traits.features & ~missing;
}

/// True if the kernels give a row the same bits: forward sm90 kernels with equal KV tiles that add
/// up a row in the same order.
constexpr bool round_alike(const KernelInfo& a, const KernelInfo& b) noexcept {
  const auto is_known = [](const KernelInfo& k) {
    return k.family == Family::sm90 && k.op == Operation::fwd;
  };
  if (!is_known(a) || !is_known(b)) return &a == &b;
  const auto sum_chains = [](const KernelInfo& k) {
    return core::schedule_for(k.inputs == Inputs::fp8, k.head_dim, k.tile_q, k.tile_k).sum_chains;
  };
  return a.inputs == b.inputs && a.dtype == b.dtype && a.head_dim == b.head_dim &&
         a.tile_k == b.tile_k && sum_chains(a) == sum_chains(b);
}

}  // namespace flashcore
