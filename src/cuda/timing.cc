#include "cuda/timing.h"

#include <cuda_runtime_api.h>

#include "cuda/check.h"

namespace flashcore::cuda {
namespace {

/// The CUDA objects of one measurement, destroyed at its end.
struct TimingResources {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  ~TimingResources() {
    if (end != nullptr) cudaEventDestroy(end);
    if (begin != nullptr) cudaEventDestroy(begin);
    if (executable != nullptr) cudaGraphExecDestroy(executable);
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
};

}  // namespace

Result<std::vector<double>> time_calls(const std::function<Status(int, Stream)>& call, int calls,
                                       int samples, int device) {
  const DeviceScope scope(device);
  FLASHCORE_RETURN_IF_ERROR(scope.status());
  TimingResources r;
  FLASHCORE_CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
  FLASHCORE_CUDA(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal));
  Status status;
  for (int i = 0; i < calls && status.ok(); ++i) status = call(i, r.stream);
  const cudaError_t captured = cudaStreamEndCapture(r.stream, &r.graph);
  if (!status.ok()) return status;
  FLASHCORE_CUDA(captured);
  FLASHCORE_CUDA(cudaGraphInstantiate(&r.executable, r.graph, 0));
  FLASHCORE_CUDA(cudaEventCreate(&r.begin));
  FLASHCORE_CUDA(cudaEventCreate(&r.end));
  for (int warmup = 0; warmup < 3; ++warmup)
    FLASHCORE_CUDA(cudaGraphLaunch(r.executable, r.stream));
  std::vector<double> microseconds;
  for (int sample = 0; sample < samples; ++sample) {
    FLASHCORE_CUDA(cudaEventRecord(r.begin, r.stream));
    FLASHCORE_CUDA(cudaGraphLaunch(r.executable, r.stream));
    FLASHCORE_CUDA(cudaEventRecord(r.end, r.stream));
    FLASHCORE_CUDA(cudaEventSynchronize(r.end));
    float milliseconds = 0;
    FLASHCORE_CUDA(cudaEventElapsedTime(&milliseconds, r.begin, r.end));
    microseconds.push_back(1e3 * static_cast<double>(milliseconds) / calls);
  }
  return microseconds;
}

}  // namespace flashcore::cuda
