#include "support/to_c.h"

#include <algorithm>

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
  const TensorView* views[] = {&t.q,
                               &t.k,
                               &t.v,
                               &t.out,
                               &t.lse,
                               &t.bias,
                               &t.mask,
                               &t.alibi_slopes,
                               &t.sinks,
                               &t.cu_seqlens_q,
                               &t.cu_seqlens_k,
                               &t.seqused_k,
                               &t.block_table,
                               &t.q_start,
                               &t.k_start,
                               &t.q_scale,
                               &t.k_scale,
                               &t.v_scale};
  const flashcore_tensor** slots[] = {&params.q,
                                      &params.k,
                                      &params.v,
                                      &params.out,
                                      &params.lse,
                                      &params.bias,
                                      &params.mask,
                                      &params.alibi_slopes,
                                      &params.sinks,
                                      &params.cu_seqlens_q,
                                      &params.cu_seqlens_k,
                                      &params.used_k,
                                      &params.block_table,
                                      &params.q_start,
                                      &params.k_start,
                                      &params.q_scale,
                                      &params.k_scale,
                                      &params.v_scale};
  for (std::size_t i = 0; i < std::size(views); ++i) {
    if (views[i]->rank == 0) continue;
    tensors[i].set(*views[i]);
    *slots[i] = &tensors[i].tensor;
  }
  params.window_left = o.window_left;
  params.window_right = o.window_right;
  params.max_q_len = o.max_q_len;
  params.max_kv_len = o.max_kv_len;
  params.has_scale = o.scale.has_value() ? 1 : 0;
  params.scale = o.scale.value_or(0.0);
  params.softcap = o.softcap;
  params.causal = o.causal ? 1 : 0;
  params.partial = o.partial ? 1 : 0;
  params.checked = o.checked ? 1 : 0;
  params.num_splits = o.num_splits;
  params.reproducibility = static_cast<std::int32_t>(o.reproducibility);
  params.kernel = o.kernel;
  params.q_scale_block = o.q_scale_block;
  params.kv_scale_block = o.kv_scale_block;
}

}  // namespace flashcore::test
