// Memory of the runtime API: device memory is host memory that the emulator knows.
#include <cuda_runtime_api.h>

#include <cstring>

#include "emulator/machine/memory.h"
#include "emulator/runtime/device.h"
#include "emulator/runtime/stream.h"

using namespace flashcore::emulator;  // NOLINT: the API's functions are global

extern "C" {

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  if (sticky_error() != cudaSuccess) return remember(sticky_error());
  const bool fits = device_memory().bytes_in_use() + bytes <= device_model().memory_bytes;
  *data = fits ? device_memory().allocate(bytes) : nullptr;
  return remember(*data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFree(void* data) {
  if (data == nullptr || device_memory().release(data)) return remember(sticky_error());
  return remember(cudaErrorInvalidValue);
}
cudaError_t cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t stream) {
  const cudaError_t error = cudaMalloc(data, bytes);
  const auto capture = capture_of(stream);
  if (error != cudaSuccess || capture == nullptr) return error;
  capture->memory.push_back(*data);
  return submit(stream, cudaGraphNodeTypeMemAlloc, [] { return cudaSuccess; });
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  if (capture_of(stream) == nullptr) return cudaFree(data);
  return submit(stream, cudaGraphNodeTypeMemFree,
                [] { return cudaSuccess; });  // freed with the graph
}
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
  *total = device_model().memory_bytes;
  *free_bytes = *total - device_memory().bytes_in_use();
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return submit(stream, cudaGraphNodeTypeMemcpy, [=] {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
  });
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind, cudaStream_t stream) {
  return submit(stream, cudaGraphNodeTypeMemcpy, [=] {
    for (std::size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<char*>(to) + row * to_pitch,
                  static_cast<const char*>(from) + row * from_pitch, width);
    }
    return cudaSuccess;
  });
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  return submit(stream, cudaGraphNodeTypeMemset, [=] {
    std::memset(data, value, bytes);
    return cudaSuccess;
  });
}
cudaError_t cudaMemset(void* data, int value, std::size_t bytes) {
  return cudaMemsetAsync(data, value, bytes, nullptr);
}
cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
  *data = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const bool device = device_memory().find(reinterpret_cast<std::uintptr_t>(pointer)).end != 0;
  *attributes = {};
  attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  attributes->devicePointer = device ? const_cast<void*>(pointer) : nullptr;
  attributes->hostPointer = device ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}

}  // extern "C"
