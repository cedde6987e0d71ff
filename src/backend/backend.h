// What a backend does for the pipeline (api/attention.cc) and for the tools. Two exist: the CPU's,
// always, and CUDA's, where the build has it.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "core/append.h"
#include "core/combine.h"
#include "core/params.h"
#include "core/quantize.h"
#include "core/tile_scheduler.h"
#include "flashcore/attention.h"

namespace flashcore {

/// What the compiler and the driver say of a compiled kernel.
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

  // The pipeline. None of these allocates or (but for read_header) synchronises.
  /// cancel, here and below: as for run(). A backend that returns before the work is done need not
  /// read it.
  virtual Status launch(const Plan& plan, const core::AttentionParams& params, Stream stream,
                        const std::int32_t* cancel) const = 0;
  /// partials is f64 for f64 problems, else f32. threads: of the CPU; 0: all it has.
  virtual Status combine(const core::CombineParams& params, DType partials, Device device,
                         int threads, Stream stream, const std::int32_t* cancel) const = 0;
  virtual Status append(const core::AppendParams& params, Device device, Stream stream,
                        const std::int32_t* cancel) const = 0;
  /// A tensor without elements still has scales.
  virtual Status quantize(const core::QuantParams& params, Device device, Stream stream,
                          const std::int32_t* cancel) const = 0;
  virtual Status dequantize(const core::QuantParams& params, Device device, Stream stream,
                            const std::int32_t* cancel) const = 0;
  virtual Status zero(void* data, std::size_t bytes, Device device, Stream stream) const = 0;
  /// Synchronises the stream and copies the error slot to the host.
  virtual Status read_error(const core::ErrorSlot* slot, core::ErrorSlot* host, Device device,
                            Stream stream) const = 0;
  /// flashcore::capture_id(). A CPU captures nothing.
  virtual Result<std::uint64_t> capture_id(Device, Stream, std::int32_t*) const {
    return std::uint64_t{0};
  }

  virtual Result<DeviceInfo> device_info(int index) const = 0;
  /// Checks that device can be used and measures its rates where they are not known.
  virtual Status measure_rates(DeviceInfo& info) const = 0;
  virtual Result<KernelResources> resources(const KernelInfo& kernel, int device) const = 0;

  // Memory and time, for tools and tests.
  /// What a call costs before any work of ours: a kernel that returns at once (GPU) or
  /// nothing (CPU).
  virtual Status launch_empty(Device device, Stream stream) const = 0;
  virtual Result<void*> allocate(std::size_t bytes, int device) const = 0;
  virtual void release(void* data, int device) const = 0;
  virtual Status upload(void* to, const void* from_host, std::size_t bytes, int device) const = 0;
  virtual Status download(void* to_host, const void* from, std::size_t bytes, int device) const = 0;
  /// Microseconds per call, one figure per sample. The calls of one sample follow each other as
  /// one graph (GPU) or one loop (CPU), `calls` of them, given the call's number.
  virtual Result<std::vector<double>> time(
      const std::function<Status(int call, Stream stream)>& call, int calls, int samples,
      int device) const = 0;
};

const Backend& cpu_backend() noexcept;

/// Null in a build without CUDA.
const Backend* cuda_backend() noexcept;

/// The backend of a device, or why there is none.
Result<const Backend*> backend_for(DeviceType type) noexcept;

/// The launch arguments of a plan: pointers, strides and sizes, nothing decided here.
core::AttentionParams make_params(const Plan& plan, const Tensors& tensors,
                                  const Workspace& workspace) noexcept;

/// The tiles of a persistent kernel, in the order in which its CTAs fetch them.
struct WorkList {
  core::TileScheduler order;
  core::PackGqa heads;
  core::TailSplit tail;
  std::int32_t num_scheduled;  ///< tiles and tail splits
};
WorkList make_work_list(const Plan& plan, const core::AttentionParams& params) noexcept;

/// The arguments of the step that joins a split plan's partial results.
core::CombineParams make_combine_params(const Plan& plan,
                                        const core::AttentionParams& params) noexcept;

/// The pages that a block table (it may be missing) tells of.
core::PageTable pages_of(std::int64_t page_size, std::int64_t pages,
                         const TensorView& block_table) noexcept;

/// What checked mode found, in words; ok for an empty slot.
Status describe_error(const core::ErrorSlot& slot) noexcept;

core::Element element_of(DType dtype) noexcept;

/// The scales of an 8-bit tensor (they may be missing), block_rows rows to one where it has blocks.
core::Scales scales_of(const TensorView& scale, const Layout& layout,
                       std::int64_t block_rows) noexcept;

}  // namespace flashcore
