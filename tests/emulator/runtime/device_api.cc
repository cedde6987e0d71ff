// Devices, attributes, errors and entry points of the driver.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "emulator/runtime/device.h"
#include "emulator/runtime/kernels.h"
#include "emulator/runtime/stream.h"
#include "emulator/runtime/tensor_map.h"

namespace flashcore::emulator {
namespace {

constexpr int kRegistersPerSm = 65536;
constexpr int kReservedShared = 1024;

/// The registers that the launch bounds allow: ptxas, which would choose them, has not run.
int registers_of(const Program& program) {
  const int threads = std::max(program.max_threads, 1) * std::max(program.min_ctas, 1);
  return std::min(255, kRegistersPerSm / threads / 8 * 8);
}

int ctas_per_sm(const Program& program, int threads, std::size_t dynamic_shared) {
  const DeviceModel& device = device_model();
  const auto shared = static_cast<int>(program.shared_bytes + dynamic_shared) + kReservedShared;
  const int by_threads = device.threads_per_sm / threads;
  const int by_registers = kRegistersPerSm / (registers_of(program) * threads);
  return std::max(0, std::min({by_threads, by_registers, device.shared_per_sm / shared, 32}));
}

template <typename F>
cudaError_t with_program(const void* entry, F f) {
  Kernel* kernel = find_kernel(entry);
  if (kernel == nullptr) return remember(cudaErrorInvalidDeviceFunction);
  try {
    return remember(f(*kernel, program_of(*kernel)));
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "emulator: %s\n", error.what());
    return remember(cudaErrorNoKernelImageForDevice);
  }
}

}  // namespace
}  // namespace flashcore::emulator

using namespace flashcore::emulator;  // NOLINT: the API's functions are global

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return remember(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return remember(cudaErrorInvalidDevice);
  const DeviceModel& model = device_model();
  *properties = {};
  std::strncpy(properties->name, model.name, sizeof properties->name - 1);
  properties->major = model.compute_capability / 10;
  properties->minor = model.compute_capability % 10;
  properties->multiProcessorCount = model.sm_count;
  properties->totalGlobalMem = model.memory_bytes;
  properties->sharedMemPerBlock = 48 * 1024;
  properties->sharedMemPerBlockOptin = static_cast<std::size_t>(model.shared_per_block);
  properties->sharedMemPerMultiprocessor = static_cast<std::size_t>(model.shared_per_sm);
  properties->reservedSharedMemPerBlock = kReservedShared;
  properties->regsPerBlock = properties->regsPerMultiprocessor = kRegistersPerSm;
  properties->warpSize = kLanes;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = model.threads_per_sm;
  properties->l2CacheSize = model.l2_bytes;
  properties->memoryBusWidth = model.bus_bits;
  properties->clusterLaunch = model.compute_capability >= 90;
  properties->unifiedAddressing = 1;
  properties->memoryPoolsSupported = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return remember(cudaErrorInvalidDevice);
  const DeviceModel& model = device_model();
  switch (attribute) {
    case cudaDevAttrClockRate: *value = model.clock_khz; break;
    case cudaDevAttrMemoryClockRate: *value = model.memory_khz; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = model.shared_per_block; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = model.threads_per_sm; break;
    case cudaDevAttrMultiProcessorCount: *value = model.sm_count; break;
    case cudaDevAttrComputeCapabilityMajor: *value = model.compute_capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = model.compute_capability % 10; break;
    case cudaDevAttrL2CacheSize: *value = model.l2_bytes; break;
    default: return remember(cudaErrorNotSupported);
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* entry) {
  return with_program(entry, [&](const Kernel& kernel, const Program& program) {
    *attributes = {};
    attributes->sharedSizeBytes = program.shared_bytes;
    attributes->localSizeBytes = program.local_bytes;
    attributes->maxThreadsPerBlock = program.max_threads == 0 ? 1024 : program.max_threads;
    attributes->numRegs = registers_of(program);
    attributes->ptxVersion = attributes->binaryVersion = device_model().compute_capability;
    attributes->maxDynamicSharedSizeBytes = kernel.max_dynamic_shared;
    return cudaSuccess;
  });
}
cudaError_t cudaFuncSetAttribute(const void* entry, cudaFuncAttribute attribute, int value) {
  Kernel* kernel = find_kernel(entry);
  if (kernel == nullptr) return remember(cudaErrorInvalidDeviceFunction);
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > device_model().shared_per_block) return remember(cudaErrorInvalidValue);
    kernel->max_dynamic_shared = value;
  }
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, const void* entry, int threads,
                                                          std::size_t dynamic_shared) {
  return with_program(entry, [&](const Kernel&, const Program& program) {
    *ctas = ctas_per_sm(program, threads, dynamic_shared);
    return cudaSuccess;
  });
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* entry,
                                           const cudaLaunchConfig_t* config) {
  return with_program(entry, [&](const Kernel&, const Program& program) {
    unsigned size = 1;
    for (unsigned k = 0; k < config->numAttrs; ++k) {
      if (config->attrs[k].id == cudaLaunchAttributeClusterDimension)
        size = config->attrs[k].val.clusterDim.x;
    }
    const int ctas =
        ctas_per_sm(program, static_cast<int>(config->blockDim.x), config->dynamicSmemBytes);
    *clusters = device_model().compute_capability < 90
                    ? 0
                    : ctas * device_model().sm_count / static_cast<int>(size);
    return cudaSuccess;
  });
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorNoKernelImageForDevice: return "cudaErrorNoKernelImageForDevice";
    default: return "cudaError";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure: return "the emulator has stopped the kernel";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    default: return "error of the emulated device";
  }
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&encode_tensor_map) : nullptr;
  if (result != nullptr)
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
