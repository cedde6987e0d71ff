// Times calls on a GPU with CUDA events.
#pragma once

#include <functional>
#include <vector>

#include "flashcore/attention.h"

namespace flashcore::cuda {

/// Microseconds per call, one figure per sample. Captures `calls` calls into one graph, so that the
/// host's launch overhead does not count; a sample is one launch of the graph.
Result<std::vector<double>> time_calls(const std::function<Status(int call, Stream stream)>& call,
                                       int calls, int samples, int device);

}  // namespace flashcore::cuda
