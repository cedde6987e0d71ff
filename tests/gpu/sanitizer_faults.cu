// One deliberate fault per compute-sanitizer tool. A tool that reports its fault here can be
// trusted when it reports nothing elsewhere.
//
//   sanitizer_faults memcheck    writes past the end of an allocation
//   sanitizer_faults racecheck   reads shared memory while another warp writes it
//   sanitizer_faults initcheck   reads uninitialized memory
//   sanitizer_faults synccheck   splits a warp over two barriers
//   sanitizer_faults none        has no fault
//
// Exit code without a tool: 0 in every case, 2 for wrong usage, 3 for a CUDA error.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

namespace {

constexpr int kThreads = 64;
constexpr int kElements = 100;  // 400 bytes: the next byte is mapped, but not allocated

__global__ void write_past_end(int* g_data) { g_data[kElements + threadIdx.x % 4] = 1; }

__global__ void race(int* g_data) {
  __shared__ int s_data[kThreads];
  s_data[threadIdx.x] = static_cast<int>(threadIdx.x);
  // The barrier is missing on purpose: the other warp writes the value.
  g_data[threadIdx.x] = s_data[kThreads - 1 - threadIdx.x];
}

__global__ void copy_first(const int* g_from, int* g_to) {
  g_to[threadIdx.x] = g_from[threadIdx.x];
}

__global__ void divergent_barrier(int* g_data) {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
    g_data[threadIdx.x] = 1;
  } else {
    g_data[threadIdx.x] = 2;
    __syncthreads();
  }
}

__global__ void clean(int* g_data) {
  __shared__ int s_data[kThreads];
  s_data[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  g_data[threadIdx.x] = s_data[kThreads - 1 - threadIdx.x];
}

bool ok(cudaError_t code) {
  if (code == cudaSuccess) return true;
  std::fprintf(stderr, "sanitizer_faults: %s\n", cudaGetErrorString(code));
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const char* fault = argc == 2 ? argv[1] : "";
  int *g_data = nullptr, *g_unwritten = nullptr;
  if (!ok(cudaMalloc(&g_data, kElements * sizeof(int))) ||
      !ok(cudaMalloc(&g_unwritten, kElements * sizeof(int)))) {
    return 3;
  }
  if (std::strcmp(fault, "memcheck") == 0) {
    write_past_end<<<1, kThreads>>>(g_data);
  } else if (std::strcmp(fault, "racecheck") == 0) {
    race<<<1, kThreads>>>(g_data);
  } else if (std::strcmp(fault, "initcheck") == 0) {
    copy_first<<<1, kThreads>>>(g_unwritten, g_data);
  } else if (std::strcmp(fault, "synccheck") == 0) {
    divergent_barrier<<<1, kThreads>>>(g_data);
  } else if (std::strcmp(fault, "none") == 0) {
    clean<<<1, kThreads>>>(g_data);
  } else {
    std::fprintf(stderr, "usage: sanitizer_faults memcheck|racecheck|initcheck|synccheck|none\n");
    return 2;
  }
  int result[kThreads];
  if (!ok(cudaGetLastError()) || !ok(cudaDeviceSynchronize()) ||
      !ok(cudaMemcpy(result, g_data, sizeof result, cudaMemcpyDeviceToHost))) {
    return 3;
  }
  cudaFree(g_unwritten);
  cudaFree(g_data);
  return 0;
}
