// make_plan(): makes a plan for a problem and a device, from nothing else: no clock, environment or
// CUDA.
#include "plan/planner.h"

#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/params.h"
#include "plan/model/model.h"
#include "plan/tile_counts.h"

namespace flashcore {
namespace {

constexpr double kMaxRows = 0x1p58;

Status check_sizes(const Problem& problem, const DeviceInfo& device) noexcept {
  if (problem.device.type != device.device.type) {
    return invalid_argument("the tensors are on %s, the device is a %s device",
                            to_string(problem.device.type), to_string(device.device.type));
  }
  if (static_cast<double>(problem.batch) * static_cast<double>(problem.q_heads) *
          static_cast<double>(problem.q_len) >
      kMaxRows) {
    return unsupported("batch %lld, q_heads %lld and q_len %lld together have too many rows",
                       static_cast<long long>(problem.batch),
                       static_cast<long long>(problem.q_heads),
                       static_cast<long long>(problem.q_len));
  }
  return {};
}

/// Finds the kernel that options.kernel names and checks that it supports the problem.
Status find_forced_kernel(const Problem& problem, const DeviceInfo& device,
                          KernelChoice& found) noexcept {
  const char* id = problem.options.kernel;
  const KernelInfo* kernel = find_kernel(id);
  if (kernel == nullptr) {
    return invalid_argument("kernel is \"%s\"; no kernel has this id, see flashcore info --kernels",
                            id);
  }
  const Reject reject = supports(*kernel, problem, device);
  if (reject == Reject::none) {
    found.kernel = kernel;
    return {};
  }
  try {
    return unsupported("kernel %s cannot run this problem: it %s", id,
                       to_message(reject, *kernel, problem, device).c_str());
  } catch (...) {
    return out_of_memory();
  }
}

Status find_kernel_for(const Problem& problem, const DeviceInfo& device,
                       KernelChoice& found) noexcept {
  if (problem.options.kernel != nullptr) return find_forced_kernel(problem, device, found);
  found = choose_kernel(problem, device);
  if (found.kernel != nullptr) return {};
  return unsupported(
      "no kernel takes %s with head_dim %lld and v_dim %lld on %s; f32, f16 and bf16 with dims up "
      "to 576 run on CPUs and on GPUs from sm_75, f64 on CPUs",
      to_string(problem.dtype), static_cast<long long>(problem.head_dim),
      static_cast<long long>(problem.v_dim), device.name);
}

/// `tiles` counts the tiles of one split. Each needs a counter in the workspace header.
CombineMode combine_mode(const KernelInfo& kernel, const SplitPlan& plan,
                         std::int64_t tiles) noexcept {
  if (plan.splits.count <= 1) return CombineMode::none;
  if (plan.cluster) return CombineMode::cluster;
  const bool last_cta = (traits_of(kernel).combine_modes & modes(CombineMode::last_cta)) != 0 &&
                        tiles <= core::kMaxCounters &&
                        plan.splits.count <= core::kMaxCombinedSplits;
  return last_cta ? CombineMode::last_cta : CombineMode::kernel;
}

/// Fills in an empty plan.
Status plan_problem(const Problem& problem, const DeviceInfo& device, Plan& plan) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_sizes(problem, device));
  KernelChoice choice;
  FLASHCORE_RETURN_IF_ERROR(find_kernel_for(problem, device, choice));
  const KernelInfo& kernel = *choice.kernel;
  plan.problem = problem;
  plan.device = device;
  plan.kernel = choice.kernel;
  // The plan must not refer to the caller's string.
  if (problem.options.kernel != nullptr) plan.problem.options.kernel = kernel.id;

  const FamilyModel& model = model_of(kernel.family);
  const SplitPlan splits = choice.estimate.splits.splits.count > 0
                               ? choice.estimate.splits
                               : model.plan_splits(kernel, problem, device);
  plan.tile_q =
      kernel.device == DeviceType::cpu ? cpu_tile_q(kernel, problem, device) : kernel.tile_q;
  const std::int64_t tiles = tile_count(kernel, problem, plan.tile_q);
  plan.tile_k = key_tile(kernel, problem);
  plan.heads_in_tile = static_cast<std::int32_t>(heads_in_tile(kernel, problem));
  plan.splits = splits.splits.count;
  plan.keys_per_split = splits.splits.keys_each;
  FLASHCORE_RETURN_IF_ERROR(plan_workspace(plan));  // rejects counts that would overflow below
  plan.num_tiles = tiles * plan.splits;
  plan.combine = combine_mode(kernel, splits, tiles);
  if (has_key_ranges(kernel, problem)) return apply_key_ranges(plan);
  const TailPlan tail = model.plan_tail(kernel, problem, device);
  return tail.tiles > 0 ? apply_tail_split(plan, tail.tiles, tail.splits) : Status();
}

bool same_device(const DeviceInfo& a, const DeviceInfo& b) noexcept {
  return a.device == b.device && a.compute_capability == b.compute_capability &&
         a.sm_count == b.sm_count && a.smem_per_block_bytes == b.smem_per_block_bytes &&
         a.smem_per_sm_bytes == b.smem_per_sm_bytes && a.registers_per_sm == b.registers_per_sm &&
         a.threads_per_sm == b.threads_per_sm && a.l2_bytes == b.l2_bytes &&
         a.memory_gbs == b.memory_gbs && a.f32_tflops == b.f32_tflops &&
         a.tensor16_tflops == b.tensor16_tflops && a.threads == b.threads && a.isa == b.isa &&
         std::strncmp(a.name, b.name, sizeof a.name) == 0;
}

// The layers of a model make the same call: a thread remembers its last plan. A plan without a
// kernel is none.
constinit thread_local Plan last_plan;

bool is_last(const Problem& problem, const DeviceInfo& device) noexcept {
  return last_plan.kernel != nullptr && problem.options.kernel == nullptr &&
         last_plan.problem == problem && same_device(last_plan.device, device);
}

}  // namespace

Result<Plan> make_plan(const Problem& problem, const DeviceInfo& device) noexcept {
  if (is_last(problem, device)) return last_plan;
  Result<Plan> plan(std::in_place);
  Status status = plan_problem(problem, device, *plan);
  if (!status.ok()) {
    plan = std::move(status);
  } else {
    last_plan = *plan;
  }
  return plan;
}

}  // namespace flashcore
