#include "cuda/device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "cuda/check.h"

namespace flashcore {
namespace cuda {
namespace {

// f32 lanes and dense 16-bit tensor FLOPs per SM and clock, by architecture.
struct ArchitectureRates {
  int compute_capability, f32_lanes, tensor16_flops;
};
constexpr ArchitectureRates kRates[] = {{75, 64, 1024},  {80, 64, 2048},  {86, 128, 1024},
                                        {89, 128, 1024}, {90, 128, 4096}, {100, 128, 8192},
                                        {120, 128, 1024}};

}  // namespace

Result<DeviceInfo> query_device(int index) noexcept {
  DeviceInfo info;
  info.device = {DeviceType::cuda, index};
  cudaDeviceProp properties;
  FLASHCORE_CUDA(cudaGetDeviceProperties(&properties, index));
  std::memcpy(info.name, properties.name, strnlen(properties.name, sizeof info.name - 1));
  info.compute_capability = properties.major * 10 + properties.minor;
  info.sm_count = properties.multiProcessorCount;
  info.smem_per_block_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  info.smem_per_sm_bytes = static_cast<int>(properties.sharedMemPerMultiprocessor);
  info.registers_per_sm = properties.regsPerMultiprocessor;
  info.threads_per_sm = properties.maxThreadsPerMultiProcessor;
  info.l2_bytes = properties.l2CacheSize;
  int clock_khz = 0, memory_khz = 0;
  FLASHCORE_CUDA(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, index));
  FLASHCORE_CUDA(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, index));
  ArchitectureRates rates = kRates[0];
  for (const ArchitectureRates& row : kRates) {
    if (row.compute_capability <= info.compute_capability) rates = row;
  }
  const double sm_clocks = 1e3 * clock_khz * info.sm_count;
  info.f32_tflops = 2.0 * rates.f32_lanes * sm_clocks / 1e12;
  info.tensor16_tflops = rates.tensor16_flops * sm_clocks / 1e12;
  info.memory_gbs = 2.0 * memory_khz * 1e3 * properties.memoryBusWidth / 8 / 1e9;
  return info;
}

}  // namespace cuda

CudaAvailability cuda_availability() noexcept {
  CudaAvailability result;
  try {
    const cudaError_t code = cudaGetDeviceCount(&result.device_count);
    if (code == cudaSuccess && result.device_count > 0) return result;
    result.device_count = 0;
    result.reason =
        code == cudaErrorInsufficientDriver
            ? "no NVIDIA driver was found, or it is older than the CUDA runtime of this build"
        : code == cudaSuccess || code == cudaErrorNoDevice
            ? "the driver reports no GPU (is CUDA_VISIBLE_DEVICES empty?)"
            : std::string("the CUDA runtime failed: ") + cudaGetErrorString(code);
  } catch (const std::bad_alloc&) {
    result.device_count = 0;
  }
  return result;
}

}  // namespace flashcore
