#include "api/validate/tensor.h"

#include "api/validate/overlap.h"
#include "core/error.h"

namespace flashcore {
namespace {

constexpr std::int64_t kMaxExtent = INT32_MAX;
// Exceeds any address space. Sums of a few such distances fit 64 bits.
constexpr std::int64_t kMaxReach = std::int64_t{1} << 60;

using ll = long long;

bool has_elements(const TensorView& t) noexcept {
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return false;
  }
  return true;
}

}  // namespace

bool is_float(DType dtype) noexcept {
  return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

Status check_view(const char* name, const TensorView& t) noexcept {
  if (t.rank < 1 || t.rank > TensorView::kMaxRank) {
    return invalid_argument("%s: rank is %d; at most %d is possible", name, t.rank,
                            TensorView::kMaxRank);
  }
  const std::int64_t size = size_of(t.dtype);
  std::int64_t reach = 0;  // bytes from the first to the last element
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] < 0 || t.shape[i] > kMaxExtent) {
      return invalid_argument("%s: extent %d is %lld; it must be between 0 and %lld", name, i,
                              ll{t.shape[i]}, ll{kMaxExtent});
    }
    if (t.shape[i] <= 1) continue;  // the stride is never used
    if (t.strides[i] < 0) {
      return invalid_argument(
          "%s: stride %d is %lld; negative strides are not supported, copy the "
          "tensor or reverse the order of its rows",
          name, i, ll{t.strides[i]});
    }
    std::int64_t step;
    if (__builtin_mul_overflow(t.strides[i], (t.shape[i] - 1) * size, &step) ||
        __builtin_add_overflow(reach, step, &reach) || reach > kMaxReach) {
      return invalid_argument("%s: stride %d is %lld; the tensor would not fit the address space",
                              name, i, ll{t.strides[i]});
    }
  }
  return {};
}

Status check_rank(const char* name, const TensorView& t, int rank, const char* meaning) noexcept {
  if (t.rank == rank) return check_view(name, t);
  if (t.rank == 0) return invalid_argument("%s: not given; wanted %s", name, meaning);
  return invalid_argument("%s: rank is %d; wanted %d %s", name, t.rank, rank, meaning);
}

Status extent_error(const char* name, const char* what, std::int64_t got, std::int64_t wanted,
                    const char* whose) noexcept {
  return invalid_argument("%s: %s is %lld, %s has %lld; they must match", name, what, ll{got},
                          whose, ll{wanted});
}

Status dtype_error(const char* name, DType got, DType wanted, DType alternative) noexcept {
  if (wanted == alternative) {
    return invalid_argument("%s: dtype is %s; wanted %s", name, to_string(got), to_string(wanted));
  }
  return invalid_argument("%s: dtype is %s; wanted %s or %s", name, to_string(got),
                          to_string(wanted), to_string(alternative));
}

Status device_error(const char* name, Device got, Device wanted) noexcept {
  return invalid_argument("%s: is on %s:%d, q is on %s:%d; all tensors must be on one device", name,
                          to_string(got.type), got.index, to_string(wanted.type), wanted.index);
}

Status pointer_error(const char* name, const TensorView& t) noexcept {
  if (!t.given() || !has_elements(t)) return {};
  if (t.data == nullptr) return invalid_argument("%s: the pointer is null", name);
  return invalid_argument("%s: the pointer %p is not aligned to its %s elements (%lld bytes)", name,
                          t.data, to_string(t.dtype), ll{size_of(t.dtype)});
}

Status check_outputs(std::span<const NamedView> outputs,
                     std::span<const NamedView> inputs) noexcept {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& [name, out] = outputs[i];
    if (!out->given()) continue;
    const ByteRange bytes = byte_range(*out);
    const auto overlaps = [&](const TensorView& other) {
      return !are_disjoint(bytes, byte_range(other)) && share_memory(*out, other);
    };
    if (overlaps_itself(*out)) {
      return invalid_argument("%s: its strides make elements overlap; an output must not", name);
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (overlaps(*outputs[j].view)) {
        return invalid_argument("%s: shares memory with %s", name, outputs[j].name);
      }
    }
    for (const auto& [input_name, input] : inputs) {
      if (input->given() && overlaps(*input)) {
        return invalid_argument("%s: shares memory with the input %s", name, input_name);
      }
    }
  }
  return {};
}

}  // namespace flashcore
