// A CUDA graph of captured calls.
#pragma once

#include <algorithm>

#include "gpu/support.h"

namespace flashcore::gpu_test {

class CapturedGraph {
 public:
  template <typename Body>
  CapturedGraph(cudaStream_t stream, Body body) {
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
    const Status status = body();
    require(cudaStreamEndCapture(stream, &graph_), "end capture");
    require(status);
    require(cudaGraphInstantiate(&executable_, graph_, 0), "instantiate");
  }
  ~CapturedGraph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void replay(cudaStream_t stream) const {
    require(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
  }
  std::size_t nodes() const {
    std::size_t count = 0;
    require(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    return count;
  }
  std::size_t nodes(cudaGraphNodeType wanted) const {
    std::vector<cudaGraphNode_t> all(nodes());
    std::size_t count = all.size();
    require(cudaGraphGetNodes(graph_, all.data(), &count), "cudaGraphGetNodes");
    return static_cast<std::size_t>(
        std::count_if(all.begin(), all.end(), [&](cudaGraphNode_t node) {
          cudaGraphNodeType type{};
          require(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
          return type == wanted;
        }));
  }
  /// Destroys the graph; the executable graph stays.
  void destroy_graph() {
    require(cudaGraphDestroy(graph_), "cudaGraphDestroy");
    graph_ = nullptr;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace flashcore::gpu_test
