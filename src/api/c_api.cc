// The C ABI: translates descriptors and params, calls the C++ API, reports through *error.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iterator>
#include <new>
#include <string_view>
#include <utility>

#include "api/polled_run.h"
#include "core/error.h"
#include "flashcore/attention.h"
#include "flashcore/flashcore.h"
#include "flashcore/quant.h"

// Of Python's stable ABI, by the names they have in every version. Weak: there where an interpreter
// has loaded this library, null elsewhere, and then nobody calls flashcore_python_run.
#define FLASHCORE_PYTHON extern "C" __attribute__((weak))
FLASHCORE_PYTHON void* PyCapsule_GetPointer(void* capsule, const char* name);
FLASHCORE_PYTHON int PyErr_CheckSignals();
FLASHCORE_PYTHON void PyErr_Clear();
FLASHCORE_PYTHON void* PyErr_Occurred();
FLASHCORE_PYTHON void PyEval_RestoreThread(void* state);
FLASHCORE_PYTHON void* PyEval_SaveThread();
FLASHCORE_PYTHON void* PyLong_AsVoidPtr(void* object);
FLASHCORE_PYTHON void* PyLong_FromLong(long value);  // NOLINT: its type in Python
FLASHCORE_PYTHON void* PyObject_CallFunctionObjArgs(void* function, ...);          // NOLINT: as is
FLASHCORE_PYTHON void* PyObject_CallMethodObjArgs(void* object, void* name, ...);  // NOLINT: as is
FLASHCORE_PYTHON void* Py_BuildValue(const char* format, ...);                     // NOLINT: as is
FLASHCORE_PYTHON void Py_DecRef(void* object);

namespace flashcore {
namespace {

static_assert(FLASHCORE_OK == static_cast<int>(StatusCode::ok) &&
              FLASHCORE_INVALID_ARGUMENT == static_cast<int>(StatusCode::invalid_argument) &&
              FLASHCORE_UNSUPPORTED == static_cast<int>(StatusCode::unsupported) &&
              FLASHCORE_OUT_OF_MEMORY == static_cast<int>(StatusCode::out_of_memory) &&
              FLASHCORE_CUDA_ERROR == static_cast<int>(StatusCode::cuda) &&
              FLASHCORE_INTERNAL == static_cast<int>(StatusCode::internal) &&
              FLASHCORE_CANCELLED == static_cast<int>(StatusCode::cancelled));
static_assert(FLASHCORE_WORKSPACE_HEADER_BYTES == kWorkspaceHeaderBytes);

std::int32_t finish(const Status& status, flashcore_error* error) noexcept {
  const auto code = static_cast<std::int32_t>(status.code());
  if (error != nullptr) {
    error->code = code;
    std::snprintf(error->message, sizeof error->message, "%s", status.message().c_str());
  }
  return code;
}

/// Every entry point's body runs in here: nothing is thrown through C.
template <typename Body>
std::int32_t entry(flashcore_error* error, Body body) noexcept {
  try {
    return finish(body(), error);
  } catch (const std::bad_alloc&) {
    return finish(out_of_memory(), error);
  } catch (...) {
    return finish(Status(StatusCode::internal, "unexpected"), error);
  }
}

Status check_struct(const char* name, std::size_t got, std::size_t known) {
  if (got == known) return {};
  return invalid_argument(
      "%s: struct_size is %zu, this library (version %s) has %zu; compile the "
      "caller against its flashcore.h",
      name, got, version(), known);
}

/// `cancel` is the last field of all params. Those of callers that do not know it end before it.
template <typename Params>
constexpr std::size_t kWithoutCancel = offsetof(Params, cancel);

template <typename Params>
Status check_params(const Params* p) {
  if (p == nullptr) return invalid_argument("params: is NULL");
  if (p->struct_size == kWithoutCancel<Params>) return {};
  return check_struct("params", p->struct_size, sizeof *p);
}

template <typename Params>
const std::int32_t* cancel_of(const Params& p) {
  return p.struct_size == kWithoutCancel<Params> ? nullptr : p.cancel;
}

struct TypeWords {
  char text[48];
};

/// Any dtype of DLPack as other libraries call it: int64, complex64.
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

/// The only type a tensor of this name can have; null where there are several.
const char* wanted_type(std::string_view name) {
  if (name == "mask") return "bool";
  if (name == "lse" || name.starts_with("lses")) return "f32 (f64 for f64 problems)";
  for (const char* one : {"sinks", "alibi_slopes", "scale", "q_scale", "k_scale", "v_scale"}) {
    if (name == one) return "f32";
  }
  for (const char* one : {"cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_new", "seqused_k",
                          "block_table", "q_start", "k_start", "saturated"}) {
    if (name == one) return "i32 (int32)";
  }
  return nullptr;
}

Result<DType> dtype_of(const char* name, const flashcore_dtype& d) {
  if (d.lanes == 1) {
    if (d.code == FLASHCORE_FLOAT && d.bits == 64) return DType::f64;
    if (d.code == FLASHCORE_FLOAT && d.bits == 32) return DType::f32;
    if (d.code == FLASHCORE_FLOAT && d.bits == 16) return DType::f16;
    if (d.code == FLASHCORE_BFLOAT && d.bits == 16) return DType::bf16;
    if (d.code == FLASHCORE_INT && d.bits == 32) return DType::i32;
    if (d.code == FLASHCORE_BOOL && d.bits == 8) return DType::boolean;
    if (d.code == FLASHCORE_FLOAT8_E4M3 && d.bits == 8) return DType::e4m3;
    if (d.code == FLASHCORE_FLOAT8_E5M2 && d.bits == 8) return DType::e5m2;
    if (d.code == FLASHCORE_INT && d.bits == 8) return DType::int8;
    // Many write booleans as bytes.
    if (d.code == FLASHCORE_UINT && d.bits == 8) {
      return std::strcmp(name, "mask") == 0 ? DType::boolean : DType::u8;
    }
  }
  const TypeWords got = words_of(d);
  if (const char* wanted = wanted_type(name)) {
    return invalid_argument("%s: dtype is %s; wanted %s", name, got.text, wanted);
  }
  return unsupported(
      "%s: dtype is %s, which is none of f64, f32, f16, bf16, e4m3, e5m2, int8, byte (uint8)", name,
      got.text);
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

Status convert(const char* name, const flashcore_tensor* from, TensorView& to) {
  if (from == nullptr) return {};
  if (from->ndim < 1 || from->ndim > TensorView::kMaxRank) {
    return invalid_argument("%s: ndim is %d; wanted 1 to %d", name, from->ndim,
                            TensorView::kMaxRank);
  }
  if (from->shape == nullptr) return invalid_argument("%s: shape is NULL", name);
  const Result<DType> dtype = dtype_of(name, from->dtype);
  if (!dtype.ok()) return dtype.status();
  const Result<Device> device = device_of(name, from->device);
  if (!device.ok()) return device.status();
  to.dtype = *dtype;
  to.device = *device;
  to.rank = from->ndim;
  if (from->data != nullptr) {
    // The caller's offset may be anything; added as an integer, a wild one is no undefined step.
    to.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(from->data) +
                                      static_cast<std::uintptr_t>(from->byte_offset));
  }
  std::int64_t compact = 1;
  for (int i = to.rank - 1; i >= 0; --i) {
    to.shape[i] = from->shape[i];
    to.strides[i] = from->strides != nullptr ? from->strides[i] : compact;
    // A negative or huge extent is refused by validation; here it only must not overflow.
    if (__builtin_mul_overflow(compact, std::max<std::int64_t>(to.shape[i], 1), &compact)) {
      return invalid_argument("%s: the shape overflows 64 bits", name);
    }
  }
  return {};
}

/// [batch, len, heads, dim] becomes the same memory seen as [batch, heads, len, dim]. Packed
/// tensors and pages have an order of their own.
void swap_heads_and_lengths(Tensors& t) {
  const bool kv_fixed = !t.cu_seqlens_k.given() && !t.block_table.given();
  for (TensorView* one : {&t.q, &t.out, kv_fixed ? &t.k : nullptr, kv_fixed ? &t.v : nullptr}) {
    if (one == nullptr || one->rank != 4) continue;
    std::swap(one->shape[1], one->shape[2]);
    std::swap(one->strides[1], one->strides[2]);
  }
}

struct Call {
  Tensors tensors;
  Options options;
};

Result<Call> convert(const flashcore_params* p) {
  FLASHCORE_RETURN_IF_ERROR(check_params(p));
  Call call;
  Tensors& t = call.tensors;
  const struct {
    const char* name;
    const flashcore_tensor* from;
    TensorView* to;
  } all[] = {{"q", p->q, &t.q},
             {"k", p->k, &t.k},
             {"v", p->v, &t.v},
             {"out", p->out, &t.out},
             {"lse", p->lse, &t.lse},
             {"bias", p->bias, &t.bias},
             {"mask", p->mask, &t.mask},
             {"alibi_slopes", p->alibi_slopes, &t.alibi_slopes},
             {"sinks", p->sinks, &t.sinks},
             {"cu_seqlens_q", p->cu_seqlens_q, &t.cu_seqlens_q},
             {"cu_seqlens_k", p->cu_seqlens_k, &t.cu_seqlens_k},
             {"seqused_k", p->used_k, &t.seqused_k},
             {"block_table", p->block_table, &t.block_table},
             {"q_start", p->q_start, &t.q_start},
             {"k_start", p->k_start, &t.k_start},
             {"q_scale", p->q_scale, &t.q_scale},
             {"k_scale", p->k_scale, &t.k_scale},
             {"v_scale", p->v_scale, &t.v_scale}};
  for (const auto& one : all) FLASHCORE_RETURN_IF_ERROR(convert(one.name, one.from, *one.to));
  if (p->layout == 1) swap_heads_and_lengths(t);
  for (const auto& [name, flag] : {std::pair{"has_scale", p->has_scale},
                                   {"causal", p->causal},
                                   {"partial", p->partial},
                                   {"checked", p->checked},
                                   {"reproducibility", p->reproducibility},
                                   {"layout", p->layout}}) {
    if (flag != 0 && flag != 1) return invalid_argument("%s is %d; wanted 0 or 1", name, flag);
  }
  Options& o = call.options;
  o.causal = p->causal != 0;
  o.window_left = p->window_left;
  o.window_right = p->window_right;
  if (p->has_scale != 0) o.scale = p->scale;
  o.softcap = p->softcap;
  o.partial = p->partial != 0;
  o.checked = p->checked != 0;
  o.max_q_len = p->max_q_len;
  o.max_kv_len = p->max_kv_len;
  o.num_splits = p->num_splits;
  o.reproducibility = static_cast<Reproducibility>(p->reproducibility);
  o.kernel = p->kernel;
  o.q_scale_block = p->q_scale_block;
  o.kv_scale_block = p->kv_scale_block;
  return call;
}

Result<Plan> plan_of(const flashcore_params& p, const Call& call) {
  const Result<Problem> problem = make_problem(call.tensors, call.options);
  if (!problem.ok()) return problem.status();
  Result<DeviceInfo> device = device_info(problem->device);
  if (!device.ok()) return device.status();
  DeviceInfo info = *device;
  if (p.threads < 0) return invalid_argument("threads is %d; wanted 0 or more", p.threads);
  if (p.threads > 0) info.threads = p.threads;
  return make_plan(*problem, info);
}

/// An entry point's body for a call and its plan.
template <typename Body>
std::int32_t planned(const flashcore_params* params, flashcore_error* error, Body body) noexcept {
  return entry(error, [&]() -> Status {
    const Result<Call> call = convert(params);
    if (!call.ok()) return call.status();
    const Result<Plan> plan = plan_of(*params, *call);
    if (!plan.ok()) return plan.status();
    return body(*call, *plan);
  });
}

/// Asked every few milliseconds during a long CPU call: true ends it. Empty: there is nobody to
/// ask.
using Stop = std::function<bool()>;

// Above so much arithmetic per thread a call takes 20 ms or more, and a thread of its own costs
// nothing in comparison.
constexpr double kLongFlopsPerThread = 1e9;
// The other calls take about 20 ms for so much on one thread.
constexpr double kLongBytes = 16 << 20;

bool is_long(const Plan& plan) {
  return plan.kernel->device == DeviceType::cpu &&
         cost(plan.problem).flops > kLongFlopsPerThread * plan.device.threads;
}

double bytes_of(const TensorView& t) {
  auto bytes = static_cast<double>(size_of(t.dtype));
  for (int i = 0; i < t.rank; ++i) bytes *= static_cast<double>(t.shape[i]);
  return bytes;
}

/// A call on `bytes` of tensors on a device: with the params' flag, or, if it is long, until
/// stop().
template <typename Params, typename Call>
Status run_call(const Params& params, Device device, double bytes, const Stop& stop,
                const Call& call) {
  const bool polled = stop && device.type == DeviceType::cpu && bytes > kLongBytes;
  return polled ? run_polled(call, stop) : call(cancel_of(params));
}

std::int32_t attention(const flashcore_params* params, flashcore_error* error, const Stop& stop) {
  return planned(params, error, [&](const Call& call, const Plan& plan) {
    if (stop && is_long(plan)) return run_polled(plan, call.tensors, stop);
    const flashcore_params& p = *params;
    return run(plan, call.tensors,
               {p.workspace, p.workspace_bytes, plan.problem.device, p.workspace_header}, p.stream,
               cancel_of(p));
  });
}

Result<QuantTensors> convert(const flashcore_quant_params* p) {
  FLASHCORE_RETURN_IF_ERROR(check_params(p));
  if (p->given_scale != 0 && p->given_scale != 1) {
    return invalid_argument("given_scale is %d; wanted 0 or 1", p->given_scale);
  }
  if (p->rotate != 0 && p->rotate != 1) {
    return invalid_argument("rotate is %d; wanted 0 or 1", p->rotate);
  }
  QuantTensors t;
  FLASHCORE_RETURN_IF_ERROR(convert("from", p->from, t.from));
  FLASHCORE_RETURN_IF_ERROR(convert("to", p->to, t.to));
  FLASHCORE_RETURN_IF_ERROR(convert("scale", p->scale, t.scale));
  FLASHCORE_RETURN_IF_ERROR(convert("saturated", p->saturated, t.saturated));
  return t;
}

std::int32_t merge(const flashcore_merge_params* params, flashcore_error* error, const Stop& stop) {
  return entry(error, [&]() -> Status {
    FLASHCORE_RETURN_IF_ERROR(check_params(params));
    if (params->parts == 0 || params->parts > kMaxMergeParts) {
      return invalid_argument("parts is %zu; wanted 1 to %d", params->parts, kMaxMergeParts);
    }
    if (params->outs == nullptr) return invalid_argument("outs: is NULL");
    if (params->lses == nullptr) return invalid_argument("lses: is NULL");
    if (params->out == nullptr) return invalid_argument("out: is NULL");
    PartialResult parts[kMaxMergeParts];
    for (std::size_t i = 0; i < params->parts; ++i) {
      char name[16];
      std::snprintf(name, sizeof name, "outs[%d]", static_cast<int>(i));
      FLASHCORE_RETURN_IF_ERROR(convert(name, &params->outs[i], parts[i].out));
      std::snprintf(name, sizeof name, "lses[%d]", static_cast<int>(i));
      FLASHCORE_RETURN_IF_ERROR(convert(name, &params->lses[i], parts[i].lse));
    }
    TensorView out, lse, sinks;
    FLASHCORE_RETURN_IF_ERROR(convert("out", params->out, out));
    FLASHCORE_RETURN_IF_ERROR(convert("lse", params->lse, lse));
    FLASHCORE_RETURN_IF_ERROR(convert("sinks", params->sinks, sinks));
    const double bytes = bytes_of(out) * static_cast<double>(params->parts + 1);
    return run_call(*params, out.device, bytes, stop, [&](const std::int32_t* cancel) {
      return merge(std::span(parts, params->parts), out, lse, sinks, params->stream, cancel);
    });
  });
}

std::int32_t append(const flashcore_append_params* params, flashcore_error* error,
                    const Stop& stop) {
  return entry(error, [&]() -> Status {
    FLASHCORE_RETURN_IF_ERROR(check_params(params));
    AppendTensors t;
    FLASHCORE_RETURN_IF_ERROR(convert("k_new", params->k_new, t.k_new));
    FLASHCORE_RETURN_IF_ERROR(convert("v_new", params->v_new, t.v_new));
    FLASHCORE_RETURN_IF_ERROR(convert("k", params->k, t.k));
    FLASHCORE_RETURN_IF_ERROR(convert("v", params->v, t.v));
    FLASHCORE_RETURN_IF_ERROR(convert("seqused_k", params->used_k, t.seqused_k));
    FLASHCORE_RETURN_IF_ERROR(convert("block_table", params->block_table, t.block_table));
    FLASHCORE_RETURN_IF_ERROR(convert("cu_seqlens_new", params->cu_seqlens_new, t.cu_seqlens_new));
    FLASHCORE_RETURN_IF_ERROR(convert("k_scale", params->k_scale, t.k_scale));
    FLASHCORE_RETURN_IF_ERROR(convert("v_scale", params->v_scale, t.v_scale));
    t.kv_scale_block = params->kv_scale_block;
    const Workspace workspace{params->workspace, params->workspace_bytes, t.k.device};
    const double bytes = bytes_of(t.k_new) + bytes_of(t.v_new);
    return run_call(*params, t.k.device, bytes, stop, [&](const std::int32_t* cancel) {
      return append(t, workspace, params->stream, cancel);
    });
  });
}

std::int32_t quantize(const flashcore_quant_params* params, flashcore_error* error,
                      const Stop& stop) {
  return entry(error, [&]() -> Status {
    const Result<QuantTensors> t = convert(params);
    if (!t.ok()) return t.status();
    const QuantOptions options{params->block_rows, params->given_scale != 0, params->rotate != 0};
    const Workspace workspace{params->workspace, params->workspace_bytes, t->from.device};
    const double bytes = bytes_of(t->from) + bytes_of(t->to);
    return run_call(*params, t->from.device, bytes, stop, [&](const std::int32_t* cancel) {
      return quantize(*t, options, workspace, params->stream, cancel);
    });
  });
}

std::int32_t dequantize(const flashcore_quant_params* params, flashcore_error* error,
                        const Stop& stop) {
  return entry(error, [&]() -> Status {
    const Result<QuantTensors> t = convert(params);
    if (!t.ok()) return t.status();
    const QuantOptions options{params->block_rows, true, params->rotate != 0};
    const double bytes = bytes_of(t->from) + bytes_of(t->to);
    return run_call(*params, t->from.device, bytes, stop, [&](const std::int32_t* cancel) {
      return dequantize(*t, options, params->stream, cancel);
    });
  });
}

/// Descriptors of Python's arrays, in the order of the call's fields.
class PythonArrays {
 public:
  explicit PythonArrays(const flashcore_python_call& call) : call_(call) {}
  PythonArrays(const PythonArrays&) = delete;
  PythonArrays& operator=(const PythonArrays&) = delete;
  ~PythonArrays() {
    for (int i = 0; i < held_; ++i) Py_DecRef(capsules_[i]);
  }

  /// Describes one more array; false, and no exception left behind, where that cannot be done.
  bool add(void* array) {
    const flashcore_tensor* described = call_.read != nullptr ? read(array) : open(array);
    if (described == nullptr) {
      PyErr_Clear();
      return false;
    }
    all_[count_++] = described;
    return true;
  }

  int count() const { return count_; }
  const flashcore_tensor* operator[](int i) const { return all_[i]; }

 private:
  const flashcore_tensor* read(void* array) {
    flashcore_tensor* tensor = &tensors_[count_];
    return call_.read(array, tensor) == 0 ? tensor : nullptr;
  }

  /// What a DLPack capsule holds begins with a DLTensor.
  const flashcore_tensor* open(void* array) {
    void* capsule = PyObject_CallMethodObjArgs(array, call_.dlpack_name, nullptr);
    if (capsule == nullptr) return nullptr;
    capsules_[held_++] = capsule;
    return static_cast<const flashcore_tensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  }

  const flashcore_python_call& call_;
  int count_ = 0, held_ = 0;
  const flashcore_tensor* all_[FLASHCORE_MAX_PYTHON_ARRAYS];
  flashcore_tensor tensors_[FLASHCORE_MAX_PYTHON_ARRAYS];
  void* capsules_[FLASHCORE_MAX_PYTHON_ARRAYS];
};

/// An entry point's body without the GIL. If `interruptible`, Python's signal handlers run during a
/// long call. When one of them raises, the call is cancelled and the exception is left set.
template <typename Params>
std::int32_t from_python(std::int32_t (*body)(const Params*, flashcore_error*, const Stop&),
                         const Params* params, flashcore_error* error, bool interruptible) {
  void* state = PyEval_SaveThread();
  Stop signalled;
  if (interruptible) {
    signalled = [&state] {
      PyEval_RestoreThread(state);
      const bool raised = PyErr_CheckSignals() != 0;
      state = PyEval_SaveThread();
      return raised;
    };
  }
  const std::int32_t code = body(params, error, signalled);
  PyEval_RestoreThread(state);
  return code;
}

/// Runs on arrays that are all described. Python may use the same params before and after, in a
/// finaliser, and also during the call, in a signal handler: they are put back as they were, and a
/// call that lets handlers run does not read them again.
std::int32_t run_described(const flashcore_python_call& call, const PythonArrays& arrays) {
  flashcore_params& params = *call.params;
  const flashcore_params before = params;
  for (int i = 0; i < arrays.count(); ++i) *call.fields[i] = arrays[i];
  const Result<Device> where = device_of("q", arrays[0]->device);
  if (where.ok() && where->type == DeviceType::cpu) {
    params.workspace = call.cpu_workspace->address;
    params.workspace_bytes = call.cpu_workspace->bytes;
    params.workspace_header = nullptr;
    params.stream = nullptr;
  }
  const std::int32_t code = from_python(attention, &params, call.error, call.interruptible != 0);
  params = before;
  return code;
}

/// flashcore_attention's code, or -1 where an array could not be described.
std::int32_t run_from_python(const flashcore_python_call& call, void* const* given,
                             std::ptrdiff_t count) {
  if (count != call.count) return -1;
  PythonArrays arrays(call);
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    if (!arrays.add(given[i])) return -1;
  }
  return run_described(call, arrays);
}

bool have_the_same_width(const flashcore_tensor& a, const flashcore_tensor& b) {
  return a.ndim > 0 && b.ndim > 0 && a.shape[a.ndim - 1] == b.shape[b.ndim - 1];
}

/// A new array with the result, owned by the caller; null where the call failed or nothing has run.
void* new_from_python(const flashcore_python_call& call, void* const* given, std::ptrdiff_t count) {
  constexpr std::ptrdiff_t kInputs = 3;  // q, k, v; out is the fourth field
  if (count != kInputs || call.count != kInputs + 1) return nullptr;
  PythonArrays arrays(call);
  for (std::ptrdiff_t i = 0; i < kInputs; ++i) {
    if (!arrays.add(given[i])) return nullptr;
  }
  if (!have_the_same_width(*arrays[0], *arrays[2])) return nullptr;
  void* const out = PyObject_CallFunctionObjArgs(call.empty_like, given[0], nullptr);
  if (out == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  if (arrays.add(out) && run_described(call, arrays) == FLASHCORE_OK) return out;
  Py_DecRef(out);
  return nullptr;
}

}  // namespace
}  // namespace flashcore

using namespace flashcore;  // NOLINT: the C functions below are this file's purpose

void flashcore_params_init(flashcore_params* params, std::size_t struct_size) {
  if (params == nullptr) return;
  // A caller of another version gets its own size back, and a clear refusal later.
  std::memset(params, 0, std::min(struct_size, sizeof *params));
  if (struct_size >= sizeof params->struct_size) params->struct_size = struct_size;
  if (struct_size < kWithoutCancel<flashcore_params>) return;
  params->window_left = params->window_right = -1;
}

std::int32_t flashcore_plan(const flashcore_params* params, flashcore_plan_info* info,
                            flashcore_error* error) {
  return entry(error, [&]() -> Status {
    if (info == nullptr) return invalid_argument("info: is NULL");
    FLASHCORE_RETURN_IF_ERROR(check_struct("info", info->struct_size, sizeof *info));
    const Result<Call> call = convert(params);
    if (!call.ok()) return call.status();
    const Result<Plan> plan = plan_of(*params, *call);
    if (!plan.ok()) return plan.status();
    *info = {sizeof *info,          plan->kernel->id, plan->kernel->family,
             plan->workspace_bytes, plan->num_tiles,  plan->tile_q,
             plan->tile_k,          plan->splits,     uses_header(*plan) ? 1 : 0};
    return {};
  });
}

std::int32_t flashcore_explain(const flashcore_params* params, char* text, std::size_t capacity,
                               std::size_t* needed, flashcore_error* error) {
  return planned(params, error, [&](const Call&, const Plan& plan) -> Status {
    const std::string words = explain(plan);
    if (needed != nullptr) *needed = words.size() + 1;
    if (text != nullptr && capacity > 0) std::snprintf(text, capacity, "%s", words.c_str());
    return {};
  });
}

std::int32_t flashcore_attention(const flashcore_params* params, flashcore_error* error) {
  return attention(params, error, {});
}

std::int32_t flashcore_workspace_init(void* workspace, std::size_t workspace_bytes,
                                      flashcore_device device, void* stream,
                                      flashcore_error* error) {
  return entry(error, [&]() -> Status {
    const Result<Device> where = device_of("workspace", device);
    if (!where.ok()) return where.status();
    return workspace_init({workspace, workspace_bytes, *where}, stream);
  });
}

std::int32_t flashcore_workspace_status(void* workspace, std::size_t workspace_bytes,
                                        flashcore_device device, void* stream,
                                        flashcore_error* error) {
  return entry(error, [&]() -> Status {
    const Result<Device> where = device_of("workspace", device);
    if (!where.ok()) return where.status();
    return workspace_status({workspace, workspace_bytes, *where}, stream);
  });
}

std::int32_t flashcore_capture_id(flashcore_device device, void* stream, std::uint64_t* id,
                                  std::int32_t* graph_ended, flashcore_error* error) {
  return entry(error, [&]() -> Status {
    if (id == nullptr) return invalid_argument("id: is NULL");
    const Result<Device> where = device_of("stream", device);
    if (!where.ok()) return where.status();
    const Result<std::uint64_t> found = capture_id(*where, stream, graph_ended);
    if (!found.ok()) return found.status();
    *id = *found;
    return {};
  });
}

std::int32_t flashcore_merge(const flashcore_merge_params* params, flashcore_error* error) {
  return merge(params, error, {});
}

std::int32_t flashcore_append(const flashcore_append_params* params, flashcore_error* error) {
  return append(params, error, {});
}

std::int32_t flashcore_quantize(const flashcore_quant_params* params, flashcore_error* error) {
  return quantize(params, error, {});
}

std::int32_t flashcore_dequantize(const flashcore_quant_params* params, flashcore_error* error) {
  return dequantize(params, error, {});
}

void* flashcore_python_run(void* self, void* const* arrays, std::ptrdiff_t count) {
  const auto& call = *static_cast<const flashcore_python_call*>(PyLong_AsVoidPtr(self));
  const std::int32_t code = run_from_python(call, arrays, count);
  return code == FLASHCORE_CANCELLED ? nullptr : PyLong_FromLong(code);
}

void* flashcore_python_new(void* self, void* const* arrays, std::ptrdiff_t count) {
  const auto& call = *static_cast<const flashcore_python_call*>(PyLong_AsVoidPtr(self));
  void* const out = new_from_python(call, arrays, count);
  if (out != nullptr || PyErr_Occurred() != nullptr) return out;
  return Py_BuildValue("");  // None
}

std::int32_t flashcore_python_attention(const flashcore_params* params, flashcore_error* error,
                                        std::int32_t interruptible) {
  return from_python(attention, params, error, interruptible != 0);
}

std::int32_t flashcore_python_merge(const flashcore_merge_params* params, flashcore_error* error,
                                    std::int32_t interruptible) {
  return from_python(merge, params, error, interruptible != 0);
}

std::int32_t flashcore_python_append(const flashcore_append_params* params, flashcore_error* error,
                                     std::int32_t interruptible) {
  return from_python(append, params, error, interruptible != 0);
}

std::int32_t flashcore_python_quantize(const flashcore_quant_params* params, flashcore_error* error,
                                       std::int32_t interruptible) {
  return from_python(quantize, params, error, interruptible != 0);
}

std::int32_t flashcore_python_dequantize(const flashcore_quant_params* params,
                                         flashcore_error* error, std::int32_t interruptible) {
  return from_python(dequantize, params, error, interruptible != 0);
}

std::int32_t flashcore_cuda_device_count(flashcore_error* error) {
  std::int32_t count = 0;
  entry(error, [&]() -> Status {
    const CudaAvailability available = cuda_availability();
    count = available.device_count;
    if (count == 0) return unsupported("%s", available.reason.c_str());
    return {};
  });
  return count;
}

const char* flashcore_status_name(std::int32_t code) {
  return to_string(static_cast<StatusCode>(code));
}

const char* flashcore_version(void) { return version(); }

const char* flashcore_source_fingerprint(const char* family) {
  return source_fingerprint(family == nullptr ? "" : family);
}
