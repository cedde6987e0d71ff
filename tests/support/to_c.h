// Converts a C++ call to a C call, so that one test covers both interfaces.
#pragma once

#include "flashcore/attention.h"
#include "flashcore/flashcore.h"

namespace flashcore::test {

/// A flashcore_tensor and the arrays it points to.
struct CTensor {
  flashcore_tensor tensor{};
  std::int64_t shape[TensorView::kMaxRank] = {};
  std::int64_t strides[TensorView::kMaxRank] = {};

  CTensor() = default;
  explicit CTensor(const TensorView& view) { set(view); }
  CTensor(const CTensor&) = delete;
  CTensor& operator=(const CTensor&) = delete;
  void set(const TensorView& view);
};

flashcore_dtype c_dtype(DType dtype);
flashcore_device c_device(Device device);

/// The number of tensors in api/options.def.
inline constexpr int kTensors = 0
#define FLASHCORE_TENSOR(field, name, shape, type, role, word, doc) +1
#include "api/options.def"
    ;

/// The params of a call. They are valid while this object exists.
class CCall {
 public:
  CCall(const Tensors& tensors, const Options& options);
  CCall(const CCall&) = delete;
  CCall& operator=(const CCall&) = delete;

  flashcore_params params{};
  CTensor tensors[kTensors];  ///< in the order of api/options.def
};

}  // namespace flashcore::test
