#include "support/to_c.h"

#include <algorithm>
#include <iterator>

namespace flashcore::test {

flashcore_dtype c_dtype(DType dtype) {
  const auto bits = static_cast<std::uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case DType::f64:
    case DType::f32:
    case DType::f16: return {FLASHCORE_FLOAT, bits, 1};
    case DType::bf16: return {FLASHCORE_BFLOAT, bits, 1};
    case DType::i32: return {FLASHCORE_INT, bits, 1};
    case DType::boolean: return {FLASHCORE_BOOL, bits, 1};
    case DType::e4m3: return {FLASHCORE_FLOAT8_E4M3, bits, 1};
    case DType::e5m2: return {FLASHCORE_FLOAT8_E5M2, bits, 1};
    case DType::int8: return {FLASHCORE_INT, bits, 1};
    case DType::u8: return {FLASHCORE_UINT, bits, 1};
    case DType::none: break;
  }
  return {0, 0, 0};
}

flashcore_device c_device(Device device) {
  return {device.type == DeviceType::cpu ? FLASHCORE_CPU : FLASHCORE_CUDA, device.index};
}

void CTensor::set(const TensorView& view) {
  tensor = {view.data, c_device(view.device), view.rank, c_dtype(view.dtype), shape, strides, 0};
  std::copy(view.shape, view.shape + TensorView::kMaxRank, shape);
  std::copy(view.strides, view.strides + TensorView::kMaxRank, strides);
}

CCall::CCall(const Tensors& t, const Options& o) {
  flashcore_params_init(&params, sizeof params);
  const struct {
    const TensorView& view;
    const flashcore_tensor*& field;
  } all[] = {
#define FLASHCORE_TENSOR(field, name, shape, type, role, word, doc) {t.name, params.field},
#include "api/options.def"
  };
  for (std::size_t i = 0; i < std::size(all); ++i) {
    if (all[i].view.rank == 0) continue;
    tensors[i].set(all[i].view);
    all[i].field = &tensors[i].tensor;
  }
#define FLASHCORE_SET_flag(name) params.name = o.name ? 1 : 0;
#define FLASHCORE_SET_choice(name) params.name = static_cast<std::int32_t>(o.name);
#define FLASHCORE_SET_optional_f64(name)          \
  params.has_##name = o.name.has_value() ? 1 : 0; \
  params.name = o.name.value_or(0.0);
#define FLASHCORE_SET_window(name) params.name = o.name;
#define FLASHCORE_SET_i64(name) params.name = o.name;
#define FLASHCORE_SET_i32(name) params.name = o.name;
#define FLASHCORE_SET_f64(name) params.name = o.name;
#define FLASHCORE_SET_text(name) params.name = o.name;
#define FLASHCORE_OPTION(name, type, initial, least, wanted, role, word, doc) \
  FLASHCORE_SET_##type(name)
#include "api/options.def"
}

}  // namespace flashcore::test
