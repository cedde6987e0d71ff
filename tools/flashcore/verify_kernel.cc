// Our own kernels as the verifier's subject.
#include <cstring>

#include "device_memory.h"
#include "verify_target.h"

namespace flashcore::tool {
namespace {

TensorView view_of(const flashcore_tensor* t, DType dtype) {
  TensorView view;
  if (t == nullptr) return view;
  view.data = t->data;
  view.dtype = dtype;
  view.rank = t->ndim;
  std::copy(t->shape, t->shape + t->ndim, view.shape);
  std::copy(t->strides, t->strides + t->ndim, view.strides);
  return view;
}

DType dtype_of(const flashcore_tensor& t) {
  if (t.dtype.code == FLASHCORE_BFLOAT) return DType::bf16;
  if (t.dtype.code == FLASHCORE_FLOAT8_E4M3) return DType::e4m3;
  if (t.dtype.code == FLASHCORE_FLOAT8_E5M2) return DType::e5m2;
  if (t.dtype.bits == 8) return t.dtype.code == FLASHCORE_INT ? DType::int8 : DType::byte;
  return t.dtype.bits == 64 ? DType::f64 : t.dtype.bits == 32 ? DType::f32 : DType::f16;
}

class KernelTarget final : public verify::CallTarget {
 public:
  KernelTarget(const Target& target, const char* kernel) : target_(target), kernel_(kernel) {}

  std::byte* block(std::size_t bytes) override {
    host_.assign(bytes + kAlignment, std::byte{0});
    const auto address = reinterpret_cast<std::uintptr_t>(host_.data());
    base_ = host_.data() + (kAlignment - address % kAlignment) % kAlignment;
    bytes_ = bytes;
    return base_;
  }

  std::int32_t call(const flashcore_verify_call& c, std::string* message) override {
    const Status status = run(c);
    *message = status.message();
    return static_cast<std::int32_t>(status.code());
  }

 private:
  static constexpr std::size_t kAlignment = 256;

  Status run(const flashcore_verify_call& c) {
    Tensors host;
    host.q = view_of(c.q, dtype_of(*c.q));
    host.k = view_of(c.k, dtype_of(*c.k));
    host.v = view_of(c.v, dtype_of(*c.v));
    host.out = view_of(c.out, dtype_of(*c.out));
    if (c.lse != nullptr) host.lse = view_of(c.lse, dtype_of(*c.lse));
    host.q_scale = view_of(c.q_scale, DType::f32);
    host.k_scale = view_of(c.k_scale, DType::f32);
    host.v_scale = view_of(c.v_scale, DType::f32);
    Options options;
    options.causal = c.causal != 0;
    options.window_left = c.window_left;
    options.window_right = c.window_right;
    if (c.has_scale != 0) options.scale = c.scale;
    options.softcap = c.softcap;
    options.num_splits = c.num_splits;
    options.kernel = kernel_;
    const Backend& backend = *target_.backend;
    const int index = target_.device.index;
    const DeviceMemory block(backend, target_.device, bytes_);
    const Tensors tensors = verify::moved(host, base_, block.data(), target_.device);
    const Result<Problem> problem = make_problem(tensors, options);
    if (!problem.ok()) return problem.status();
    const Result<Plan> plan = make_plan(*problem, target_.plan_for);
    if (!plan.ok()) return plan.status();
    const DeviceMemory space(backend, target_.device, plan->workspace_bytes);
    const Workspace workspace{space.data(), plan->workspace_bytes, target_.device};
    Status status = backend.upload(block.data(), base_, bytes_, index);
    if (status.ok()) status = workspace_init(workspace);
    if (status.ok()) status = flashcore::run(*plan, tensors, workspace);
    if (status.ok()) status = workspace_status(workspace);
    if (status.ok()) status = backend.download(base_, block.data(), bytes_, index);
    return status;
  }

  const Target& target_;
  const char* kernel_;
  std::vector<std::byte> host_;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace

std::unique_ptr<verify::CallTarget> kernel_target(const Target& target, const char* kernel) {
  return std::make_unique<KernelTarget>(target, kernel);
}

}  // namespace flashcore::tool
