// Replaces src/cuda in a build without CUDA.
#include "backend/backend.h"

namespace flashcore {

const Backend* cuda_backend() noexcept { return nullptr; }

CudaAvailability cuda_availability() noexcept {
  try {
    return {0, FLASHCORE_NO_CUDA_REASON};
  } catch (...) {
    return {};
  }
}

}  // namespace flashcore
