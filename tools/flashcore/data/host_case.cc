#include "data/host_case.h"

#include <algorithm>
#include <cstring>

#include "cli/text.h"
#include "command_error.h"
#include "data/cases.h"
#include "data/npy.h"
#include "data/problem.h"
#include "reference/oracle.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::tool {
namespace {

constexpr std::size_t kAlignment = 256;

/// Loads the tensors of a case. While it builds, a view's data is its offset in the block.
class Builder {
 public:
  explicit Builder(const RunArgs& args) : args_(args) {
    if (!args.problem.dtype.empty()) dtype_ = dtype_named(args.problem.dtype);
    if (is_8bit(dtype_) || !args.problem.kv_dtype.empty()) {
      throw CommandError("8-bit types are for random data (--shape); files hold floats");
    }
  }

  HostCase build() {
    const ProblemArgs& p = args_.problem;
    Tensors& t = case_.tensors;
    t.cu_seqlens_q = optional("cu-seqlens-q", p.cu_seqlens_q, DType::i32);
    t.cu_seqlens_k = optional("cu-seqlens-k", p.cu_seqlens_k, DType::i32);
    t.q = operand("q", args_.q, t.cu_seqlens_q.given());
    if (dtype_ == DType::none) dtype_ = t.q.dtype;
    t.block_table = optional("block-table", args_.block_table, DType::i32);
    const bool own_axes = t.cu_seqlens_k.given() || t.block_table.given();
    t.k = operand("k", args_.k, own_axes);
    t.v = operand("v", args_.v, own_axes);
    t.bias = optional("bias", p.bias, DType::f32, dtype_);
    t.mask = optional("mask", p.mask, DType::boolean);
    t.alibi_slopes = optional("alibi", p.alibi, DType::f32);
    t.sinks = optional("sinks", p.sinks, DType::f32);
    t.seqused_k = optional("used-k", p.used_k, DType::i32);
    t.q_start = optional("q-start", p.q_start, DType::i32);
    t.k_start = optional("k-start", p.k_start, DType::i32);
    place_outputs();
    case_.options = options_of(p);
    // Lengths, positions and page ids from files are always checked: the oracle trusts them.
    case_.options.checked = p.options.checked || t.cu_seqlens_q.given() || t.cu_seqlens_k.given() ||
                            t.seqused_k.given() || t.block_table.given() || t.q_start.given() ||
                            t.k_start.given();
    for (TensorView* view : verify::views_of(t)) {
      if (!view->given()) continue;
      view->data = case_.bytes.data() + reinterpret_cast<std::uintptr_t>(view->data);
    }
    return std::move(case_);
  }

 private:
  static bool is_float(DType dtype) {
    return dtype != DType::none && dtype != DType::i32 && dtype != DType::boolean;
  }

  TensorView operand(const char* name, const std::string& file, bool own_axes) {
    const TensorView tensor = load(name, file, dtype_, dtype_);
    const bool swap = !own_axes && args_.problem.layout == "bshd" && tensor.rank == 4;
    return swap ? swap_axes(tensor, 1, 2) : tensor;
  }

  TensorView optional(const char* name, const std::string& file, DType wanted,
                      DType also = DType::none) {
    if (file.empty()) return {};
    if (file == "random") {
      throw CommandError(formatted("--{} random: q, k and v are files; give a .npy file", name));
    }
    return load(name, file, wanted, also == DType::none ? wanted : also);
  }

  /// Loads an array from a file. Converts a float array to `wanted` unless it has that dtype or
  /// `also` (none: any dtype).
  TensorView load(const char* name, const std::string& file, DType wanted, DType also) {
    const std::vector<std::byte> bytes = read_file(file);
    const Result<NpyArray> array = parse_npy(bytes, dtype_ == DType::bf16);
    if (!array.ok()) {
      throw CommandError(formatted("--{} {}: {}", name, file, array.status().message()));
    }
    const bool as_is = wanted == DType::none || array->dtype == wanted || array->dtype == also;
    if (!as_is && !(is_float(wanted) && is_float(array->dtype))) {
      throw CommandError(formatted("--{} {}: holds {}; wanted {}", name, file,
                                   to_string(array->dtype), to_string(wanted)));
    }
    TensorView tensor;
    tensor.dtype = as_is ? array->dtype : wanted;
    tensor.rank = array->rank;
    std::copy_n(array->shape, array->rank, tensor.shape);
    std::copy_n(array->strides, array->rank, tensor.strides);
    const auto from_size = static_cast<std::size_t>(size_of(array->dtype));
    const std::size_t count = array->data.size() / from_size;
    std::byte* to = reserve(tensor, count);
    if (as_is) {
      if (count > 0) std::memcpy(to, array->data.data(), array->data.size());
      return tensor;
    }
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t element = 0;
      std::memcpy(&element, array->data.data() + i * from_size, from_size);
      verify::store(to, tensor.dtype, static_cast<std::int64_t>(i),
                    reference::element(&element, array->dtype, 0));
    }
    return tensor;
  }

  /// Reserves memory for `count` elements; the tensor's data becomes its offset.
  std::byte* reserve(TensorView& tensor, std::size_t count) {
    const std::size_t offset = (case_.bytes.size() + kAlignment - 1) / kAlignment * kAlignment;
    tensor.data = reinterpret_cast<void*>(offset);
    const auto size = static_cast<std::size_t>(size_of(tensor.dtype));
    case_.bytes.resize(offset + std::max<std::size_t>(count * size, 1), std::byte{0xff});
    return case_.bytes.data() + offset;
  }

  TensorView output(DType dtype, std::initializer_list<std::int64_t> shape) {
    const auto size = static_cast<std::size_t>(size_of(dtype));
    std::size_t count = 1, bytes = size;
    for (const std::int64_t extent : shape) {
      if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes)) {
        throw CommandError("q and v need an output larger than the address space");
      }
      count *= static_cast<std::size_t>(extent);
    }
    TensorView tensor = view(nullptr, dtype, shape);
    std::byte* data = reserve(tensor, count);
    const std::uint64_t poison = verify::poison(dtype);
    for (std::size_t i = 0; i < count; ++i) std::memcpy(data + i * size, &poison, size);
    return tensor;
  }

  void place_outputs() {
    const ProblemArgs& p = args_.problem;
    Tensors& t = case_.tensors;
    if (t.q.rank < 3 || t.v.rank < 1) return;  // the library reports the error
    const DType wide = verify::wide(dtype_);
    const DType dtype = p.options.partial ? wide : p.out_f32 ? DType::f32 : dtype_;
    const std::int64_t v_dim = t.v.shape[t.v.rank - 1];
    const bool lse = p.lse || p.options.partial || !args_.lse_out.empty();
    if (t.q.rank == 3) {
      t.out = output(dtype, {t.q.shape[0], t.q.shape[1], v_dim});
      if (lse) t.lse = output(wide, {t.q.shape[1], t.q.shape[0]});
      return;
    }
    t.out = p.layout == "bshd"
                ? swap_axes(output(dtype, {t.q.shape[0], t.q.shape[2], t.q.shape[1], v_dim}), 1, 2)
                : output(dtype, {t.q.shape[0], t.q.shape[1], t.q.shape[2], v_dim});
    if (lse) t.lse = output(wide, {t.q.shape[0], t.q.shape[1], t.q.shape[2]});
  }

  const RunArgs& args_;
  DType dtype_ = DType::none;
  HostCase case_;
};

}  // namespace

HostCase random_host_case(const verify::CaseSpec& spec) {
  HostCase made;
  static_cast<verify::HostCall&>(made) = verify::random_call(spec);
  return made;
}

HostCase file_host_case(const RunArgs& args) { return Builder(args).build(); }

}  // namespace flashcore::tool
