#include "verify/inputs/call.h"

#include <cstring>

#include "verify/inputs/case_memory.h"

namespace flashcore::verify {
namespace {

constexpr std::size_t kAlignment = 256;

}  // namespace

std::vector<TensorView*> views_of(Tensors& t) {
#define FLASHCORE_VIEW_main(name) &t.name,
#define FLASHCORE_VIEW_optional(name) &t.name,
#define FLASHCORE_VIEW_offsets(name) &t.name,
#define FLASHCORE_VIEW_scale(name) &t.name,
#define FLASHCORE_VIEW_block_mask(name) &t.name,
#define FLASHCORE_VIEW_output(name)
#define FLASHCORE_TENSOR(field, name, shape, type, role, word, doc) FLASHCORE_VIEW_##role(name)
  return {
#include "api/options.def"
      &t.out, &t.lse};
}

Tensors moved(Tensors tensors, const void* from, void* to, Device device) {
  for (TensorView* view : views_of(tensors)) {
    if (!view->given()) continue;
    view->data = static_cast<std::byte*>(to) +
                 (static_cast<const std::byte*>(view->data) - static_cast<const std::byte*>(from));
    view->device = device;
  }
  return tensors;
}

HostCall::HostCall(const HostCall& other) : bytes(other.bytes), options(other.options) {
  tensors = other.at(bytes.data(), Device{});
}

Tensors HostCall::at(void* base, Device device) const {
  return moved(tensors, bytes.data(), base, device);
}

void HostCall::place(TensorView Tensors::*tensor, DType dtype,
                     const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  const std::size_t offset = (bytes.size() + kAlignment - 1) / kAlignment * kAlignment;
  const auto size = static_cast<std::size_t>(size_of(dtype));
  std::vector<std::byte> grown(offset + (static_cast<std::size_t>(count) + 1) * size,
                               std::byte{0xff});
  if (!bytes.empty()) std::memcpy(grown.data(), bytes.data(), bytes.size());
  tensors = at(grown.data(), Device{});
  bytes = std::move(grown);  // a move does not change the address

  TensorView view;
  view.data = bytes.data() + offset;
  view.dtype = dtype;
  view.rank = static_cast<std::int32_t>(shape.size());
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    view.shape[axis] = shape[static_cast<std::size_t>(axis)];
    view.strides[axis] = stride;
    stride *= view.shape[axis];
  }
  const std::uint64_t bits = poison(dtype);
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(bytes.data() + offset + static_cast<std::size_t>(i) * size, &bits, size);
  }
  tensors.*tensor = view;
}

HostCall random_call(const CaseSpec& spec) {
  const CaseMemory memory(spec);
  HostCall made;
  made.bytes = memory.bytes();
  made.tensors = memory.at(made.bytes.data(), Device{});
  made.options = memory.spec().options;
  return made;
}

}  // namespace flashcore::verify
