#include "support/tensor.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "reference/oracle.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {

Tensor::Tensor(DType dtype, const Shape& shape, MemoryLayout layout) {
  view_.dtype = dtype;
  view_.rank = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view_.shape);
  std::vector<int> order(shape.size());  // axes from slowest to fastest
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  if (layout == MemoryLayout::rows_first && order.size() >= 3) {
    std::swap(order[order.size() - 3], order[order.size() - 2]);
  }
  std::int64_t stride = layout == MemoryLayout::strided_columns ? 2 : 1;
  std::int64_t reach = 1;
  for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
    view_.strides[*axis] = stride;
    reach += std::max<std::int64_t>(view_.shape[*axis] - 1, 0) * stride;
    stride *= std::max<std::int64_t>(view_.shape[*axis], 1);
    if (layout == MemoryLayout::padded) stride += 3;
  }
  const auto size = static_cast<std::size_t>(size_of(dtype));
  if (layout == MemoryLayout::misaligned) first_byte_ = size;
  bytes_.assign(first_byte_ + static_cast<std::size_t>(reach) * size, std::byte{0xff});
}

TensorView Tensor::view() const {
  TensorView view = view_;
  if (given()) view.data = const_cast<std::byte*>(bytes_.data()) + first_byte_;
  return view;
}

std::int64_t Tensor::offset(const Shape& index) const {
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < index.size(); ++i) offset += index[i] * view_.strides[i];
  return offset;
}

double Tensor::at(const Shape& index) const {
  return reference::element(view().data, dtype(), offset(index));
}

void Tensor::set(const Shape& index, double value) {
  verify::store(view().data, dtype(), offset(index), value);
}

std::vector<double> Tensor::values() const {
  std::vector<double> values;
  const void* data = view().data;
  verify::for_each_element(
      view_, [&](std::int64_t at) { values.push_back(reference::element(data, dtype(), at)); });
  return values;
}

std::vector<std::uint64_t> Tensor::bits() const {
  std::vector<std::uint64_t> all;
  const auto size = static_cast<std::size_t>(size_of(dtype()));
  verify::for_each_element(view_, [&](std::int64_t at) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, bytes_.data() + first_byte_ + static_cast<std::size_t>(at) * size, size);
    all.push_back(bits);
  });
  return all;
}

void Tensor::set_bits(const std::vector<std::uint64_t>& bits) {
  const auto size = static_cast<std::size_t>(size_of(dtype()));
  auto next = bits.begin();
  verify::for_each_element(view_, [&](std::int64_t at) {
    std::memcpy(bytes_.data() + first_byte_ + static_cast<std::size_t>(at) * size, &*next++, size);
  });
}

void Tensor::fill(double value) {
  void* data = view().data;
  verify::for_each_element(view_,
                           [&](std::int64_t at) { verify::store(data, dtype(), at, value); });
}

void Tensor::fill_bits(std::uint64_t bits) {
  const auto size = static_cast<std::size_t>(size_of(dtype()));
  verify::for_each_element(view_, [&](std::int64_t at) {
    std::memcpy(bytes_.data() + first_byte_ + static_cast<std::size_t>(at) * size, &bits, size);
  });
}

Tensor tensor_of(DType dtype, const Shape& shape, const std::vector<double>& values) {
  Tensor tensor(dtype, shape);
  for (std::size_t i = 0; i < values.size(); ++i) {
    verify::store(tensor.view().data, dtype, static_cast<std::int64_t>(i), values[i]);
  }
  return tensor;
}

Tensor ints(const std::vector<std::int64_t>& values) {
  return tensor_of(DType::i32, {static_cast<std::int64_t>(values.size())},
                   {values.begin(), values.end()});
}

Tensor rearranged(const Tensor& tensor, MemoryLayout layout) {
  if (!tensor.given()) return {};
  Tensor result(tensor.dtype(), tensor.shape(), layout);
  result.set_bits(tensor.bits());
  return result;
}

Tensor take(const Tensor& tensor, int axis, const std::vector<std::int64_t>& indices) {
  Shape shape = tensor.shape();
  const auto along = static_cast<std::size_t>(axis);
  shape[along] = static_cast<std::int64_t>(indices.size());
  Tensor result(tensor.dtype(), shape);
  const TensorView from = tensor.view(), to = result.view();
  const auto size = static_cast<std::size_t>(size_of(tensor.dtype()));
  TensorView one = from;  // the elements with one index along the axis
  one.shape[axis] = 1;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    std::vector<std::int64_t> sources, targets;
    verify::for_each_element(one, [&](std::int64_t at) { sources.push_back(at); });
    TensorView slice = to;
    slice.shape[axis] = 1;
    verify::for_each_element(slice, [&](std::int64_t at) { targets.push_back(at); });
    for (std::size_t n = 0; n < sources.size(); ++n) {
      const std::int64_t source = sources[n] + indices[i] * from.strides[axis];
      const std::int64_t target = targets[n] + static_cast<std::int64_t>(i) * to.strides[axis];
      std::memcpy(static_cast<std::byte*>(to.data) + static_cast<std::size_t>(target) * size,
                  static_cast<std::byte*>(from.data) + static_cast<std::size_t>(source) * size,
                  size);
    }
  }
  return result;
}

std::vector<std::int64_t> range(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> indices;
  for (std::int64_t i = begin; i < end; ++i) indices.push_back(i);
  return indices;
}

Tensor converted(const Tensor& tensor, DType dtype) {
  return tensor_of(dtype, tensor.shape(), tensor.values());
}

std::string difference(const Tensor& a, const Tensor& b) {
  char text[160];
  if (a.dtype() != b.dtype() || a.shape() != b.shape()) return "type or shape differs";
  const auto bits_a = a.bits(), bits_b = b.bits();
  for (std::size_t i = 0; i < bits_a.size(); ++i) {
    if (bits_a[i] == bits_b[i]) continue;
    std::snprintf(text, sizeof text, "element %zu of %zu: %.17g (%#llx) and %.17g (%#llx)", i,
                  bits_a.size(), a.values()[i], static_cast<unsigned long long>(bits_a[i]),
                  b.values()[i], static_cast<unsigned long long>(bits_b[i]));
    return text;
  }
  return {};
}

}  // namespace flashcore::test
