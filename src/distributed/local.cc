#include "distributed/local.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace flashcore::distributed {
namespace {

constexpr std::size_t kKept = 4;  // partial results of a span that wait for a merge

std::byte* address(const TensorView& view, std::int64_t b, std::int64_t h) noexcept {
  return static_cast<std::byte*>(view.data) +
         (b * view.strides[0] + h * view.strides[1]) * size_of(view.dtype);
}

/// The index of a row of the sequence in a tensor that holds these spans.
std::int64_t offset_in(const Spans& held, std::int64_t row) noexcept {
  std::int64_t offset = 0;
  for (const Span one : held) {
    if (row >= one.begin && row < one.end) return offset + row - one.begin;
    offset += one.size();
  }
  return offset;
}

}  // namespace

Buffer::~Buffer() {
  if (data_ != nullptr) backend_->release(data_, device_.index);
}

void Buffer::swap(Buffer& other) noexcept {
  std::swap(backend_, other.backend_);
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
}

Status Buffer::reserve(const Backend& backend, Device device, std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  if (data_ != nullptr && bytes_ >= size) return {};
  Buffer larger;
  const Result<void*> memory = backend.allocate(size, device.index);
  if (!memory.ok()) return memory.status();
  larger.backend_ = &backend;
  larger.device_ = device;
  larger.data_ = static_cast<std::byte*>(*memory);
  larger.bytes_ = size;
  swap(larger);
  return {};
}

TensorView compact(void* data, DType dtype, std::int64_t batch, std::int64_t heads,
                   std::int64_t rows, std::int64_t dim, Device device) {
  return view(data, dtype, {batch, heads, rows, dim}, device);
}

std::int64_t bytes_of(const TensorView& view) noexcept {
  std::int64_t count = size_of(view.dtype);
  for (int i = 0; i < view.rank; ++i) count *= view.shape[i];
  return count;
}

TensorView slice(TensorView view, int axis, std::int64_t begin, std::int64_t count) noexcept {
  view.data = static_cast<std::byte*>(view.data) + begin * view.strides[axis] * size_of(view.dtype);
  view.shape[axis] = count;
  return view;
}

TensorView with_column(TensorView lse) noexcept {
  lse.rank = 4;
  lse.shape[3] = lse.strides[3] = 1;
  return lse;
}

TensorView without_column(TensorView lse) noexcept {
  lse.rank = 3;
  return lse;
}

std::size_t Starts::add(std::int64_t q_start, std::int64_t k_start) {
  host_.push_back(static_cast<std::int32_t>(q_start));
  host_.push_back(static_cast<std::int32_t>(k_start));
  return host_.size() / 2 - 1;
}

Status Starts::upload(const Backend& backend, Device device, std::int64_t batch) {
  device_ = device;
  batch_ = batch;
  if (host_.empty()) return {};
  const std::size_t bytes = host_.size() * sizeof host_[0];
  FLASHCORE_RETURN_IF_ERROR(memory_.reserve(backend, device, static_cast<std::int64_t>(bytes)));
  return backend.upload(memory_.data(), host_.data(), bytes, device.index);
}

TensorView Starts::view(std::size_t entry) const noexcept {
  TensorView one =
      flashcore::view(memory_.data() + entry * sizeof host_[0], DType::i32, {batch_}, device_);
  one.strides[0] = 0;  // the same position in every sequence
  return one;
}

Result<Local> Local::make(Device device, Stream stream, const Options& options) {
  const Result<const Backend*> backend = backend_for(device.type);
  if (!backend.ok()) return backend.status();
  const Result<DeviceInfo> info = flashcore::device_info(device);
  if (!info.ok()) return info.status();
  Local local;
  local.backend_ = *backend;
  local.device_ = device;
  local.info_ = *info;
  local.stream_ = stream;
  local.options_ = options;
  return local;
}

Status Local::upload(Buffer& buffer, const std::vector<std::int32_t>& values) const {
  const std::size_t bytes = values.size() * sizeof values[0];
  FLASHCORE_RETURN_IF_ERROR(reserve(buffer, static_cast<std::int64_t>(bytes)));
  return backend_->upload(buffer.data(), values.data(), bytes, device_.index);
}

Status Local::copy(const TensorView& to, const TensorView& from) const {
  const std::int64_t size = size_of(to.dtype);
  if (bytes_of(to) == 0) return {};
  for (std::int64_t b = 0; b < to.shape[0]; ++b) {
    for (std::int64_t h = 0; h < to.shape[1]; ++h) {
      FLASHCORE_RETURN_IF_ERROR(
          backend_->copy_rows(address(to, b, h), static_cast<std::size_t>(to.strides[2] * size),
                              address(from, b, h), static_cast<std::size_t>(from.strides[2] * size),
                              static_cast<std::size_t>(to.shape[3] * size),
                              static_cast<std::size_t>(to.shape[2]), device_, stream_));
    }
  }
  return {};
}

Status Local::put(const TensorView& to, const Spans& held, const TensorView& from,
                  const Spans& given) const {
  std::int64_t at = 0;
  for (const Span one : given) {
    FLASHCORE_RETURN_IF_ERROR(
        copy(slice(to, 2, offset_in(held, one.begin), one.size()), slice(from, 2, at, one.size())));
    at += one.size();
  }
  return {};
}

Status Local::take(const TensorView& to, const TensorView& from, const Spans& held,
                   const Spans& wanted) const {
  std::int64_t at = 0;
  for (const Span all : wanted) {
    for (const Span one : overlap({all}, held)) {
      FLASHCORE_RETURN_IF_ERROR(copy(slice(to, 2, at, one.size()),
                                     slice(from, 2, offset_in(held, one.begin), one.size())));
      at += one.size();
    }
  }
  return {};
}

Status Local::attend(const Tensors& tensors, bool partial) {
  Options options = options_;
  options.partial = partial;
  const Result<Problem> problem = make_problem(tensors, options);
  if (!problem.ok()) return problem.status();
  const Result<Plan> plan = make_plan(*problem, info_);
  if (!plan.ok()) return plan.status();
  const auto needed = static_cast<std::int64_t>(workspace_bytes(*plan));
  const std::byte* before = workspace_.data();
  FLASHCORE_RETURN_IF_ERROR(reserve(workspace_, needed));
  const Workspace workspace{workspace_.data(), workspace_.bytes(), device_, nullptr};
  if (workspace_.data() != before && workspace_.bytes() >= kWorkspaceHeaderBytes) {
    FLASHCORE_RETURN_IF_ERROR(workspace_init(workspace, stream_));
  }
  return run(*plan, tensors, workspace, stream_);
}

Status Partials::make(Local& local, std::int64_t first_key, Part& part) {
  if (!spare_.empty()) {
    part = std::move(spare_.back());
    spare_.pop_back();
  }
  const std::int64_t rows = out_.shape[0] * out_.shape[1] * out_.shape[2];
  FLASHCORE_RETURN_IF_ERROR(local.reserve(part.memory, rows * (out_.shape[3] + 1) * 4));
  part.first_key = first_key;
  part.result.out = compact(part.memory.data(), DType::f32, out_.shape[0], out_.shape[1],
                            out_.shape[2], out_.shape[3], local.device());
  part.result.lse = view(part.memory.data() + rows * out_.shape[3] * 4, DType::f32,
                         {out_.shape[0], out_.shape[1], out_.shape[2]}, local.device());
  return {};
}

Status Partials::merge_kept(Local& local) {
  Part made;
  FLASHCORE_RETURN_IF_ERROR(make(local, parts_[0].first_key, made));
  std::vector<PartialResult> results;
  for (const Part& part : parts_) results.push_back(part.result);
  FLASHCORE_RETURN_IF_ERROR(merge(results, made.result.out, made.result.lse, {}, local.stream()));
  for (Part& part : parts_) spare_.push_back(std::move(part));
  parts_.clear();
  parts_.push_back(std::move(made));
  return {};
}

Result<PartialResult> Partials::next(Local& local, std::int64_t first_key) {
  if (parts_.size() >= kKept && !in_order_) FLASHCORE_RETURN_IF_ERROR(merge_kept(local));
  Part part;
  FLASHCORE_RETURN_IF_ERROR(make(local, first_key, part));
  parts_.push_back(std::move(part));
  return parts_.back().result;
}

Status Partials::finish(Local& local, const TensorView& sinks) {
  if (parts_.empty()) return error(StatusCode::internal, "a span of queries has no partial result");
  std::stable_sort(parts_.begin(), parts_.end(),
                   [](const Part& a, const Part& b) { return a.first_key < b.first_key; });
  std::vector<PartialResult> results;
  for (const Part& part : parts_) results.push_back(part.result);
  return merge(results, out_, lse_, sinks, local.stream());
}

}  // namespace flashcore::distributed
