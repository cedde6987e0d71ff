// Decides whether a kernel supports a problem, and chooses a kernel for it.
#include <algorithm>

#include "core/softcap.h"
#include "plan/model/model.h"
#include "plan/planner.h"
#include "plan/tile_counts.h"

namespace flashcore {
namespace {

constexpr double kMaxTilesIn32Bits = 0x1p30;

/// On x86-64 each instruction set includes those before it in Isa.
bool runs_on(Isa kernel, Isa cpu) {
  return kernel == Isa::generic || kernel == cpu || (kernel >= Isa::avx2 && kernel < cpu);
}

/// A build with CUDA offers only its own kernels. A build without CUDA plans for any GPU.
bool excluded_from_build(const KernelInfo& kernel) noexcept {
  if (kernel.compiled || kernel.device != DeviceType::cuda) return false;
  static const bool build_has_cuda =
      std::any_of(kernels().begin(), kernels().end(),
                  [](const KernelInfo& k) { return k.device == DeviceType::cuda && k.compiled; });
  return build_has_cuda;
}

bool is_stored_in_8_bits(const Problem& p) noexcept {
  return is_8bit(p.q.dtype) || is_8bit(p.k.dtype) || is_8bit(p.v.dtype);
}

bool has_tma_layout(const Problem& p) noexcept {
  const std::int64_t q_rows = p.q_varlen ? p.total_q : p.q_len;
  const bool paged = p.page_size > 0;
  const std::int64_t kv_rows = paged ? p.page_size : p.kv_varlen ? p.total_k : p.kv_len;
  const std::int64_t kv_batch = paged ? p.pages : p.kv_varlen ? 1 : p.batch;
  return p.out.column == 1 && p.out.alignment_bytes >= 8 && p.v_dim % 4 == 0 &&
         has_tensor_map(p.q, q_rows, p.q_heads, p.q_varlen ? 1 : p.batch) &&
         has_tensor_map(p.k, kv_rows, p.kv_heads, kv_batch) &&
         has_tensor_map(p.v, kv_rows, p.kv_heads, kv_batch);
}

/// True for a batch-invariant call whose contiguous rows are not 16-byte aligned. A tensor of one
/// row would be, and the kernel must not depend on the number of rows.
bool has_unaligned_rows(const Problem& p) noexcept {
  constexpr std::int64_t kAlignment = 16;
  return p.options.reproducibility == Reproducibility::batch_invariant &&
         (p.head_dim * size_of(p.q.dtype) % kAlignment != 0 ||
          p.v_dim * size_of(p.v.dtype) % kAlignment != 0);
}

bool has_compute_capability(const DeviceInfo& device, const FamilyTraits& traits) noexcept {
  return device.compute_capability >= traits.min_cc && device.compute_capability <= traits.max_cc;
}

Reject check_device(const KernelInfo& kernel, const DeviceInfo& device) noexcept {
  if (kernel.device != device.device.type) return Reject::other_device;
  if (kernel.device == DeviceType::cpu && !runs_on(kernel.isa, device.isa)) return Reject::isa;
  if (excluded_from_build(kernel)) return Reject::not_compiled;
  if (kernel.device == DeviceType::cpu) return Reject::none;
  if (device.compute_capability < kernel.min_compute_capability ||
      device.compute_capability > kernel.max_compute_capability) {
    return Reject::compute_capability;
  }
  return device.smem_per_block_bytes < kernel.smem_bytes ? Reject::shared_memory : Reject::none;
}

/// True if the rows and tiles of the problem fit the kernel's counters.
bool can_count(const KernelInfo& kernel, const Problem& p) noexcept {
  if (traits_of(kernel).index_bits > 32) return true;
  const std::int64_t heads = heads_in_tile(kernel, p);
  const auto at_least_1 = [](std::int64_t count) {
    return static_cast<double>(std::max<std::int64_t>(count, 1));
  };
  return at_least_1(p.q_len * heads) * at_least_1(p.batch * divide(p.q_heads, heads)) *
             at_least_1(p.options.num_splits) <=
         kMaxTilesIn32Bits;
}

/// fp8 kernels need e4m3 inputs, and scale blocks of whole key groups (K) or whole KV tiles (V).
Reject check_fp8(const KernelInfo& kernel, const Problem& p) noexcept {
  for (const Layout& layout : {p.q, p.k, p.v}) {
    if (layout.dtype != DType::e4m3) return Reject::input_format;
  }
  const std::int64_t block = p.options.kv_scale_block;
  const bool k_fits = p.k_scale.row == 0 || block % kMinKeysPerScale == 0;
  const bool v_fits = p.v_scale.row == 0 || block % kernel.tile_k == 0;
  return k_fits && v_fits ? Reject::none : Reject::scales;
}

bool fits_dims(const KernelInfo& kernel, const Problem& p) noexcept {
  return p.head_dim <= kernel.head_dim && p.v_dim <= kernel.v_dim;
}

/// Checks the device, the counters, the dtype and the dims.
Reject check_size(const KernelInfo& kernel, const Problem& p, const DeviceInfo& device) noexcept {
  const Reject on_device = check_device(kernel, device);
  if (on_device != Reject::none) return on_device;
  if (!can_count(kernel, p)) return Reject::too_many_rows;
  if (p.mask_blocks.given() && packs_mask(kernel) && packed_mask_bytes(p) > kMaxPackedMaskBytes) {
    return Reject::packed_mask;
  }
  if (kernel.dtype != p.dtype) return Reject::dtype;
  return fits_dims(kernel, p) ? Reject::none : Reject::head_dim;
}

/// Checks the input formats and the features.
Reject check_inputs(const KernelInfo& kernel, const Problem& problem, Features needed) noexcept {
  if (is_stored_in_8_bits(problem) && !takes_8_bits(kernel)) return Reject::input_format;
  if (needs_8_bits(kernel) && !(is_8bit(problem.k.dtype) && is_8bit(problem.v.dtype))) {
    return Reject::input_format;
  }
  const Features missing = needed & ~kernel.features;
  if (any(missing & Features::batch_invariant_scales)) return Reject::missing_feature;
  if (uses_tensor_cores(traits_of(kernel)) && problem.options.softcap > core::kLargestShortCap) {
    return Reject::softcap;
  }
  if (kernel.inputs == Inputs::fp8) {
    const Reject fp8 = check_fp8(kernel, problem);
    if (fp8 != Reject::none) return fp8;
  }
  if (any(missing & ~Features::any_stride)) return Reject::missing_feature;
  return any(missing) ? Reject::strides : Reject::none;
}

/// The cheapest of the usable kernels; of several, the first one.
template <typename Usable>
KernelChoice cheapest_of(std::span<const KernelInfo> kernels, const Problem& problem,
                         const DeviceInfo& device, Usable usable) noexcept {
  const FamilyModel& model = model_of(kernels.front().family);
  KernelChoice best;
  const auto consider = [&](const KernelInfo& kernel) {
    if (!usable(kernel)) return;
    const Estimate estimate = model.estimate(kernel, problem, device, Rivals::own_family);
    const bool is_best = best.kernel == nullptr || estimate.cost < best.estimate.cost ||
                         (estimate.cost == best.estimate.cost && &kernel < best.kernel);
    if (is_best) best = {&kernel, estimate};
  };
  bool any_unlikely = false;
  for (const KernelInfo& kernel : kernels) {
    if (model.bound(kernel, problem) > 0) {
      any_unlikely = true;
    } else {
      consider(kernel);
    }
  }
  if (!any_unlikely) return best;
  for (const KernelInfo& kernel : kernels) {
    const double bound = model.bound(kernel, problem);
    const bool excluded = best.kernel != nullptr && bound > best.estimate.cost;
    if (bound > 0 && !excluded) consider(kernel);
  }
  return best;
}

/// Chooses one of a family's kernels with equal dims: the smallest estimate. The bits of a
/// batch-invariant plan must not depend on q_len or batch: it chooses among the kernels that round
/// like the first one that supports the problem.
KernelChoice choose_among(std::span<const KernelInfo> kernels, const Problem& problem,
                          const DeviceInfo& device, Features needed) noexcept {
  const auto is_supported = [&](const KernelInfo& kernel) {
    return supports(kernel, problem, device, needed) == Reject::none;
  };
  if (problem.options.reproducibility == Reproducibility::batch_invariant) {
    const auto first = std::find_if(kernels.begin(), kernels.end(), is_supported);
    if (first == kernels.end()) return {};
    return cheapest_of(kernels, problem, device, [&](const KernelInfo& kernel) {
      return round_alike(kernel, *first) && is_supported(kernel);
    });
  }
  // Usually the problem is supported by all of them or none, so one check is enough.
  const KernelChoice best =
      cheapest_of(kernels, problem, device, [](const KernelInfo&) { return true; });
  if (is_supported(*best.kernel)) return best;
  return cheapest_of(kernels, problem, device, is_supported);
}

/// Chooses a kernel of one family, with the smallest dims that fit.
KernelChoice choose_in_family(Family family, Inputs inputs, const Problem& problem,
                              const DeviceInfo& device, Features needed) noexcept {
  const auto kernels = kernels_of(Operation::fwd, family, inputs, problem.dtype);
  if (kernels.empty()) return {};
  // All of them have the same features, and the last one has the input formats of all. Only fp8
  // kernels differ in scales.
  if (inputs != Inputs::fp8 && check_inputs(kernels.back(), problem, needed) != Reject::none) {
    return {};
  }
  for (std::size_t begin = 0, end = 0; begin < kernels.size(); begin = end) {
    while (end < kernels.size() && kernels[end].head_dim == kernels[begin].head_dim) ++end;
    if (problem.head_dim > kernels[begin].head_dim) continue;
    const KernelChoice choice =
        choose_among(kernels.subspan(begin, end - begin), problem, device, needed);
    if (choice.kernel != nullptr) return choice;
  }
  return {};
}

/// The kind of inputs that the family's kernels for this problem have.
Inputs inputs_for(const FamilyTraits& traits, const Problem& problem) noexcept {
  if (!is_stored_in_8_bits(problem)) return Inputs::native;
  for (const Inputs inputs : {Inputs::kv8, Inputs::fp8}) {
    if (family_name(traits.family, inputs) != nullptr) return inputs;
  }
  return Inputs::native;
}

}  // namespace

bool has_tensor_map(const Layout& layout, std::int64_t rows, std::int64_t heads,
                    std::int64_t batch) noexcept {
  constexpr std::int64_t kMaxStride = std::int64_t{1} << 39;  // elements: below 2^40 bytes
  const auto fits = [](std::int64_t stride, std::int64_t extent) {
    return extent <= 1 || (stride > 0 && stride < kMaxStride);
  };
  return layout.column == 1 && layout.alignment_bytes >= 16 && fits(layout.row, rows) &&
         fits(layout.head, heads) && fits(layout.batch, batch);
}

bool takes_8_bits(const KernelInfo& kernel) noexcept {
  if (kernel.op != Operation::fwd) return false;
  // The products of values and scales do not fit the operands of matrix tiles.
  if (kernel.isa == Isa::amx) return false;
  return needs_8_bits(kernel) || kernel.probability_dtype == DType::f32;
}

Features features_of(const Problem& p) noexcept {
  const Options& o = p.options;
  Features needed = Features::none;
  const auto add = [&](bool condition, Features feature) {
    if (condition) needed = needed | feature;
  };
  add(p.bias.given(), Features::bias);
  add(p.mask.given() || p.mask_blocks.given(), Features::mask);
  add(p.alibi_slopes.given(), Features::alibi);
  add(o.softcap > 0, Features::softcap);
  add(p.sinks.given(), Features::sinks);
  add(o.window_left >= 0 || o.window_right >= 0, Features::window);
  add(p.q_varlen || p.kv_varlen || p.seqused_k.given(), Features::varlen);
  add(p.page_size > 0, Features::paged);
  add(!has_tma_layout(p) || has_unaligned_rows(p), Features::any_stride);
  add(p.out.dtype != p.dtype, Features::f32_out);
  add(o.partial, Features::partial);
  add(o.num_splits > 1, Features::num_splits);
  add(p.q_scale.row != 0 || p.k_scale.row != 0 || p.v_scale.row != 0, Features::block_scales);
  add(p.v_scale.row != 0 && o.reproducibility == Reproducibility::batch_invariant,
      Features::batch_invariant_scales);
  return needed;
}

Features missing_features(const KernelInfo& kernel, const Problem& problem) noexcept {
  return features_of(problem) & ~kernel.features;
}

Reject supports(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device,
                Features needed) noexcept {
  const Reject size = check_size(kernel, problem, device);
  if (size != Reject::none) return size;
  if (kernel.op != Operation::fwd) return Reject::operation;
  return check_inputs(kernel, problem, needed);
}

KernelChoice choose_kernel(const Problem& problem, const DeviceInfo& device) noexcept {
  const Features needed = features_of(problem);
  const double options = sm80_options_factor(problem, needed);
  // Comparing families would make a batch-invariant plan depend on the batch.
  const bool compare = problem.options.reproducibility == Reproducibility::deterministic;
  KernelChoice best;
  for (const Family family : families_of(device.device.type)) {
    const FamilyTraits& traits = traits_of(family);
    const FamilyModel& model = model_of(family);
    if (traits.device == DeviceType::cuda && !has_compute_capability(device, traits)) continue;
    // A rank is not a time and cannot be compared with other families.
    if (best.kernel != nullptr && !(compare && model.unit != EstimateUnit::rank)) continue;
    const KernelChoice found =
        choose_in_family(family, inputs_for(traits, problem), problem, device, needed);
    if (found.kernel == nullptr) continue;
    if (best.kernel == nullptr) {
      best = found;
      continue;
    }
    const auto cycles = [&](const KernelChoice& choice) {
      const FamilyModel& own = model_of(choice.kernel->family);
      if (own.unit == EstimateUnit::cycles) return options * choice.estimate.cost;
      return own.estimate(*choice.kernel, problem, device, Rivals::other_families).cost;
    };
    if (cycles(found) < cycles(best)) best = found;
  }
  return best;
}

Reject preference(const KernelInfo& kernel, const Problem& problem,
                  const DeviceInfo& device) noexcept {
  const KernelInfo* chosen = choose_kernel(problem, device).kernel;
  if (&kernel == chosen) return Reject::none;
  if (kernel.device == DeviceType::cpu) {
    return kernel.tile_q == chosen->tile_q || kernel.isa < chosen->isa ? Reject::slower_isa
                                                                       : Reject::slower_tile;
  }
  if (kernel.family != chosen->family || kernel.inputs != chosen->inputs) {
    return Reject::slower_family;
  }
  if (kernel.head_dim != chosen->head_dim) return Reject::wrong_size;
  return kernel.tile_q > chosen->tile_q ? Reject::grid_too_small : Reject::grid_too_large;
}

}  // namespace flashcore
