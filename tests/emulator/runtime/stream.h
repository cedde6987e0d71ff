// Streams, events and graphs. Work runs when it is submitted, or is recorded into a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

namespace flashcore::emulator {

struct Node {
  cudaGraphNodeType type;
  std::function<cudaError_t()> work;
};

/// A reference counted object of the caller, whose callback runs when the last graph is destroyed.
struct UserObject {
  cudaHostFn_t destroy = nullptr;
  void* data = nullptr;
  ~UserObject() { destroy(data); }
};

/// What a graph and its executables share.
struct GraphBody {
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<std::shared_ptr<UserObject>> objects;
  std::vector<void*> memory;  // allocated by nodes
  unsigned long long id = 0;
  ~GraphBody();
};

struct Event {
  std::chrono::steady_clock::time_point when;
  std::shared_ptr<GraphBody> capture;
};

/// Runs the work, or records it if the stream is captured.
cudaError_t submit(cudaStream_t stream, cudaGraphNodeType type, std::function<cudaError_t()> work);
/// The graph that the stream is being captured into, or null.
std::shared_ptr<GraphBody> capture_of(cudaStream_t stream);

/// Stores the error for cudaGetLastError and returns it. A failed kernel breaks the device: every
/// later call fails, as after a fault on a GPU.
cudaError_t remember(cudaError_t error);
cudaError_t sticky_error();
void break_device(cudaError_t error);

}  // namespace flashcore::emulator

// The handles of the runtime API.
struct CUstream_st {
  std::shared_ptr<flashcore::emulator::GraphBody> capture;
};
struct CUevent_st {
  flashcore::emulator::Event event;
};
struct CUgraph_st {
  std::shared_ptr<flashcore::emulator::GraphBody> body;
};
struct CUgraphExec_st {
  std::shared_ptr<flashcore::emulator::GraphBody> body;
};
struct CUuserObject_st {
  std::shared_ptr<flashcore::emulator::UserObject> object;
};
