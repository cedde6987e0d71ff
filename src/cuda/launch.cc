#include "cuda/launch.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "core/cluster_buffer.h"
#include "core/combine.h"
#include "core/packed_mask.h"
#include "core/params.h"
#include "cuda/check.h"
#include "cuda/device.h"
#include "cuda/registry.h"
#include "cuda/sm90/make_params.h"
#include "plan/kernel_traits.h"

namespace flashcore::cuda {
namespace {

constexpr std::int64_t kMaxGrid = INT32_MAX;

/// The launch configuration for CUDA. Not copyable: it points to its own attributes.
struct LaunchConfig {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[3];

  LaunchConfig(const LaunchOptions& options, Stream stream) noexcept {
    config.gridDim = dim3(static_cast<unsigned>(std::min(options.ctas, kMaxGrid)));
    config.blockDim = dim3(static_cast<unsigned>(options.threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(options.smem_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    if (options.programmatic_launch) {
      add(cudaLaunchAttributeProgrammaticStreamSerialization)
          .programmaticStreamSerializationAllowed = 1;
    }
    if (options.cluster > 1) {
      add(cudaLaunchAttributeClusterDimension).clusterDim = {static_cast<unsigned>(options.cluster),
                                                             1, 1};
    }
    if (options.balance_clusters) {
      add(cudaLaunchAttributeClusterSchedulingPolicyPreference).clusterSchedulingPolicyPreference =
          cudaClusterSchedulingPolicyLoadBalancing;
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;

 private:
  cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) noexcept {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = id;
    return attribute.val;
  }
};

constexpr std::size_t kMaxEntries = kKernelEntries * 256;

/// An index of the entry points of all kernels, below kMaxEntries.
std::size_t entry_index(const KernelInfo& kernel, const void* entry) noexcept {
  const auto index = static_cast<std::size_t>(&kernel - kernels().data());
  std::size_t of_kernel = 0;
  while (of_kernel + 1 < kKernelEntries &&
         entry != entry_of(kernel, static_cast<KernelEntry>(of_kernel))) {
    ++of_kernel;
  }
  return kKernelEntries * index + of_kernel;
}

/// The number of clusters that fit on the device at the same time. 0 if the device, such as a slice
/// of a GPU, has too few adjacent SMs. Cached per entry point and cluster size for device 0.
int max_active_clusters(const KernelInfo& kernel, const void* entry, int device,
                        LaunchOptions options) noexcept {
  constexpr int kSizes = 16, kUnknown = 0;  // cache entries: the number plus 1
  static std::array<std::atomic<std::uint16_t>, kMaxEntries * kSizes> cache{};
  auto& cached = cache[entry_index(kernel, entry) * kSizes +
                       static_cast<std::size_t>(options.cluster % kSizes)];
  if (device == 0) {
    if (const int known = cached.load(std::memory_order_relaxed); known != kUnknown) {
      return known - 1;
    }
  }
  int clusters = 0;
  options.programmatic_launch = options.balance_clusters = false;
  const LaunchConfig launch(options, nullptr);
  if (cudaOccupancyMaxActiveClusters(&clusters, entry, &launch.config) != cudaSuccess) clusters = 0;
  if (device == 0) {
    cached.store(static_cast<std::uint16_t>(clusters + 1), std::memory_order_relaxed);
  }
  return clusters;
}

/// True if the family's kernel for plain calls takes the call.
bool is_plain(const FamilyTraits& traits, const core::AttentionParams& call) noexcept {
  if (traits.loads != Loads::tma) return call.fast_path;
  return call.fast_path && !call.has_mask() && call.pages.table == nullptr &&
         call.out_element != core::Element::f32;
}

KernelEntry entry_for(const Plan& plan, const core::AttentionParams& call) noexcept {
  const FamilyTraits& traits = traits_of(*plan.kernel);
  const bool plain = is_plain(traits, call);
  if (plan.key_ranges > 1) return plain ? KernelEntry::ranges : KernelEntry::general_ranges;
  if (plain) return KernelEntry::plain;
  if (call.fast_layout && (call.score_mods & traits.general_mods) == core::kMaskMod) {
    return KernelEntry::masked;
  }
  if (call.bias != nullptr) return KernelEntry::bias;
  return call.softcap > 0 ? KernelEntry::softcap : KernelEntry::general;
}

/// Packs the mask of a call.
Status pack_mask(const core::AttentionParams& call, const core::PackedMask& packed,
                 Stream stream) noexcept {
  core::PackMaskParams params{call.mask, call.mask_strides, call.block_mask, call.kv_len, packed};
  if (call.fault.is(core::InjectedFault::mask_batch_ignored)) {
    params.strides.batch = params.block_mask.strides.batch = 0;
  }
  const void* entry = call.block_mask.given() ? pack_block_mask_entry() : pack_mask_entry();
  return launch_kernel(entry, params, {packed.range_count(), kPackMaskThreads}, stream);
}

}  // namespace

Status launch_entry(const void* entry, void* params, const LaunchOptions& options,
                    Stream stream) noexcept {
  void* arguments[] = {params};
  const LaunchConfig launch(options, stream);
  FLASHCORE_CUDA(cudaLaunchKernelExC(&launch.config, entry, arguments));
  return {};
}

Status allow_shared_memory(const KernelInfo& kernel, const void* entry, int device) noexcept {
  static std::array<std::atomic<std::uint64_t>, kMaxEntries> allowed{};  // bit d: done for device d
  auto& devices = allowed[entry_index(kernel, entry)];
  const std::uint64_t bit = std::uint64_t{1} << (device % kMaxDevices);
  if ((devices.load(std::memory_order_acquire) & bit) != 0) return {};
  cudaFuncAttributes attributes;
  FLASHCORE_CUDA(cudaFuncGetAttributes(&attributes, entry));
  int max_bytes = 0;
  FLASHCORE_CUDA(
      cudaDeviceGetAttribute(&max_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  FLASHCORE_CUDA(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      max_bytes - static_cast<int>(attributes.sharedSizeBytes)));
  devices.fetch_or(bit, std::memory_order_release);
  return {};
}

Status launch_attention(const Plan& plan, const core::AttentionParams& params, Stream stream) {
  const KernelInfo& kernel = *plan.kernel;
  const void* entry = entry_of(kernel, entry_for(plan, params));
  if (entry == nullptr) {
    return unsupported("kernel %s is not part of this build (FLASHCORE_KERNELS excludes it)",
                       kernel.id);
  }
  const int device = plan.problem.device.index;
  const DeviceScope scope(device);
  FLASHCORE_RETURN_IF_ERROR(scope.status());
  FLASHCORE_RETURN_IF_ERROR(allow_shared_memory(kernel, entry, device));
  LaunchOptions options{params.num_tiles, kernel.threads, kernel.smem_bytes};
  const FamilyTraits& traits = traits_of(kernel);
  // Only sm_90 SASS uses PDL. Later GPUs run the sm_80 PTX, which has no griddepcontrol.
  options.programmatic_launch = uses_pdl(kernel) && plan.device.compute_capability == 90;
  if (params.packed_mask != nullptr) {
    FLASHCORE_RETURN_IF_ERROR(pack_mask(params, core::packed_mask(params), stream));
  }
  if (traits.loads == Loads::tma) {
    sm90::Params hopper;
    FLASHCORE_RETURN_IF_ERROR(make_sm90_params(plan, params, hopper));
    options.ctas = std::min(hopper.num_scheduled, plan.device.sm_count);
    if (params.bias != nullptr) {
      options.smem_bytes += sm90_shape(kernel).staged_bias_bytes(kernel.smem_bytes);
    }
    return launch_kernel(entry, hopper, options, stream);
  }
  if (plan.combine == CombineMode::cluster) {
    LaunchOptions in_clusters = options;
    in_clusters.smem_bytes +=
        core::ClusterBuffer::bytes(kernel.tile_q, kernel.head_dim, kernel.threads);
    in_clusters.cluster = plan.splits;
    in_clusters.balance_clusters = params.num_tiles > plan.device.sm_count;
    if (max_active_clusters(kernel, entry, device, in_clusters) * plan.splits >= params.num_tiles) {
      core::AttentionParams clustered = params;
      clustered.cluster_combine = true;
      clustered.cta_divmod = core::make_fast_divmod(plan.splits);
      return launch_kernel(entry, clustered, in_clusters, stream);
    }
  }
  return launch_kernel(entry, params, options, stream);
}

Status launch_empty(Device device, Stream stream) {
  const DeviceScope scope(device.index);
  FLASHCORE_RETURN_IF_ERROR(scope.status());
  const core::CombineParams no_rows{};
  return launch_kernel(combine_form(no_rows).entry, no_rows, {1, kCombineThreads}, stream);
}

}  // namespace flashcore::cuda
