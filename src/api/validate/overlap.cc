#include "api/validate/overlap.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace flashcore {
namespace {

struct Axis {
  std::int64_t count;  // indices 0 … count - 1
  std::int64_t step;   // bytes, may be negative
};

/// Collects the axes with more than one index and a stride other than 0. Returns their number; -1
/// if the tensor has no elements.
int moving_axes(const TensorView& tensor, int direction, Axis* axes) noexcept {
  int used = 0;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return -1;
    if (tensor.shape[i] > 1 && tensor.strides[i] != 0) {
      axes[used++] = {tensor.shape[i], direction * tensor.strides[i] * size_of(tensor.dtype)};
    }
  }
  return used;
}

void sort_by_step(Axis* axes, int count) noexcept {
  for (int i = 1; i < count; ++i) {
    for (int j = i; j > 0 && std::abs(axes[j].step) > std::abs(axes[j - 1].step); --j) {
      std::swap(axes[j], axes[j - 1]);
    }
  }
}

std::int64_t floor_div(std::int64_t a, std::int64_t b) noexcept {  // b > 0
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}

/// True if target is Σ index · step + slack for some indices in range and a slack in [low, high].
/// The axes are sorted by decreasing step, so that few indices can reach the target.
bool reachable(std::int64_t target, const Axis* axes, int count, std::int64_t low,
               std::int64_t high, int& budget) noexcept {
  if (budget-- <= 0) return true;
  if (count == 0) return low <= target && target <= high;
  std::int64_t rest_low = low, rest_high = high;
  for (int i = 1; i < count; ++i) {
    const std::int64_t reach = (axes[i].count - 1) * axes[i].step;
    (reach < 0 ? rest_low : rest_high) += reach;
  }
  // index * step must be in [target - rest_high, target - rest_low].
  std::int64_t from = target - rest_high, to = target - rest_low;
  const std::int64_t size = std::abs(axes[0].step);
  if (axes[0].step < 0) {
    const std::int64_t swapped = -from;
    from = -to;
    to = swapped;
  }
  const std::int64_t first = std::max<std::int64_t>(0, floor_div(from + size - 1, size));
  const std::int64_t last = std::min(axes[0].count - 1, floor_div(to, size));
  for (std::int64_t index = first; index <= last; ++index) {
    if (reachable(target - index * axes[0].step, axes + 1, count - 1, low, high, budget)) {
      return true;
    }
  }
  return false;
}

/// True if each axis steps over all elements of the axes after it. True for compact tensors and
/// their slices, so that they need no sorting.
bool has_nested_strides(const TensorView& tensor) noexcept {
  std::int64_t inner_extent = 1;  // elements
  for (int i = tensor.rank - 1; i >= 0; --i) {
    if (tensor.shape[i] <= 1) continue;
    if (tensor.strides[i] < inner_extent) return false;
    inner_extent += (tensor.shape[i] - 1) * tensor.strides[i];
  }
  return true;
}

}  // namespace

bool overlaps_itself(const TensorView& tensor) noexcept {
  if (has_nested_strides(tensor)) return false;
  Axis axes[TensorView::kMaxRank];
  const int count = moving_axes(tensor, 1, axes);
  if (count < 0) return false;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] == 0) return true;
  }
  sort_by_step(axes, count);
  std::int64_t inner_extent = size_of(tensor.dtype);
  for (int i = count - 1; i >= 0; --i) {
    if (axes[i].step < inner_extent) return true;
    inner_extent += (axes[i].count - 1) * axes[i].step;
  }
  return false;
}

bool share_memory(const TensorView& a, const TensorView& b) noexcept {
  if (are_disjoint(byte_range(a), byte_range(b))) return false;
  // Finds indices i and j so that a + Σ i·step_a + [0, size_a) overlaps
  // b + Σ j·step_b + [0, size_b).
  Axis axes[2 * TensorView::kMaxRank];
  const int of_a = moving_axes(a, 1, axes);
  const int of_b = moving_axes(b, -1, axes + of_a);
  int count = of_a + of_b;
  std::int64_t target =
      reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
  const std::int64_t low = 1 - size_of(b.dtype), high = size_of(a.dtype) - 1;

  // Merges axes of equal step of both tensors to one axis over i - j. Without that, the search
  // would try all pairs.
  sort_by_step(axes, count);
  for (int i = 0; i + 1 < count; ++i) {
    if (axes[i].step != -axes[i + 1].step) continue;
    const Axis& negative = axes[i].step < 0 ? axes[i] : axes[i + 1];
    target -= (negative.count - 1) * negative.step;
    axes[i] = {axes[i].count + axes[i + 1].count - 1, std::abs(negative.step)};
    std::copy(axes + i + 2, axes + count, axes + i + 1);
    --count;
  }
  int budget = 4096;
  return reachable(target, axes, count, low, high, budget);
}

}  // namespace flashcore
