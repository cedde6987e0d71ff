// The interface between the pipeline (api/attention.cc), the tools and a device. There are two
// backends: the CPU's, always, and CUDA's, if the build has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flashcore/attention.h"
#include "flashcore/backward.h"

namespace flashcore {

// Forward declarations, because few files need the layouts. backend/params.h has them.
namespace core {
struct AppendParams;
struct AttentionParams;
struct BackwardParams;
struct CombineParams;
struct ErrorSlot;
struct QuantParams;
enum class Element : std::int32_t;
}  // namespace core

/// Resources of a compiled kernel, as the compiler and the driver report them.
struct KernelResources {
  int registers = 0;
  int shared_bytes = 0;
  int local_bytes = 0;  ///< per thread: spills and stack
  int blocks_per_sm = 0;
  double occupancy = 0;  ///< resident warps over the SM's limit
};

class Backend {
 public:
  virtual ~Backend() = default;

  // The pipeline. These functions allocate nothing. Only read_error() synchronises.
  /// `cancel`, here and below: as for run(). A backend that returns before the work is done may
  /// ignore it.
  virtual Status launch(const Plan& plan, const core::AttentionParams& params, Stream stream,
                        const std::int32_t* cancel) const = 0;
  /// Computes gradients.
  virtual Status launch_backward(const BackwardPlan&, const core::BackwardParams&, Stream,
                                 const std::int32_t*) const {
    return Status(StatusCode::unsupported, "this device has no kernel for gradients");
  }
  /// `partials` is f64 for f64 problems, else f32. `threads`: CPU threads; 0: all.
  virtual Status combine(const core::CombineParams& params, DType partials, Device device,
                         int threads, Stream stream, const std::int32_t* cancel) const = 0;
  virtual Status append(const core::AppendParams& params, Device device, Stream stream,
                        const std::int32_t* cancel) const = 0;
  /// Also called for a tensor without elements, because it has scales to write.
  virtual Status quantize(const core::QuantParams& params, Device device, Stream stream,
                          const std::int32_t* cancel) const = 0;
  virtual Status dequantize(const core::QuantParams& params, Device device, Stream stream,
                            const std::int32_t* cancel) const = 0;
  virtual Status zero(void* data, std::size_t bytes, Device device, Stream stream) const = 0;
  /// Copies `rows` rows of `width` bytes that start `pitch` bytes apart, in stream order.
  virtual Status copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                           std::size_t width, std::size_t rows, Device device,
                           Stream stream) const = 0;
  /// Synchronises the stream and copies the error slot to the host.
  virtual Status read_error(const core::ErrorSlot* slot, core::ErrorSlot* host, Device device,
                            Stream stream) const = 0;
  /// See flashcore::capture_id(). A CPU has no graph capture.
  virtual Result<std::uint64_t> capture_id(Device, Stream, std::int32_t*) const {
    return std::uint64_t{0};
  }

  virtual Result<DeviceInfo> device_info(int index) const = 0;
  /// Checks that the device is usable and measures its unknown rates.
  virtual Status measure_rates(DeviceInfo& info) const = 0;
  virtual Result<KernelResources> resources(const KernelInfo& kernel, int device) const = 0;

  // Memory and time, for tools and tests.
  /// The fixed cost of a call: launches an empty kernel (GPU) or does nothing (CPU).
  virtual Status launch_empty(Device device, Stream stream) const = 0;
  virtual Result<void*> allocate(std::size_t bytes, int device) const = 0;
  virtual void release(void* data, int device) const = 0;
  virtual Status upload(void* to, const void* from_host, std::size_t bytes, int device) const = 0;
  virtual Status download(void* to_host, const void* from, std::size_t bytes, int device) const = 0;
  /// Microseconds per call, one figure per sample. A sample is one graph (GPU) or one loop (CPU) of
  /// `calls` calls; `call` gets its number.
  virtual Result<std::vector<double>> time(
      const std::function<Status(int call, Stream stream)>& call, int calls, int samples,
      int device) const = 0;
};

const Backend& cpu_backend() noexcept;

/// Null in a build without CUDA.
const Backend* cuda_backend() noexcept;

/// The backend of a device type. The error says why it is not available.
Result<const Backend*> backend_for(DeviceType type) noexcept;

/// The error of a checked call as a Status; ok if the slot is empty.
Status describe_error(const core::ErrorSlot& slot) noexcept;

core::Element element_of(DType dtype) noexcept;

}  // namespace flashcore
