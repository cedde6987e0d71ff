// Memory, copies, sums, attention and its gradients on this rank's device.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "distributed/job.h"
#include "flashcore/backward.h"
#include "flashcore/distributed.h"

namespace flashcore::distributed {

/// The caller's workspace, handed out in pieces. Pieces beyond its end are null, so that used() is
/// what the call needs.
class Arena {
 public:
  explicit Arena(const Workspace& workspace) noexcept : workspace_(workspace) {}

  std::byte* take(std::int64_t bytes) noexcept;
  std::size_t used() const noexcept { return used_; }

 private:
  Workspace workspace_;
  std::size_t used_ = 0;
};

/// Memory of the device: its own, freed at the end, or a piece of an arena.
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
  Status reserve(Arena& arena, std::int64_t bytes);
  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  void swap(Buffer& other) noexcept;

  const Backend* backend_ = nullptr;  // null: the memory is not its own
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
  std::int64_t bytes() const noexcept;
  /// Copies the positions to `memory`, which has at least bytes() bytes.
  Status upload(const Backend& backend, Device device, std::int64_t batch);
  Buffer& memory() noexcept { return memory_; }
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

enum class Write { copy, add };

/// The device, the stream and the options of one call.
class Local {
 public:
  /// Memory comes from the arena if there is one.
  static Result<Local> make(Device device, Stream stream, const Options& options,
                            Arena* arena = nullptr);

  Device device() const noexcept { return device_; }
  const Options& options() const noexcept { return options_; }
  Stream stream() const noexcept { return stream_; }

  Status reserve(Buffer& buffer, std::int64_t bytes) const;
  Status reserve(Starts& starts) const { return reserve(starts.memory(), starts.bytes()); }
  Status upload(Starts& starts, std::int64_t batch) const;
  Status upload(Buffer& buffer, const std::vector<std::int32_t>& values) const;
  /// Copies a [batch, heads, rows, dim] tensor. Last dimensions are contiguous.
  Status copy(const TensorView& to, const TensorView& from) const;
  /// Adds f32 tensors. The rows of a head are contiguous.
  Status add(const TensorView& to, const TensorView& from) const;
  /// Copies f32 sums, rounded to the type of `to`. Overwrites the sums.
  Status store(const TensorView& to, const TensorView& sums) const;
  Status zero(std::byte* data, std::int64_t bytes) const;
  /// Copies the rows that both tensors hold, or adds them to f32.
  Status move(const TensorView& to, const Spans& to_rows, const TensorView& from,
              const Spans& from_rows, Write how = Write::copy) const;
  /// One attention call. `partial`: f32 out without sinks, for merge().
  Status attend(const Tensors& tensors, bool partial);
  /// One call for gradients. `all_keys` is false if out and lse cover more keys than the call has.
  Status differentiate(const Tensors& tensors, const Gradients& gradients, bool all_keys,
                       const Buffer& workspace) const;
  /// The bytes of its workspace on any kernel, for calls with the types, heads and dims of a job.
  Result<std::int64_t> workspace_of(const Job& job, std::int64_t q_rows, std::int64_t k_rows) const;

 private:
  const Backend* backend_ = nullptr;
  Arena* arena_ = nullptr;
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
