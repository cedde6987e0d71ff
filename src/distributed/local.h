// Memory, copies and attention on this rank's device.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "distributed/mask.h"
#include "flashcore/distributed.h"

namespace flashcore::distributed {

/// Memory of the device; freed at the end.
class Buffer {
 public:
  Buffer() noexcept = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer();

  /// Keeps the memory if it is large enough, else replaces it.
  Status reserve(const Backend& backend, Device device, std::int64_t bytes);
  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  void swap(Buffer& other) noexcept;

  const Backend* backend_ = nullptr;
  Device device_{};
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// A compact [batch, heads, rows, dim] view.
TensorView compact(void* data, DType dtype, std::int64_t batch, std::int64_t heads,
                   std::int64_t rows, std::int64_t dim, Device device);
std::int64_t bytes_of(const TensorView& view) noexcept;
/// Indices [begin, begin + count) of one axis.
TensorView slice(TensorView view, int axis, std::int64_t begin, std::int64_t count) noexcept;
/// An LSE [batch, heads, rows] as [batch, heads, rows, 1].
TensorView with_column(TensorView lse) noexcept;
TensorView without_column(TensorView lse) noexcept;

/// The positions of the first query and key of each local call, in memory of the device.
class Starts {
 public:
  /// Returns the index of the pair.
  std::size_t add(std::int64_t q_start, std::int64_t k_start);
  Status upload(const Backend& backend, Device device, std::int64_t batch);
  TensorView q_start(std::size_t index) const noexcept { return view(2 * index); }
  TensorView k_start(std::size_t index) const noexcept { return view(2 * index + 1); }

 private:
  TensorView view(std::size_t entry) const noexcept;

  std::vector<std::int32_t> host_;
  Buffer memory_;
  Device device_{};
  std::int64_t batch_ = 0;
};

inline constexpr std::size_t kNoStarts = SIZE_MAX;

/// The device, the stream and the options of one call.
class Local {
 public:
  static Result<Local> make(Device device, Stream stream, const Options& options);

  Device device() const noexcept { return device_; }
  const Options& options() const noexcept { return options_; }
  Stream stream() const noexcept { return stream_; }

  Status reserve(Buffer& buffer, std::int64_t bytes) const {
    return buffer.reserve(*backend_, device_, bytes);
  }
  Status upload(Starts& starts, std::int64_t batch) const {
    return starts.upload(*backend_, device_, batch);
  }
  Status upload(Buffer& buffer, const std::vector<std::int32_t>& values) const;
  /// Copies a [batch, heads, rows, dim] tensor. Last dimensions are contiguous.
  Status copy(const TensorView& to, const TensorView& from) const;
  /// Copies the rows of `given`, which `from` holds one after another, to their places in `to`,
  /// which holds the rows of `held`.
  Status put(const TensorView& to, const Spans& held, const TensorView& from,
             const Spans& given) const;
  /// The inverse: takes the rows of `wanted` from a tensor that holds `held`.
  Status take(const TensorView& to, const TensorView& from, const Spans& held,
              const Spans& wanted) const;
  /// One attention call. `partial`: f32 out without sinks, for merge().
  Status attend(const Tensors& tensors, bool partial);

 private:
  const Backend* backend_ = nullptr;
  Device device_{};
  DeviceInfo info_;
  Stream stream_ = nullptr;
  Options options_;
  Buffer workspace_;
};

/// Partial results of one span of queries. They are merged four at a time, so that memory does not
/// grow with the number of ranks; or, in_order, kept and merged once in ascending order of keys,
/// which gives the same bits on every rank.
class Partials {
 public:
  Partials(TensorView out, TensorView lse, bool in_order) noexcept
      : out_(out), lse_(lse), in_order_(in_order) {}

  /// Memory for one more result. `first_key` orders the results.
  Result<PartialResult> next(Local& local, std::int64_t first_key);
  /// Writes out and lse.
  Status finish(Local& local, const TensorView& sinks);

 private:
  struct Part {
    std::int64_t first_key = 0;
    PartialResult result;
    Buffer memory;
  };
  Status make(Local& local, std::int64_t first_key, Part& part);
  /// Merges all parts into one.
  Status merge_kept(Local& local);

  TensorView out_, lse_;
  bool in_order_;
  std::vector<Part> parts_;
  std::vector<Part> spare_;
};

}  // namespace flashcore::distributed
