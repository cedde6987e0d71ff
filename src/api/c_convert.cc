#include "api/c_convert.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <utility>

namespace flashcore {
namespace {

struct TypeWords {
  char text[48];
};

/// The usual name of any DLPack dtype: int64, complex64.
TypeWords words_of(const flashcore_dtype& d) {
  static constexpr const char* kFamilies[] = {"int",    "uint",    "float", "opaque handle",
                                              "bfloat", "complex", "bool"};
  TypeWords words{};
  char lanes[16] = "";
  if (d.lanes != 1) std::snprintf(lanes, sizeof lanes, "x%d", d.lanes);
  if (d.code < std::size(kFamilies)) {
    std::snprintf(words.text, sizeof words.text, "%s%d%s", kFamilies[d.code], d.bits, lanes);
  } else {
    std::snprintf(words.text, sizeof words.text, "DLPack's code %d of %d bits%s", d.code, d.bits,
                  lanes);
  }
  return words;
}

/// The name of the required type; null if several types are possible.
const char* wanted_type(TypeRule rule) {
  switch (rule) {
    case TypeRule::several: break;
    case TypeRule::f32: return "f32";
    case TypeRule::i32: return "i32 (int32)";
    case TypeRule::boolean: return "bool";
    case TypeRule::wide: return "f32 (f64 for f64 problems)";
  }
  return nullptr;
}

Result<DType> dtype_of(const char* name, const flashcore_dtype& d, TypeRule rule) {
  static constexpr struct {
    std::uint8_t code, bits;
    DType dtype;
  } kTypes[] = {
      {FLASHCORE_FLOAT, 64, DType::f64},       {FLASHCORE_FLOAT, 32, DType::f32},
      {FLASHCORE_FLOAT, 16, DType::f16},       {FLASHCORE_BFLOAT, 16, DType::bf16},
      {FLASHCORE_INT, 32, DType::i32},         {FLASHCORE_BOOL, 8, DType::boolean},
      {FLASHCORE_FLOAT8_E4M3, 8, DType::e4m3}, {FLASHCORE_FLOAT8_E5M2, 8, DType::e5m2},
      {FLASHCORE_INT, 8, DType::int8},         {FLASHCORE_UINT, 8, DType::u8},
  };
  for (const auto& [code, bits, dtype] : kTypes) {
    if (d.lanes != 1 || d.code != code || d.bits != bits) continue;
    // Many frameworks store booleans as bytes.
    return dtype == DType::u8 && rule == TypeRule::boolean ? DType::boolean : dtype;
  }
  const TypeWords got = words_of(d);
  if (const char* wanted = wanted_type(rule)) {
    return invalid_argument("%s: dtype is %s; wanted %s", name, got.text, wanted);
  }
  return unsupported(
      "%s: dtype is %s, which is none of f64, f32, f16, bf16, e4m3, e5m2, int8, byte (uint8)", name,
      got.text);
}

/// Views [batch, len, heads, dim] memory as [batch, heads, len, dim]. Skips varlen tensors and
/// pages, which have a fixed order of axes.
void swap_heads_and_lengths(Tensors& t) {
  const bool kv_dense = !t.cu_seqlens_k.given() && !t.block_table.given();
  for (TensorView* one : {&t.q, &t.out, kv_dense ? &t.k : nullptr, kv_dense ? &t.v : nullptr}) {
    if (one == nullptr || one->rank != 4) continue;
    std::swap(one->shape[1], one->shape[2]);
    std::swap(one->strides[1], one->strides[2]);
  }
}

Status convert_tensors(const flashcore_params& p, Tensors& t) {
  const struct {
    const char* name;
    const flashcore_tensor* from;
    TypeRule rule;
    TensorView* to;
  } all[] = {
#define FLASHCORE_TENSOR(field, name, shape, type, role, word, doc) \
  {#name, p.field, TypeRule::type, &t.name},
#include "api/options.def"
  };
  for (const auto& [name, from, rule, to] : all) {
    FLASHCORE_RETURN_IF_ERROR(convert(name, from, rule, *to));
  }
  if (p.layout == 1) swap_heads_and_lengths(t);
  return {};
}

Status check_bit(const char* name, std::int32_t value) {
  if (value == 0 || value == 1) return {};
  return invalid_argument("%s is %d; wanted 0 or 1", name, value);
}

// One converter per option type of options.def.
Status convert_flag(const char* name, std::int32_t from, bool& to) {
  to = from != 0;
  return check_bit(name, from);
}

template <typename Choice>
Status convert_choice(const char* name, std::int32_t from, Choice& to) {
  to = static_cast<Choice>(from);
  return check_bit(name, from);
}

template <typename T>
Status convert_value(T from, T& to) {
  to = from;
  return {};
}

Status convert_options(const flashcore_params& p, Options& o) {
  FLASHCORE_RETURN_IF_ERROR(check_bit("has_scale", p.has_scale));
  FLASHCORE_RETURN_IF_ERROR(check_bit("layout", p.layout));
#define FLASHCORE_CONVERT_flag(name) convert_flag(#name, p.name, o.name)
#define FLASHCORE_CONVERT_choice(name) convert_choice(#name, p.name, o.name)
#define FLASHCORE_CONVERT_optional_f64(name) \
  convert_value(p.has_##name != 0 ? std::optional(p.name) : std::nullopt, o.name)
#define FLASHCORE_CONVERT_window(name) convert_value(p.name, o.name)
#define FLASHCORE_CONVERT_i64(name) convert_value(p.name, o.name)
#define FLASHCORE_CONVERT_i32(name) convert_value(p.name, o.name)
#define FLASHCORE_CONVERT_f64(name) convert_value(p.name, o.name)
#define FLASHCORE_CONVERT_text(name) convert_value(p.name, o.name)
#define FLASHCORE_OPTION(name, type, initial, least, wanted, role, word, doc) \
  FLASHCORE_RETURN_IF_ERROR(FLASHCORE_CONVERT_##type(name));
#include "api/options.def"
  return {};
}

}  // namespace

Status check_struct(const char* name, std::size_t got, std::size_t known) {
  if (got == known) return {};
  return invalid_argument(
      "%s: struct_size is %zu, this library (version %s) has %zu; compile the "
      "caller against its flashcore.h",
      name, got, version(), known);
}

Result<Device> device_of(const char* name, const flashcore_device& d) {
  switch (d.device_type) {
    case FLASHCORE_CPU:
    case 3:  // kDLCUDAHost: pinned host memory
      return Device{DeviceType::cpu, 0};
    case FLASHCORE_CUDA:
    case 13:  // kDLCUDAManaged
      return Device{DeviceType::cuda, d.device_id};
    default:
      return unsupported("%s: device type is %d; wanted %d (CPU) or %d (CUDA)", name, d.device_type,
                         FLASHCORE_CPU, FLASHCORE_CUDA);
  }
}

Status convert(const char* name, const flashcore_tensor* from, TypeRule rule, TensorView& to) {
  if (from == nullptr) return {};
  if (from->ndim < 1 || from->ndim > TensorView::kMaxRank) {
    return invalid_argument("%s: ndim is %d; wanted 1 to %d", name, from->ndim,
                            TensorView::kMaxRank);
  }
  if (from->shape == nullptr) return invalid_argument("%s: shape is NULL", name);
  const Result<DType> dtype = dtype_of(name, from->dtype, rule);
  if (!dtype.ok()) return dtype.status();
  const Result<Device> device = device_of(name, from->device);
  if (!device.ok()) return device.status();
  to.dtype = *dtype;
  to.device = *device;
  to.rank = from->ndim;
  if (from->data != nullptr) {
    // Adds integers: pointer arithmetic with an arbitrary offset would be undefined.
    to.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(from->data) +
                                      static_cast<std::uintptr_t>(from->byte_offset));
  }
  std::int64_t compact = 1;
  for (int i = to.rank - 1; i >= 0; --i) {
    to.shape[i] = from->shape[i];
    to.strides[i] = from->strides != nullptr ? from->strides[i] : compact;
    // Validation rejects negative and huge extents later. The product must not overflow before.
    if (__builtin_mul_overflow(compact, std::max<std::int64_t>(to.shape[i], 1), &compact)) {
      return invalid_argument("%s: the shape overflows 64 bits", name);
    }
  }
  return {};
}

Result<CCall> convert(const flashcore_params* params) {
  CCall call;
  flashcore_params_init(&call.params, sizeof call.params);
  FLASHCORE_RETURN_IF_ERROR(copy_params(params, call.params));
  FLASHCORE_RETURN_IF_ERROR(convert_tensors(call.params, call.tensors));
  FLASHCORE_RETURN_IF_ERROR(convert_options(call.params, call.options));
  return call;
}

Status convert(const flashcore_append_params& p, AppendTensors& t) {
  FLASHCORE_RETURN_IF_ERROR(convert("k_new", p.k_new, TypeRule::several, t.k_new));
  FLASHCORE_RETURN_IF_ERROR(convert("v_new", p.v_new, TypeRule::several, t.v_new));
  FLASHCORE_RETURN_IF_ERROR(convert("k", p.k, TypeRule::several, t.k));
  FLASHCORE_RETURN_IF_ERROR(convert("v", p.v, TypeRule::several, t.v));
  FLASHCORE_RETURN_IF_ERROR(convert("seqused_k", p.used_k, TypeRule::i32, t.seqused_k));
  FLASHCORE_RETURN_IF_ERROR(convert("block_table", p.block_table, TypeRule::i32, t.block_table));
  FLASHCORE_RETURN_IF_ERROR(
      convert("cu_seqlens_new", p.cu_seqlens_new, TypeRule::i32, t.cu_seqlens_new));
  FLASHCORE_RETURN_IF_ERROR(convert("k_scale", p.k_scale, TypeRule::f32, t.k_scale));
  FLASHCORE_RETURN_IF_ERROR(convert("v_scale", p.v_scale, TypeRule::f32, t.v_scale));
  t.kv_scale_block = p.kv_scale_block;
  return {};
}

Status convert(const flashcore_quant_params& p, QuantTensors& t) {
  FLASHCORE_RETURN_IF_ERROR(check_bit("given_scale", p.given_scale));
  FLASHCORE_RETURN_IF_ERROR(check_bit("rotate", p.rotate));
  FLASHCORE_RETURN_IF_ERROR(convert("from", p.from, TypeRule::several, t.from));
  FLASHCORE_RETURN_IF_ERROR(convert("to", p.to, TypeRule::several, t.to));
  FLASHCORE_RETURN_IF_ERROR(convert("scale", p.scale, TypeRule::f32, t.scale));
  return convert("saturated", p.saturated, TypeRule::i32, t.saturated);
}

}  // namespace flashcore
