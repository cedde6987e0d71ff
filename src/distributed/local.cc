#include "distributed/local.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "distributed/sums.h"

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

std::byte* Arena::take(std::int64_t bytes) noexcept {
  constexpr std::size_t kAlignment = 256;
  const std::size_t begin = used_;
  used_ += (static_cast<std::size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  const bool fits = workspace_.data != nullptr && used_ <= workspace_.bytes;
  return fits ? static_cast<std::byte*>(workspace_.data) + begin : nullptr;
}

Buffer::~Buffer() {
  if (backend_ != nullptr) backend_->release(data_, device_.index);
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

Status Buffer::reserve(Arena& arena, std::int64_t bytes) {
  if (bytes_ >= static_cast<std::size_t>(bytes) && bytes_ > 0) return {};
  Buffer piece;
  piece.bytes_ = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  piece.data_ = arena.take(static_cast<std::int64_t>(piece.bytes_));
  swap(piece);
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

std::int64_t Starts::bytes() const noexcept {
  return static_cast<std::int64_t>(host_.size() * sizeof host_[0]);
}

Status Starts::upload(const Backend& backend, Device device, std::int64_t batch) {
  device_ = device;
  batch_ = batch;
  if (host_.empty()) return {};
  return backend.upload(memory_.data(), host_.data(), host_.size() * sizeof host_[0], device.index);
}

TensorView Starts::view(std::size_t entry) const noexcept {
  TensorView one =
      flashcore::view(memory_.data() + entry * sizeof host_[0], DType::i32, {batch_}, device_);
  one.strides[0] = 0;  // the same position in every sequence
  return one;
}

Result<Local> Local::make(Device device, Stream stream, const Options& options, Arena* arena) {
  const Result<const Backend*> backend = backend_for(device.type);
  if (!backend.ok()) return backend.status();
  const Result<DeviceInfo> info = flashcore::device_info(device);
  if (!info.ok()) return info.status();
  Local local;
  local.backend_ = *backend;
  local.arena_ = arena;
  local.device_ = device;
  local.info_ = *info;
  local.stream_ = stream;
  local.options_ = options;
  return local;
}

Status Local::reserve(Buffer& buffer, std::int64_t bytes) const {
  return arena_ == nullptr ? buffer.reserve(*backend_, device_, bytes)
                           : buffer.reserve(*arena_, bytes);
}

Status Local::upload(Starts& starts, std::int64_t batch) const {
  FLASHCORE_RETURN_IF_ERROR(reserve(starts));
  return starts.upload(*backend_, device_, batch);
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

Status Local::add(const TensorView& to, const TensorView& from) const {
  const std::int64_t count = to.shape[2] * to.shape[3];
  if (count == 0) return {};
  std::vector<std::byte> sum, term;  // on a GPU, sums are made in host memory
  const auto bytes = static_cast<std::size_t>(count * 4);
  if (device_.type != DeviceType::cpu) sum.resize(bytes), term.resize(bytes);
  for (std::int64_t b = 0; b < to.shape[0]; ++b) {
    for (std::int64_t h = 0; h < to.shape[1]; ++h) {
      std::byte* const sum_at = address(to, b, h);
      const std::byte* const term_at = address(from, b, h);
      if (sum.empty()) {
        add_floats(sum_at, term_at, count);
        continue;
      }
      FLASHCORE_RETURN_IF_ERROR(backend_->download(sum.data(), sum_at, bytes, device_.index));
      FLASHCORE_RETURN_IF_ERROR(backend_->download(term.data(), term_at, bytes, device_.index));
      add_floats(sum.data(), term.data(), count);
      FLASHCORE_RETURN_IF_ERROR(backend_->upload(sum_at, sum.data(), bytes, device_.index));
    }
  }
  return {};
}

Status Local::store(const TensorView& to, const TensorView& sums) const {
  if (to.dtype == DType::f32 || bytes_of(sums) == 0) return copy(to, sums);
  const auto bytes = static_cast<std::size_t>(bytes_of(sums));
  const auto count = static_cast<std::int64_t>(bytes / 4);
  auto* const data = static_cast<std::byte*>(sums.data);
  if (device_.type == DeviceType::cpu) {
    round_floats(data, count, to.dtype);
  } else {
    std::vector<std::byte> host(bytes);
    FLASHCORE_RETURN_IF_ERROR(backend_->download(host.data(), data, bytes, device_.index));
    round_floats(host.data(), count, to.dtype);
    FLASHCORE_RETURN_IF_ERROR(backend_->upload(data, host.data(), bytes / 2, device_.index));
  }
  return copy(to,
              compact(data, to.dtype, to.shape[0], to.shape[1], to.shape[2], to.shape[3], device_));
}

Status Local::zero(std::byte* data, std::int64_t bytes) const {
  return backend_->zero(data, static_cast<std::size_t>(bytes), device_, stream_);
}

Status Local::move(const TensorView& to, const Spans& to_rows, const TensorView& from,
                   const Spans& from_rows, Write how) const {
  for (const Span a : from_rows) {
    for (const Span b : to_rows) {
      const Span both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
      if (both.size() <= 0) continue;
      const TensorView target = slice(to, 2, offset_in(to_rows, both.begin), both.size());
      const TensorView source = slice(from, 2, offset_in(from_rows, both.begin), both.size());
      FLASHCORE_RETURN_IF_ERROR(how == Write::copy ? copy(target, source) : add(target, source));
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

Status Local::differentiate(const Tensors& tensors, const Gradients& gradients, bool all_keys,
                            const Buffer& workspace) const {
  const Result<BackwardProblem> problem = make_backward_problem(tensors, gradients, options_);
  if (!problem.ok()) return problem.status();
  const Result<BackwardPlan> made = make_backward_plan(*problem, info_);
  if (!made.ok()) return made.status();
  BackwardPlan plan = *made;
  plan.exact_stats = plan.exact_stats && all_keys;
  return run_backward(plan, tensors, gradients,
                      {workspace.data(), workspace.bytes(), device_, nullptr}, stream_);
}

Result<std::int64_t> Local::workspace_of(const Job& job, std::int64_t q_rows,
                                         std::int64_t k_rows) const {
  const Result<Problem> forward =
      dense_problem(job.dtype, job.batch, job.q_heads, job.kv_heads, q_rows, k_rows, job.head_dim,
                    job.v_dim, options_, device_);
  if (!forward.ok()) return forward.status();
  BackwardProblem problem;
  problem.forward = *forward;
  problem.dout = forward->out;
  problem.dq = forward->q;
  problem.dk = forward->k;
  problem.dv = forward->v;
  Result<BackwardPlan> plan = make_backward_plan(problem, info_);
  if (!plan.ok()) return plan.status();
  std::size_t most = workspace_bytes(*plan);
  // The tensors of the call may have positions, f32 gradients or other strides, and so another
  // kernel than compact ones.
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op != Operation::bwd || kernel.device != device_.type) continue;
    problem.forward.options.kernel = kernel.id;
    plan = make_backward_plan(problem, info_);
    if (plan.ok()) most = std::max(most, workspace_bytes(*plan));
  }
  return static_cast<std::int64_t>(most);
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
