#include "emulator/runtime/stream.h"

#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include "emulator/machine/memory.h"

namespace flashcore::emulator {
namespace {

std::recursive_mutex mutex;  // kernels run one at a time
std::set<CUstream_st*> streams;
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<cudaError_t> broken{cudaSuccess};

bool is_handle(cudaStream_t stream) {
  return stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread;
}

template <typename T>
T* as(void* handle) {
  return static_cast<T*>(handle);
}

}  // namespace

GraphBody::~GraphBody() {
  for (void* data : memory) device_memory().release(data);
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
cudaError_t sticky_error() { return broken.load(); }
void break_device(cudaError_t error) { broken = error; }

std::shared_ptr<GraphBody> capture_of(cudaStream_t stream) {
  return is_handle(stream) ? stream->capture : nullptr;
}

cudaError_t submit(cudaStream_t stream, cudaGraphNodeType type, std::function<cudaError_t()> work) {
  const std::lock_guard lock(mutex);
  if (const cudaError_t error = sticky_error(); error != cudaSuccess) return remember(error);
  if (const auto capture = capture_of(stream)) {
    capture->nodes.push_back(std::make_unique<Node>(Node{type, std::move(work)}));
    return cudaSuccess;
  }
  return remember(work());
}

}  // namespace flashcore::emulator

using namespace flashcore::emulator;  // NOLINT: the API's functions are global

extern "C" {

cudaError_t cudaGetLastError() {
  if (sticky_error() != cudaSuccess) return sticky_error();
  return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return sticky_error() != cudaSuccess ? sticky_error() : last_error;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  const std::lock_guard lock(mutex);
  *stream = new CUstream_st;
  streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  streams.erase(stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (capture_of(stream) != nullptr) return remember(cudaErrorStreamCaptureUnsupported);
  return remember(sticky_error());
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t cudaDeviceSynchronize() { return remember(sticky_error()); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->event = {std::chrono::steady_clock::now(), capture_of(stream)};
  return remember(sticky_error());
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return remember(sticky_error()); }
cudaError_t cudaEventQuery(cudaEvent_t) { return remember(sticky_error()); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = std::chrono::duration<float, std::milli>(end->event.when - start->event.when).count();
  return remember(sticky_error());
}
/// A wait for an event of a captured stream makes this stream part of the capture.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (event->event.capture != nullptr && is_handle(stream)) stream->capture = event->event.capture;
  return remember(sticky_error());
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(*mode, current);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  static std::atomic<unsigned long long> next{1};
  if (!is_handle(stream) || stream->capture != nullptr)
    return remember(cudaErrorStreamCaptureUnsupported);
  stream->capture = std::make_shared<GraphBody>();
  stream->capture->id = next++;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard lock(mutex);
  const auto body = capture_of(stream);
  if (body == nullptr) return remember(cudaErrorIllegalState);
  for (CUstream_st* other : streams) {
    if (other->capture == body) other->capture = nullptr;
  }
  *graph = new CUgraph_st{body};
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status =
      capture_of(stream) != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     std::size_t*) {
  const auto body = capture_of(stream);
  *status = body != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (body == nullptr) return cudaSuccess;
  if (id != nullptr) *id = body->id;
  // The handle only has to live until the caller has retained its object in the graph.
  static thread_local CUgraph_st current;
  current.body = body;
  if (graph != nullptr) *graph = &current;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = new CUgraphExec_st{graph->body};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const auto body = executable->body;
  return submit(stream, cudaGraphNodeTypeGraph, [body] {
    for (const auto& node : body->nodes) {
      if (const cudaError_t error = node->work(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  const auto& all = graph->body->nodes;
  if (nodes == nullptr) {
    *count = all.size();
    return cudaSuccess;
  }
  *count = std::min(*count, all.size());
  for (std::size_t k = 0; k < *count; ++k)
    nodes[k] = reinterpret_cast<cudaGraphNode_t>(all[k].get());
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = as<Node>(node)->type;
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy,
                                 unsigned, unsigned) {
  auto shared = std::make_shared<UserObject>();
  shared->destroy = destroy;
  shared->data = data;
  *object = new CUuserObject_st{shared};
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                      unsigned flags) {
  graph->body->objects.push_back(object->object);
  if ((flags & cudaGraphUserObjectMove) != 0) delete object;
  return cudaSuccess;
}

}  // extern "C"
