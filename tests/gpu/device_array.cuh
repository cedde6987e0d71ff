// Device array for tests of single device functions: filled from a vector, read back into one. CUDA
// errors become exceptions, which GoogleTest reports.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <vector>

namespace flashcore::gpu_test {

inline void require_cuda(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}

template <typename T>
class Array {
 public:
  /// All bits are 1, so that unwritten elements are visible.
  explicit Array(std::size_t count) : count_(count) {
    require_cuda(cudaMalloc(reinterpret_cast<void**>(&g_data_), count * sizeof(T)));
    require_cuda(cudaMemset(g_data_, 0xff, count * sizeof(T)));
  }
  explicit Array(const std::vector<T>& host) : Array(host.size()) {
    require_cuda(cudaMemcpy(g_data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(g_data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* get() const { return g_data_; }
  std::vector<T> host() const {
    std::vector<T> values(count_);
    require_cuda(cudaGetLastError());
    require_cuda(cudaDeviceSynchronize());
    require_cuda(cudaMemcpy(values.data(), g_data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  std::size_t count_;
  T* g_data_ = nullptr;
};

}  // namespace flashcore::gpu_test
