// Problem + device -> plan. Pure: no clock, no environment, no CUDA.
#include "plan/planner.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/params.h"
#include "core/scratch.h"
#include "core/sm90_traits.h"
#include "core/softcap.h"
#include "plan/divide.h"
#include "plan/model/model.h"

namespace flashcore {
namespace {

constexpr std::size_t kWorkspaceAlignment = 256;

// Key ranges: a CPU call should have this many work items, whatever the number of threads, so that
// the bits do not depend on it.
constexpr std::int64_t kCpuItems = 64;
constexpr std::int64_t kCpuMinKeysPerSplit = 512;
constexpr std::int64_t kSimtItemsPerSm = 2;
constexpr std::int64_t kSimtMinKeysPerSplit = 256;

// Counts past this are refused long before a byte count could overflow; no memory could hold them.
constexpr double kMostCountable = 0x1p58;
constexpr double kMostItems = 0x1p30;  // of kernels that number them in 32 bits

std::size_t aligned(std::size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

bool runs_on(Isa kernel, Isa cpu) {
  return kernel == Isa::generic || kernel == cpu || (kernel == Isa::avx2 && cpu == Isa::avx512);
}

/// A build with CUDA offers only the kernels it has. One without can still plan for any GPU.
bool excluded_from_build(const KernelInfo& kernel) noexcept {
  static const bool build_has_cuda =
      std::any_of(kernels().begin(), kernels().end(),
                  [](const KernelInfo& k) { return k.device == DeviceType::cuda && k.compiled; });
  return build_has_cuda && kernel.device == DeviceType::cuda && !kernel.compiled;
}

bool is_sm80(const KernelInfo& kernel) noexcept {
  return kernel.device == DeviceType::cuda && kernel.packs_heads;
}
bool is_sm90(const KernelInfo& kernel) noexcept { return kernel.uses_tma; }

/// Of a Hopper kernel; how many steps are under way does not matter here.
core::Sm90Traits shape_of(const KernelInfo& kernel) noexcept {
  return {kernel.head_dim, kernel.tile_q, kernel.tile_k, 0, needs_e4m3(kernel) ? 1 : 2};
}

bool stored_in_8_bits(const Problem& p) noexcept {
  return is_8bit(p.q.dtype) || is_8bit(p.k.dtype) || is_8bit(p.v.dtype);
}

/// TMA reads such a tensor: rows of 16-byte pieces, and no dimension that repeats.
bool has_tensor_map(const Layout& layout, std::int64_t rows, std::int64_t heads,
                    std::int64_t batch) noexcept {
  constexpr std::int64_t kMostElements = std::int64_t{1} << 39;  // strides of less than 2^40 bytes
  const auto steps = [](std::int64_t stride, std::int64_t extent) {
    return extent <= 1 || (stride > 0 && stride < kMostElements);
  };
  return layout.column == 1 && layout.alignment_bytes >= 16 && steps(layout.row, rows) &&
         steps(layout.head, heads) && steps(layout.batch, batch);
}

/// What only Hopper kernels mind.
Reject supports_sm90(const Problem& p, const DeviceInfo& device) noexcept {
  if (device.compute_capability != 90) return Reject::compute_capability;
  if (p.bias.given() || p.mask.given() || p.page_size > 0 || p.options.num_splits > 1 ||
      p.out.dtype != p.dtype) {
    return Reject::missing_feature;
  }
  const std::int64_t q_rows = p.q_varlen ? p.total_q : p.q_len;
  const std::int64_t kv_rows = p.kv_varlen ? p.total_k : p.kv_len;
  const std::int64_t kv_batch = p.kv_varlen ? 1 : p.batch;
  if (p.out.column != 1 || p.out.alignment_bytes < 8 || p.v_dim % 4 != 0 ||
      !has_tensor_map(p.q, q_rows, p.q_heads, p.q_varlen ? 1 : p.batch) ||
      !has_tensor_map(p.k, kv_rows, p.kv_heads, kv_batch) ||
      !has_tensor_map(p.v, kv_rows, p.kv_heads, kv_batch)) {
    return Reject::strides;
  }
  return Reject::none;
}

/// What a kernel that reads e4m3 codes as they are minds besides.
Reject supports_e4m3(const KernelInfo& kernel, const Problem& p) noexcept {
  for (const Layout& layout : {p.q, p.k, p.v}) {
    if (layout.dtype != DType::e4m3) return Reject::input_format;
  }
  const std::int64_t block = p.options.kv_scale_block;
  const bool keys_share = p.k_scale.row == 0 || block % kKeysOfAScale == 0;
  const bool values_share = p.v_scale.row == 0 || block % kernel.tile_k == 0;
  return keys_share && values_share ? Reject::none : Reject::scales;
}

/// f16 cannot hold probabilities times any scale: they are multiplied in units of the largest scale
/// in sight, which a batch-invariant result may not depend on.
bool depends_on_other_scales(const KernelInfo& kernel, const Problem& p) noexcept {
  return p.v_scale.row != 0 && p.options.reproducibility == Reproducibility::batch_invariant &&
         is_sm80(kernel) && needs_8_bits(kernel);
}

/// An estimate of a tensor-core kernel's time, to be compared with others of its family.
double expected_cycles(const KernelInfo& kernel, const Problem& problem,
                       const DeviceInfo& device) noexcept {
  return is_sm90(kernel) ? cycles_sm90(kernel, problem, device, problem.options.causal)
                         : schedule_sm80(kernel, problem, device).cycles;
}

/// The family's kernel for the problem, or null: one of the kernels of the smallest size that takes
/// it. On tensor cores the one of which the models expect most; else, in the order of
/// kernels.def, which is from many rows per block to few, the first that keeps the device busy, or
/// the last. A batch-invariant plan may not look at q_len or batch: it takes the first.
/// `cycles` is what was expected of it, on tensor cores.
const KernelInfo* choose_in_family(const char* family, const Problem& problem,
                                   const DeviceInfo& device, double& cycles) noexcept {
  const KernelInfo* chosen = nullptr;
  bool settled = false;
  const std::int64_t dim = std::max(problem.head_dim, problem.v_dim);
  for (const KernelInfo& kernel : kernels_of(family, problem.dtype)) {
    if (kernel.head_dim < dim) continue;
    if (chosen != nullptr && (settled || kernel.head_dim > chosen->head_dim)) break;
    if (supports(kernel, problem, device) != Reject::none) continue;
    settled = problem.options.reproducibility == Reproducibility::batch_invariant;
    if (is_sm80(kernel) || is_sm90(kernel)) {
      const double expected = settled ? 0 : expected_cycles(kernel, problem, device);
      if (chosen != nullptr && expected >= cycles) continue;
      cycles = expected;
    } else {
      settled = settled || fills_device(kernel, packed_rows(kernel, problem),
                                        tile_count(kernel, problem), device);
    }
    chosen = &kernel;
  }
  return chosen;
}

/// On a CPU all kernels have one size, and the list begins with the widest instruction set.
const KernelInfo* choose_kernel(const Problem& problem, const DeviceInfo& device) noexcept {
  double cycles = 0, ignored = 0;
  if (device.device.type == DeviceType::cpu) {
    return choose_in_family("cpu", problem, device, ignored);
  }
  const bool codes = stored_in_8_bits(problem);
  const KernelInfo* chosen =
      choose_in_family(codes ? "sm80_8bit" : "sm80", problem, device, cycles);
  // A batch-invariant plan may not weigh one family against the other.
  if (problem.options.reproducibility == Reproducibility::deterministic) {
    const KernelInfo* hopper =
        choose_in_family(codes ? "sm90_e4m3" : "sm90", problem, device, ignored);
    if (hopper != nullptr &&
        (chosen == nullptr || cycles_sm90(*hopper, problem, device, false) < cycles)) {
      return hopper;
    }
  }
  return chosen != nullptr ? chosen : choose_in_family("simt", problem, device, ignored);
}

/// The kernel asked for by name.
Status find_forced_kernel(const Problem& problem, const DeviceInfo& device,
                          const KernelInfo*& found) noexcept {
  const char* id = problem.options.kernel;
  const KernelInfo* kernel = find_kernel(id);
  if (kernel == nullptr) {
    return invalid_argument(
        "kernel is \"%s\"; there is none of that name, see flashcore info "
        "--kernels",
        id);
  }
  const Reject reject = supports(*kernel, problem, device);
  if (reject == Reject::none) {
    found = kernel;
    return {};
  }
  try {
    return unsupported("kernel %s cannot take this problem: %s", id,
                       describe(reject, *kernel, problem, device).c_str());
  } catch (...) {
    return out_of_memory();
  }
}

Status lay_out_workspace(Plan& plan) noexcept {
  const Problem& p = plan.problem;
  const std::size_t element = p.dtype == DType::f64 ? 8 : 4;
  std::size_t end = kWorkspaceHeaderBytes;
  if (plan.kernel->device == DeviceType::cpu) {
    const auto scratch = core::scratch_layout(plan.tile_q, plan.tile_k, p.head_dim, p.v_dim).total;
    plan.scratch_offset = end;
    plan.scratch_bytes_per_thread = aligned(static_cast<std::size_t>(scratch) * element);
    end +=
        plan.scratch_bytes_per_thread * static_cast<std::size_t>(std::max(1, plan.device.threads));
  }
  if (plan.splits > 1) {
    const std::int64_t rows = p.q_varlen ? p.total_q * p.q_heads : p.batch * p.q_heads * p.q_len;
    if (static_cast<double>(rows) * plan.splits * static_cast<double>(p.v_dim) > kMostCountable) {
      return unsupported(
          "the workspace of %d splits would not fit the address space; use fewer "
          "num_splits",
          plan.splits);
    }
    const auto partials = static_cast<std::size_t>(rows * plan.splits);
    plan.partial_out_offset = end;
    end += aligned(partials * static_cast<std::size_t>(p.v_dim) * element);
    plan.partial_lse_offset = end;
    end += aligned(partials * element);
  }
  if (plan.tail_tiles > 0) {
    const auto parts = static_cast<std::size_t>(plan.tail_tiles * plan.tail_splits);
    plan.partial_out_offset = end;
    end += aligned(parts * static_cast<std::size_t>(shape_of(*plan.kernel).part_bytes()));
  }
  plan.workspace_bytes = end;
  return {};
}

}  // namespace

std::int64_t heads_in_tile(const KernelInfo& kernel, const Problem& problem) noexcept {
  if (problem.q_heads <= problem.kv_heads || problem.kv_heads == 0) return 1;
  const std::int64_t group = divide(problem.q_heads, problem.kv_heads);
  if (kernel.packs_heads) return group;
  if (!is_sm90(kernel) || !shape_of(kernel).packs_gqa()) return 1;
  return std::min<std::int64_t>(group & -group, core::kMaxHeadsInTile);  // a power of 2
}

std::int64_t packed_rows(const KernelInfo& kernel, const Problem& problem) noexcept {
  return problem.q_len * heads_in_tile(kernel, problem);
}

std::int64_t tile_count(const KernelInfo& kernel, const Problem& problem) noexcept {
  const std::int64_t heads = heads_in_tile(kernel, problem);
  return problem.batch * divide(problem.q_heads, heads) *
         ceil_div(problem.q_len * heads, kernel.tile_q);
}

bool is_persistent(const KernelInfo& kernel) noexcept { return is_sm90(kernel); }

bool needs_e4m3(const KernelInfo& kernel) noexcept {
  return kernel.probability_dtype == DType::e4m3;
}

bool needs_8_bits(const KernelInfo& kernel) noexcept {
  return needs_e4m3(kernel) || (is_sm80(kernel) && std::strcmp(kernel.family, "sm80_8bit") == 0);
}

bool takes_8_bits(const KernelInfo& kernel) noexcept {
  return needs_8_bits(kernel) ||
         (kernel.dtype != DType::f64 && !is_sm80(kernel) && !is_sm90(kernel));
}

Reject supports(const KernelInfo& kernel, const Problem& problem,
                const DeviceInfo& device) noexcept {
  if (kernel.device != device.device.type) return Reject::other_device;
  if (kernel.device == DeviceType::cpu && !runs_on(kernel.isa, device.isa)) return Reject::isa;
  if (excluded_from_build(kernel)) return Reject::not_compiled;
  if (kernel.device == DeviceType::cuda) {
    if (device.compute_capability < kernel.min_compute_capability) {
      return Reject::compute_capability;
    }
    if (device.smem_per_block_bytes < kernel.smem_bytes) return Reject::shared_memory;
  }
  const bool counts_in_32_bits = is_sm80(kernel) || is_sm90(kernel);
  const std::int64_t heads = heads_in_tile(kernel, problem);
  if (counts_in_32_bits && static_cast<double>(std::max<std::int64_t>(problem.q_len * heads, 1)) *
                                   static_cast<double>(std::max<std::int64_t>(
                                       problem.batch * divide(problem.q_heads, heads), 1)) *
                                   static_cast<double>(std::max(problem.options.num_splits, 1)) >
                               kMostItems) {
    return Reject::too_many_rows;
  }
  if (kernel.dtype != problem.dtype) return Reject::dtype;
  if (std::max(problem.head_dim, problem.v_dim) > kernel.head_dim) return Reject::head_dim;
  if (stored_in_8_bits(problem) && !takes_8_bits(kernel)) return Reject::input_format;
  if (needs_8_bits(kernel) && !(is_8bit(problem.k.dtype) && is_8bit(problem.v.dtype))) {
    return Reject::input_format;
  }
  if (depends_on_other_scales(kernel, problem)) return Reject::missing_feature;
  if (counts_in_32_bits && problem.options.softcap > core::kLargestShortCap) return Reject::softcap;
  if (needs_e4m3(kernel)) {
    const Reject reject = supports_e4m3(kernel, problem);
    if (reject != Reject::none) return reject;
  }
  return is_sm90(kernel) ? supports_sm90(problem, device) : Reject::none;
}

Reject preference(const KernelInfo& kernel, const Problem& problem,
                  const DeviceInfo& device) noexcept {
  const KernelInfo* chosen = choose_kernel(problem, device);
  if (&kernel == chosen) return Reject::none;
  if (kernel.device == DeviceType::cpu) return Reject::slower_isa;
  if (std::strcmp(kernel.family, chosen->family) != 0) return Reject::slower_family;
  if (kernel.head_dim != chosen->head_dim) return Reject::wrong_size;
  return kernel.tile_q > chosen->tile_q ? Reject::grid_too_small : Reject::grid_too_large;
}

Result<Plan> make_plan(const Problem& problem, const DeviceInfo& device) noexcept {
  if (problem.device.type != device.device.type) {
    return invalid_argument("the tensors are on %s, the device is a %s device",
                            to_string(problem.device.type), to_string(device.device.type));
  }
  if (static_cast<double>(problem.batch) * static_cast<double>(problem.q_heads) *
          static_cast<double>(problem.q_len) >
      kMostCountable) {
    return unsupported("batch %lld, q_heads %lld and q_len %lld together have too many rows",
                       static_cast<long long>(problem.batch),
                       static_cast<long long>(problem.q_heads),
                       static_cast<long long>(problem.q_len));
  }
  Plan plan;
  plan.problem = problem;
  plan.device = device;
  if (problem.options.kernel != nullptr) {
    FLASHCORE_RETURN_IF_ERROR(find_forced_kernel(problem, device, plan.kernel));
    plan.problem.options.kernel = plan.kernel->id;  // the caller's string need not live on
  } else {
    plan.kernel = choose_kernel(problem, device);
  }
  if (plan.kernel == nullptr) {
    return unsupported(
        "no kernel takes %s with head_dim %lld and v_dim %lld on %s; f32, f16 and "
        "bf16 with dims up to 576 run on CPUs and on GPUs from sm_75, f64 on CPUs",
        to_string(problem.dtype), static_cast<long long>(problem.head_dim),
        static_cast<long long>(problem.v_dim), device.name);
  }

  const bool on_cpu = plan.kernel->device == DeviceType::cpu;
  plan.tile_q = plan.kernel->tile_q;
  plan.heads_in_tile = static_cast<std::int32_t>(heads_in_tile(*plan.kernel, problem));
  plan.tile_k =
      on_cpu ? cpu_tile_k(plan.kernel->isa, problem.head_dim, problem.v_dim) : plan.kernel->tile_k;
  const std::int64_t items = tile_count(*plan.kernel, problem);
  Splits splits;
  if (is_sm80(*plan.kernel)) {
    const Sm80Schedule schedule = schedule_sm80(*plan.kernel, problem, device);
    splits = schedule.splits;
    plan.combines_in_cluster = schedule.in_cluster;
  } else if (is_sm90(*plan.kernel)) {
    splits = split_keys(problem.kv_len, 1, plan.tile_k);
  } else {
    splits = on_cpu ? choose_splits(problem, items, kCpuItems, kCpuMinKeysPerSplit, plan.tile_k)
                    : choose_splits(problem, items, kSimtItemsPerSm * device.sm_count,
                                    kSimtMinKeysPerSplit, plan.tile_k);
  }
  plan.splits = splits.count;
  plan.keys_per_split = splits.keys_each;
  FLASHCORE_RETURN_IF_ERROR(lay_out_workspace(plan));
  plan.num_tiles = items * splits.count;
  plan.combines_itself = plan.splits > 1 && !on_cpu && plan.kernel->packs_heads &&
                         items <= core::kMaxCounters && splits.count <= core::kMaxJoinedSplits;
  const Tail tail = plan_tail_split(*plan.kernel, problem, device);
  if (tail.items > 0) FLASHCORE_RETURN_IF_ERROR(apply_tail_split(plan, tail.items, tail.parts));
  return plan;
}

bool can_split_tail(const KernelInfo& kernel, const Problem& problem) noexcept {
  const Options& options = problem.options;
  const bool masked = options.causal || options.window_left >= 0 || options.window_right >= 0;
  const bool is_varlen = problem.q_varlen || problem.kv_varlen || problem.seqused_k.given() ||
                         problem.q_start.given() || problem.k_start.given();
  return is_sm90(kernel) && shape_of(kernel).packs_gqa() && !masked && !is_varlen &&
         problem.kv_len > 0 && options.reproducibility == Reproducibility::deterministic;
}

Status apply_tail_split(Plan& plan, std::int64_t items, std::int64_t parts) noexcept {
  const Splits splits = split_keys(plan.problem.kv_len, parts, plan.tile_k);
  const std::int64_t counters = items * plan.tile_q / core::kWarpRows;
  const bool cut = items > 0 && splits.count > 1 && counters < core::kMaxCounters;
  plan.tail_tiles = cut ? items : 0;
  plan.tail_splits = cut ? splits.count : 1;
  plan.keys_per_tail_split = cut ? splits.keys_each : 0;
  return lay_out_workspace(plan);
}

// The one place that says so. What it follows: make_params() gives counters to kernels that join
// their splits, whether or not a cluster does it in the end; a Hopper kernel counts the parts of
// cut items, and deals out work by a tile_counter where there is more than it has blocks.
bool uses_header(const Plan& plan) noexcept {
  if (plan.problem.options.checked || plan.combines_itself || plan.tail_tiles > 0) return true;
  return plan.kernel != nullptr && is_sm90(*plan.kernel) && plan.num_tiles > plan.device.sm_count;
}

Cost cost(const Problem& problem) noexcept {
  const double batch = static_cast<double>(problem.batch);
  const double q_len = static_cast<double>(problem.q_len);
  const double kv_len = static_cast<double>(problem.kv_len);
  // Visible keys of query i: [i + offset - left, i + offset + right] within [0, kv_len), summed
  // in closed form: pairs with key <= i + offset + right, less those with key < i + offset - left.
  const double offset = kv_len - q_len;        // the default alignment; q_start is not known here
  const auto pairs_up_to = [&](double edge) {  // Σ_i clamp(i + edge + 1, 0, kv_len)
    const double first = std::clamp(-edge, 0.0, q_len);             // below: no key
    const double full = std::clamp(kv_len - 1 - edge, 0.0, q_len);  // from here: all keys
    const double ramp = std::max(full - first, 0.0);
    return ramp * (first + edge + 1) + ramp * (ramp - 1) / 2 + (q_len - full) * kv_len;
  };
  const Options& o = problem.options;
  const double right = o.causal ? 0.0 : static_cast<double>(o.window_right);
  double pairs = right >= 0 ? pairs_up_to(offset + right) : q_len * kv_len;
  if (o.window_left >= 0) pairs -= pairs_up_to(offset - static_cast<double>(o.window_left) - 1);
  pairs = std::max(pairs, 0.0);

  Cost result;
  const double heads = static_cast<double>(problem.q_heads);
  const double dims = static_cast<double>(problem.head_dim + problem.v_dim);
  result.visible_pairs = batch * heads * pairs;
  result.flops = 2.0 * dims * result.visible_pairs;
  const double q_rows = problem.q_varlen ? static_cast<double>(problem.total_q) : batch * q_len;
  const double k_rows = problem.kv_varlen ? static_cast<double>(problem.total_k) : batch * kv_len;
  const auto width = [](const Layout& layout, std::int64_t columns) {
    return static_cast<double>(size_of(layout.dtype) * columns);
  };
  result.bytes =
      q_rows * heads * width(problem.q, problem.head_dim) +
      k_rows * static_cast<double>(problem.kv_heads) *
          (width(problem.k, problem.head_dim) + width(problem.v, problem.v_dim)) +
      q_rows * heads * static_cast<double>(problem.v_dim * size_of(problem.out.dtype)) +
      (problem.lse.given() ? q_rows * heads * static_cast<double>(size_of(problem.lse.dtype))
                           : 0.0);
  const auto extent = [](std::int64_t stride, double full) { return stride == 0 ? 1.0 : full; };
  for (const Layout& score : {problem.bias, problem.mask}) {
    if (!score.given()) continue;
    result.bytes += extent(score.batch, batch) * extent(score.head, heads) *
                    extent(score.row, q_len) * kv_len * static_cast<double>(size_of(score.dtype));
  }
  return result;
}

}  // namespace flashcore
