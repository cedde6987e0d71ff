// CUDA errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include "core/error.h"

namespace flashcore::cuda {

inline Status cuda_status(cudaError_t code, const char* what) noexcept {
  if (code == cudaSuccess) return {};
  cudaGetLastError();  // clears the error: it is reported here, not by the caller's next check
  return error(code == cudaErrorMemoryAllocation ? StatusCode::out_of_memory : StatusCode::cuda,
               "%s: %s (%s)", what, cudaGetErrorString(code), cudaGetErrorName(code));
}

/// Makes `device` the current device for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) noexcept {
    status_ = cudaGetDevice(&previous_);
    if (status_ == cudaSuccess && previous_ != device) {
      status_ = cudaSetDevice(device);
      changed_ = status_ == cudaSuccess;
    }
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  Status status() const noexcept { return cuda_status(status_, "cudaSetDevice"); }

 private:
  cudaError_t status_;
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace flashcore::cuda

/// Returns from the enclosing function unless the CUDA call succeeds.
#define FLASHCORE_CUDA(call)                                      \
  do {                                                            \
    if (const cudaError_t code_ = (call); code_ != cudaSuccess) { \
      return ::flashcore::cuda::cuda_status(code_, #call);        \
    }                                                             \
  } while (false)
