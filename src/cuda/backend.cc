// The CUDA backend: calls of the pipeline, error slots, graph capture, device info and memory.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <optional>

#include "backend/backend.h"
#include "core/append.h"
#include "core/combine.h"
#include "core/quantize.h"
#include "cuda/check.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/launch_backward.h"
#include "cuda/registry.h"
#include "cuda/timing.h"

namespace flashcore {
namespace {

using cuda::DeviceScope;
using cuda::kMaxDevices;
using cuda::launch_kernel;

/// OK if a GPU is usable, else the reason, worded as in a build without CUDA.
Status any_device() noexcept {
  const CudaAvailability available = cuda_availability();
  if (available.device_count > 0) return {};
  return unsupported("device is cuda, but %s", available.reason.c_str());
}

/// Combines more partial results than fit into the arguments of a kernel. Their table is allocated
/// and freed in stream order, which a graph can capture.
Status combine_long(const core::CombineParams& params, const void* entry,
                    const cuda::LaunchOptions& options, Stream stream) noexcept {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  void* memory = nullptr;
  FLASHCORE_CUDA(cudaMallocAsync(
      &memory, static_cast<std::size_t>(params.parts) * sizeof(core::PartialResult), cuda_stream));
  auto* const table = static_cast<core::PartialResult*>(memory);
  Status status;
  for (std::int32_t first = 0; first < params.parts && status.ok();
       first += core::kMaxCombineTable) {
    cuda::CombineTableChunk chunk{};
    chunk.to = table + first;
    chunk.count = std::min(core::kMaxCombineTable, params.parts - first);
    std::copy_n(params.long_table + first, chunk.count, chunk.entries);
    status = launch_kernel(cuda::fill_table_entry(), chunk, {1, core::kMaxCombineTable}, stream);
  }
  if (status.ok()) {
    core::LongCombineParams on_gpu{params};
    on_gpu.long_table = table;
    status = launch_kernel(entry, on_gpu, options, stream);
  }
  FLASHCORE_CUDA(cudaFreeAsync(memory, cuda_stream));
  return status;
}

/// CUDA calls this function when the watched graph is destroyed.
void CUDART_CB on_graph_destroyed(void* graph_ended) {
  std::atomic_ref<std::int32_t>(*static_cast<std::int32_t*>(graph_ended))
      .store(1, std::memory_order_release);
}

/// Allows this thread to wait while another thread captures a graph. By default CUDA treats such a
/// wait as an error.
class AllowWaitsDuringCapture {
 public:
  AllowWaitsDuringCapture() noexcept { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowWaitsDuringCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowWaitsDuringCapture(const AllowWaitsDuringCapture&) = delete;
  AllowWaitsDuringCapture& operator=(const AllowWaitsDuringCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class CudaBackend final : public Backend {
 public:
  Status launch(const Plan& plan, const core::AttentionParams& params, Stream stream,
                const std::int32_t*) const override {
    return cuda::launch_attention(plan, params, stream);
  }

  Status launch_backward(const BackwardPlan& plan, const core::BackwardParams& params,
                         Stream stream, const std::int32_t*) const override {
    return cuda::launch_backward(plan, params, stream);
  }

  Status combine(const core::CombineParams& params, DType partials, Device device, int,
                 Stream stream, const std::int32_t*) const override {
    if (partials == DType::f64) return unsupported("merge: f64 partials merge on the CPU only");
    const DeviceScope scope(device.index);
    FLASHCORE_RETURN_IF_ERROR(scope.status());
    const cuda::CombineForm form = cuda::combine_form(params);
    const cuda::LaunchOptions options{form.ctas, cuda::kCombineThreads};
    if (params.long_table != nullptr) return combine_long(params, form.entry, options, stream);
    return launch_kernel(form.entry, params, options, stream);
  }

  Status append(const core::AppendParams& params, Device device, Stream stream,
                const std::int32_t*) const override {
    const DeviceScope scope(device.index);
    FLASHCORE_RETURN_IF_ERROR(scope.status());
    const std::int64_t rows = core::append_rows(params);
    const std::int64_t ctas = (rows + cuda::kAppendRowsPerCta - 1) / cuda::kAppendRowsPerCta;
    return launch_kernel(cuda::append_entry(), params, {ctas, cuda::kAppendThreads}, stream);
  }

  Status quantize(const core::QuantParams& params, Device device, Stream stream,
                  const std::int32_t*) const override {
    const DeviceScope scope(device.index);
    FLASHCORE_RETURN_IF_ERROR(scope.status());
    const std::int64_t slots =
        static_cast<std::int64_t>(params.slots_batch) * params.slots_heads * params.slots_blocks;
    const std::int64_t slot_ctas = (slots + cuda::kQuantThreads - 1) / cuda::kQuantThreads;
    const auto launch_on_slots = [&](const void* entry) {
      return slots == 0 ? Status{}
                        : launch_kernel(entry, params, {slot_ctas, cuda::kQuantThreads}, stream);
    };
    if (!params.given_scale || params.saturated != nullptr) {
      FLASHCORE_RETURN_IF_ERROR(launch_on_slots(cuda::clear_scales_entry()));
    }
    if (!params.given_scale) {
      FLASHCORE_RETURN_IF_ERROR(
          launch_on_units(cuda::find_largest_entry(params), params, device, stream));
      FLASHCORE_RETURN_IF_ERROR(launch_on_slots(cuda::finish_scales_entry()));
    }
    return launch_on_units(cuda::encode_entry(params), params, device, stream);
  }

  Status dequantize(const core::QuantParams& params, Device device, Stream stream,
                    const std::int32_t*) const override {
    const DeviceScope scope(device.index);
    FLASHCORE_RETURN_IF_ERROR(scope.status());
    return launch_on_units(cuda::decode_entry(params), params, device, stream);
  }

  Status zero(void* data, std::size_t bytes, Device device, Stream stream) const override {
    const DeviceScope scope(device.index);
    FLASHCORE_RETURN_IF_ERROR(scope.status());
    FLASHCORE_CUDA(cudaMemsetAsync(data, 0, bytes, static_cast<cudaStream_t>(stream)));
    return {};
  }

  Status copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                   std::size_t width, std::size_t rows, Device device,
                   Stream stream) const override {
    const DeviceScope scope(device.index);
    FLASHCORE_RETURN_IF_ERROR(scope.status());
    FLASHCORE_CUDA(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows,
                                     cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
    return {};
  }

  Status read_error(const core::ErrorSlot* slot, core::ErrorSlot* host, Device device,
                    Stream stream) const override {
    const DeviceScope scope(device.index);
    FLASHCORE_RETURN_IF_ERROR(scope.status());
    const auto s = static_cast<cudaStream_t>(stream);
    const AllowWaitsDuringCapture guard;
    FLASHCORE_CUDA(cudaMemcpyAsync(host, slot, sizeof *slot, cudaMemcpyDeviceToHost, s));
    FLASHCORE_CUDA(cudaStreamSynchronize(s));
    return {};
  }

  Result<std::uint64_t> capture_id(Device device, Stream stream,
                                   std::int32_t* graph_ended) const override {
    const DeviceScope scope(device.index);
    FLASHCORE_RETURN_IF_ERROR(scope.status());
    cudaStreamCaptureStatus status{};
    unsigned long long id = 0;  // NOLINT: CUDA's type
    cudaGraph_t graph = nullptr;
    const auto s = static_cast<cudaStream_t>(stream);
#if CUDART_VERSION >= 13000
    FLASHCORE_CUDA(cudaStreamGetCaptureInfo(s, &status, &id, &graph));
#else
    FLASHCORE_CUDA(cudaStreamGetCaptureInfo_v2(s, &status, &id, &graph));
#endif
    if (status != cudaStreamCaptureStatusActive) return std::uint64_t{0};
    if (graph_ended != nullptr) {
      // The graph owns the only reference. Every graph instantiated from it owns a copy, which
      // CUDA releases when that graph is destroyed. If cudaGraphRetainUserObject() fails, the
      // watcher leaks: releasing it would report that the graph is destroyed.
      cudaUserObject_t watcher = nullptr;
      FLASHCORE_CUDA(cudaUserObjectCreate(&watcher, graph_ended, on_graph_destroyed, 1,
                                          cudaUserObjectNoDestructorSync));
      FLASHCORE_CUDA(cudaGraphRetainUserObject(graph, watcher, 1, cudaGraphUserObjectMove));
    }
    return static_cast<std::uint64_t>(id);
  }

  Result<DeviceInfo> device_info(int index) const override {
    // A driver query takes a millisecond, so each device is queried once.
    static std::mutex mutex;
    static std::array<std::optional<DeviceInfo>, kMaxDevices> known;
    if (index < 0 || index >= kMaxDevices) {
      return invalid_argument("device index is %d; wanted 0 to %d", index, kMaxDevices - 1);
    }
    const std::lock_guard lock(mutex);
    std::optional<DeviceInfo>& info = known[static_cast<std::size_t>(index)];
    if (!info.has_value()) {
      FLASHCORE_RETURN_IF_ERROR(any_device());
      Result<DeviceInfo> queried = cuda::query_device(index);
      if (!queried.ok()) return queried;
      info = *queried;
    }
    return *info;
  }

  Status measure_rates(DeviceInfo&) const override {
    return any_device();  // query_device() has set the rates
  }

  Result<KernelResources> resources(const KernelInfo& kernel, int device) const override {
    const void* entry = cuda::entry_of(kernel, cuda::KernelEntry::plain);
    if (entry == nullptr) return unsupported("kernel %s is not part of this build", kernel.id);
    const DeviceScope scope(device);
    FLASHCORE_RETURN_IF_ERROR(scope.status());
    FLASHCORE_RETURN_IF_ERROR(cuda::allow_shared_memory(kernel, entry, device));
    cudaFuncAttributes attributes;
    FLASHCORE_CUDA(cudaFuncGetAttributes(&attributes, entry));
    KernelResources found;
    found.registers = attributes.numRegs;
    found.shared_bytes = static_cast<int>(attributes.sharedSizeBytes) + kernel.smem_bytes;
    found.local_bytes = static_cast<int>(attributes.localSizeBytes);
    FLASHCORE_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &found.blocks_per_sm, entry, kernel.threads, static_cast<std::size_t>(kernel.smem_bytes)));
    int threads_per_sm = 0;
    FLASHCORE_CUDA(
        cudaDeviceGetAttribute(&threads_per_sm, cudaDevAttrMaxThreadsPerMultiProcessor, device));
    found.occupancy = static_cast<double>(found.blocks_per_sm) * kernel.threads / threads_per_sm;
    return found;
  }

  Status launch_empty(Device device, Stream stream) const override {
    return cuda::launch_empty(device, stream);
  }

  Result<void*> allocate(std::size_t bytes, int device) const override {
    const DeviceScope scope(device);
    FLASHCORE_RETURN_IF_ERROR(scope.status());
    void* data = nullptr;
    FLASHCORE_CUDA(cudaMalloc(&data, std::max<std::size_t>(bytes, 1)));
    return data;
  }
  void release(void* data, int device) const override {
    const DeviceScope scope(device);
    cudaFree(data);
  }
  Status upload(void* to, const void* from_host, std::size_t bytes, int device) const override {
    const DeviceScope scope(device);
    FLASHCORE_CUDA(cudaMemcpy(to, from_host, bytes, cudaMemcpyHostToDevice));
    return {};
  }
  Status download(void* to_host, const void* from, std::size_t bytes, int device) const override {
    const DeviceScope scope(device);
    FLASHCORE_CUDA(cudaDeviceSynchronize());
    FLASHCORE_CUDA(cudaMemcpy(to_host, from, bytes, cudaMemcpyDeviceToHost));
    return {};
  }

  Result<std::vector<double>> time(const std::function<Status(int, Stream)>& call, int calls,
                                   int samples, int device) const override {
    return cuda::time_calls(call, calls, samples, device);
  }

 private:
  /// Launches a kernel whose CTAs loop over units. The grid has more CTAs than can be resident, so
  /// that all SMs finish at the same time.
  Status launch_on_units(const void* entry, const core::QuantParams& params, Device device,
                         Stream stream) const {
    constexpr std::int64_t kCtasPerSm = 32;
    const std::int64_t units = core::quant_units(params);
    if (units == 0 || params.columns == 0) return {};
    const Result<DeviceInfo> info = device_info(device.index);
    if (!info.ok()) return info.status();
    const std::int64_t ctas = std::min(units, kCtasPerSm * info->sm_count);
    return launch_kernel(entry, params, {ctas, cuda::kQuantThreads}, stream);
  }
};

}  // namespace

const Backend* cuda_backend() noexcept {
  static const CudaBackend backend;
  return &backend;
}

}  // namespace flashcore
