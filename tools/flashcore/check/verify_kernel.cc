// FlashCore kernels as the verified implementation.
#include <cstring>

#include "device_memory.h"
#include "flashcore/backward.h"
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
  if (t.dtype.bits == 8) return t.dtype.code == FLASHCORE_INT ? DType::int8 : DType::u8;
  return t.dtype.bits == 64 ? DType::f64 : t.dtype.bits == 32 ? DType::f32 : DType::f16;
}

class OwnKernels final : public KernelTarget {
 public:
  explicit OwnKernels(const Target& target) : target_(target) {}

  void choose(const KernelInfo& kernel) override {
    backward_ = kernel.op == Operation::bwd;
    kernel_ = kernel.id;
  }

  std::byte* block(std::size_t bytes) override {
    host_.assign(bytes + kAlignment, std::byte{0});
    const auto address = reinterpret_cast<std::uintptr_t>(host_.data());
    base_ = host_.data() + (kAlignment - address % kAlignment) % kAlignment;
    bytes_ = bytes;
    return base_;
  }

  std::int32_t call(const flashcore_verify_call& c, std::string* message) override {
    return status_code(run_call(target_, backward_ ? nullptr : kernel_, c, base_, bytes_), message);
  }

  bool has_backward() const override { return backward_; }
  std::int32_t call_backward(const flashcore_verify_backward_call& c,
                             std::string* message) override {
    return status_code(run_backward_call(target_, kernel_, c, base_, bytes_), message);
  }

 private:
  static constexpr std::size_t kAlignment = 256;

  static std::int32_t status_code(const Status& status, std::string* message) {
    *message = status.message();
    return static_cast<std::int32_t>(status.code());
  }

  const Target& target_;
  const char* kernel_ = nullptr;
  bool backward_ = false;
  std::vector<std::byte> host_;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

Tensors tensors_of(const flashcore_verify_call& c) {
  Tensors host;
  host.q = view_of(c.q, dtype_of(*c.q));
  host.k = view_of(c.k, dtype_of(*c.k));
  host.v = view_of(c.v, dtype_of(*c.v));
  host.out = view_of(c.out, dtype_of(*c.out));
  if (c.lse != nullptr) host.lse = view_of(c.lse, dtype_of(*c.lse));
  host.q_scale = view_of(c.q_scale, DType::f32);
  host.k_scale = view_of(c.k_scale, DType::f32);
  host.v_scale = view_of(c.v_scale, DType::f32);
  return host;
}

Options options_of(const flashcore_verify_call& c, const char* kernel) {
  Options options;
  options.causal = c.causal != 0;
  options.window_left = c.window_left;
  options.window_right = c.window_right;
  if (c.has_scale != 0) options.scale = c.scale;
  options.softcap = c.softcap;
  options.num_splits = c.num_splits;
  options.kernel = kernel;
  return options;
}

/// Runs a planned call between the copies of its block to the device and back.
template <typename Run>
Status run_on(const Target& target, const DeviceMemory& block, std::byte* base, std::size_t bytes,
              std::size_t workspace_bytes, Run run) {
  const Backend& backend = *target.backend;
  const int index = target.device.index;
  const DeviceMemory space(backend, target.device, workspace_bytes);
  const Workspace workspace{space.data(), workspace_bytes, target.device};
  Status status = backend.upload(block.data(), base, bytes, index);
  if (status.ok()) status = workspace_init(workspace);
  if (status.ok()) status = run(workspace);
  if (status.ok()) status = workspace_status(workspace);
  if (status.ok()) status = backend.download(base, block.data(), bytes, index);
  return status;
}

}  // namespace

Status run_call(const Target& target, const char* kernel, const flashcore_verify_call& c,
                std::byte* base, std::size_t bytes) {
  const DeviceMemory block(*target.backend, target.device, bytes);
  const Tensors tensors = verify::moved(tensors_of(c), base, block.data(), target.device);
  const Result<Problem> problem = make_problem(tensors, options_of(c, kernel));
  if (!problem.ok()) return problem.status();
  const Result<Plan> plan = make_plan(*problem, target.plan_for);
  if (!plan.ok()) return plan.status();
  return run_on(target, block, base, bytes, plan->workspace_bytes, [&](const Workspace& workspace) {
    return flashcore::run(*plan, tensors, workspace);
  });
}

Status run_backward_call(const Target& target, const char* kernel,
                         const flashcore_verify_backward_call& c, std::byte* base,
                         std::size_t bytes) {
  const DeviceMemory block(*target.backend, target.device, bytes);
  const Tensors tensors = verify::moved(tensors_of(*c.forward), base, block.data(), target.device);
  const auto gradient = [&](const flashcore_tensor* t) {
    TensorView view;
    if (t == nullptr) return view;
    view = view_of(t, dtype_of(*t));
    view.data = block.data() + (static_cast<std::byte*>(view.data) - base);
    view.device = target.device;
    return view;
  };
  const Gradients gradients{
      gradient(c.dout), gradient(c.dlse), gradient(c.dq), gradient(c.dk), gradient(c.dv), {}, {}};
  const Result<BackwardProblem> problem =
      make_backward_problem(tensors, gradients, options_of(*c.forward, kernel));
  if (!problem.ok()) return problem.status();
  const Result<BackwardPlan> plan = make_backward_plan(*problem, target.plan_for);
  if (!plan.ok()) return plan.status();
  return run_on(target, block, base, bytes, plan->workspace_bytes, [&](const Workspace& workspace) {
    return run_backward(*plan, tensors, gradients, workspace);
  });
}

std::unique_ptr<KernelTarget> kernels_here(const Target& target) {
  return std::make_unique<OwnKernels>(target);
}

}  // namespace flashcore::tool
