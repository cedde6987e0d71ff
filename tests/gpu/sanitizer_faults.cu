// One fault for each tool of compute-sanitizer, so that a tool which finds nothing is known to
// look.
//
//   sanitizer_faults memcheck    writes behind an allocation
//   sanitizer_faults racecheck   reads shared memory another warp is writing
//   sanitizer_faults initcheck   reads memory nobody wrote
//   sanitizer_faults synccheck   has the threads of one warp at two barriers
//   sanitizer_faults none        does none of this
//
// Without the tool every one of them ends by itself, with exit code 0. 2: wrong use; 3: CUDA
// failed.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

namespace {

constexpr int kThreads = 64;
constexpr int kElements = 100;  // 400 bytes: the next byte is still mapped, only not ours

__global__ void write_behind(int* g_data) { g_data[kElements + threadIdx.x % 4] = 1; }

__global__ void race(int* g_data) {
  __shared__ int s_data[kThreads];
  s_data[threadIdx.x] = static_cast<int>(threadIdx.x);
  // A barrier is missing here: the value comes from the other warp.
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
    write_behind<<<1, kThreads>>>(g_data);
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
