#include "data/problem.h"

#include <charconv>
#include <string_view>
#include <tuple>
#include <utility>

#include "api/validate/problem.h"
#include "cli/text.h"
#include "command_error.h"
#include "core/error.h"
#include "data/cases.h"

namespace flashcore::tool {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::optional<std::int64_t> integer(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// "8" or "32/8".
std::optional<std::pair<std::int64_t, std::int64_t>> one_or_two(std::string_view text) {
  const auto parts = split(text, '/');
  const std::optional<std::int64_t> first = integer(parts.front());
  const std::optional<std::int64_t> second = integer(parts.back());
  if (parts.size() > 2 || !first || !second) return std::nullopt;
  return std::pair(*first, *second);
}

void set_shape(const std::string& text, verify::CaseSpec& spec) {
  const auto parts = split(text, ',');
  if (parts.size() == 4) {
    const auto batch = integer(parts[0]);
    const auto heads = one_or_two(parts[1]), lengths = one_or_two(parts[2]),
               dims = one_or_two(parts[3]);
    if (batch && heads && lengths && dims) {
      spec.batch = *batch;
      std::tie(spec.q_heads, spec.kv_heads) = *heads;
      std::tie(spec.q_len, spec.kv_len) = *lengths;
      std::tie(spec.head_dim, spec.v_dim) = *dims;
      return;
    }
  }
  throw CommandError(formatted(
      "--shape is \"{}\"; wanted batch,heads,length,head_dim, e.g. 1,8,512,64, with a slash where "
      "queries and keys differ, e.g. 1,32/8,1/4096,128",
      text));
}

/// Sets the 8-bit types of q, k and v and their scales. An 8-bit q is computed in f16.
void set_storage(const ProblemArgs& args, verify::CaseSpec& spec) {
  if (is_8bit(spec.dtype)) {
    spec.q_storage = spec.k_storage = spec.v_storage = spec.dtype;
    spec.dtype = DType::f16;
  }
  if (!args.kv_dtype.empty()) spec.k_storage = spec.v_storage = dtype_named(args.kv_dtype);
  if (spec.k_storage == DType::none) return;
  const auto kind = args.scales == "none"     ? verify::ScaleKind::none
                    : args.scales == "tensor" ? verify::ScaleKind::per_tensor
                    : args.scales == "head"   ? verify::ScaleKind::per_head
                                              : verify::ScaleKind::per_block;
  spec.k_scale = spec.v_scale = kind;
  if (spec.q_storage != DType::none) spec.q_scale = kind;
  spec.options.q_scale_block = spec.options.kv_scale_block = args.scale_block;
}

/// A tensor without memory: planning needs its shape only.
TensorView absent(DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  return view(nullptr, dtype, shape, device);
}

}  // namespace

Options options_of(const ProblemArgs& args) {
  Options options = args.options;
  if (!args.window.empty()) {
    const auto sides = split(args.window, ',');
    const auto left = integer(sides.front()), right = integer(sides.back());
    if (sides.size() != 2 || !left || !right) {
      throw CommandError(formatted(
          "--window is \"{}\"; wanted LEFT,RIGHT keys, -1 for no limit, e.g. --window=128,0",
          args.window));
    }
    options.window_left = *left;
    options.window_right = *right;
  }
  if (args.reproducibility == "batch_invariant") {
    options.reproducibility = Reproducibility::batch_invariant;
  }
  return options;
}

bool gives_sizes(const ProblemArgs& args) {
  return !args.shape.empty() || args.batch || args.q_heads || args.kv_heads || args.q_len ||
         args.kv_len || args.head_dim || args.v_dim;
}

verify::CaseSpec spec_of(const ProblemArgs& args) {
  verify::CaseSpec spec;
  if (!args.shape.empty()) set_shape(args.shape, spec);
  spec.batch = args.batch.value_or(spec.batch);
  spec.q_heads = args.q_heads.value_or(args.kv_heads.value_or(spec.q_heads));
  spec.kv_heads = args.kv_heads.value_or(args.q_heads.value_or(spec.kv_heads));
  spec.q_len = args.q_len.value_or(args.kv_len.value_or(spec.q_len));
  spec.kv_len = args.kv_len.value_or(args.q_len.value_or(spec.kv_len));
  spec.head_dim = args.head_dim.value_or(spec.head_dim);
  spec.v_dim = args.v_dim.value_or(args.head_dim.value_or(spec.v_dim));
  spec.dtype = args.dtype.empty() ? DType::f32 : dtype_named(args.dtype);
  spec.options = options_of(args);
  set_storage(args, spec);
  spec.lse = args.lse || args.options.partial;
  spec.out_f32 = args.out_f32;
  const auto layout =
      args.layout == "bshd" ? verify::MemoryLayout::rows_first : verify::MemoryLayout::heads_first;
  spec.q_layout = spec.k_layout = spec.v_layout = spec.out_layout = layout;
  const auto random = [](const char* name, const std::string& given) {
    if (given.empty() || given == "random") return !given.empty();
    throw CommandError(
        formatted("--{} {}: a file needs --q, --k and --v; use --{} random with random data", name,
                  given, name));
  };
  const verify::ScoreTensorSpec full{true, true, true, true};
  if (random("bias", args.bias)) spec.bias = full;
  if (random("mask", args.mask)) spec.mask = full;
  spec.alibi = random("alibi", args.alibi) ? 1 : 0;
  spec.sinks = random("sinks", args.sinks);
  spec.q_varlen = random("cu-seqlens-q", args.cu_seqlens_q);
  spec.kv_varlen = random("cu-seqlens-k", args.cu_seqlens_k);
  spec.used_k = random("used-k", args.used_k);
  spec.q_start = random("q-start", args.q_start);
  spec.k_start = random("k-start", args.k_start);
  return spec;
}

void put_in_pages(verify::CaseSpec& spec, std::int64_t page_size) {
  if (page_size == 0) return;
  if (!spec.used_k && spec.kv_len % page_size != 0) {
    throw CommandError(
        formatted("--page-size {}: {} keys are not whole pages; choose a size that divides them",
                  page_size, spec.kv_len));
  }
  spec.page_size = page_size;
  // Pages are [pages, page size, heads, dim] for every --layout, as in serving engines.
  spec.k_layout = spec.v_layout = verify::MemoryLayout::heads_first;
}

Result<Problem> problem_of(const verify::CaseSpec& s, Device device) {
  const DType wide = s.dtype == DType::f64 ? DType::f64 : DType::f32;
  const DType out = s.options.partial ? wide : s.out_f32 ? DType::f32 : s.dtype;
  const bool rows_first = s.q_layout == verify::MemoryLayout::rows_first;
  const auto operand = [&](DType dtype, bool varlen, std::int64_t heads, std::int64_t len,
                           std::int64_t dim) {
    if (varlen) return absent(dtype, {s.batch * len, heads, dim}, device);
    if (!rows_first) return absent(dtype, {s.batch, heads, len, dim}, device);
    return swap_axes(absent(dtype, {s.batch, len, heads, dim}, device), 1, 2);
  };
  Tensors t;
  const auto stored = [&](DType storage) { return storage == DType::none ? s.dtype : storage; };
  t.q = operand(stored(s.q_storage), s.q_varlen, s.q_heads, s.q_len, s.head_dim);
  t.k = operand(stored(s.k_storage), s.kv_varlen, s.kv_heads, s.kv_len, s.head_dim);
  t.v = operand(stored(s.v_storage), s.kv_varlen, s.kv_heads, s.kv_len, s.v_dim);
  std::int64_t kv_len = s.kv_len;
  if (s.page_size > 0) {
    const std::int64_t each = (s.kv_len + s.page_size - 1) / s.page_size;
    kv_len = each * s.page_size;
    t.k =
        absent(stored(s.k_storage), {s.batch * each, s.page_size, s.kv_heads, s.head_dim}, device);
    t.v = absent(stored(s.v_storage), {s.batch * each, s.page_size, s.kv_heads, s.v_dim}, device);
    t.block_table = absent(DType::i32, {s.batch, each}, device);
  }
  t.out = operand(out, s.q_varlen, s.q_heads, s.q_len, s.v_dim);
  if (s.lse) {
    t.lse = s.q_varlen ? absent(wide, {s.q_heads, s.batch * s.q_len}, device)
                       : absent(wide, {s.batch, s.q_heads, s.q_len}, device);
  }
  Options options = s.options;
  if (s.q_varlen && options.max_q_len == 0) options.max_q_len = s.q_len;
  if (s.kv_varlen && options.max_kv_len == 0) options.max_kv_len = s.kv_len;
  const auto scores = [&](DType dtype) {
    return absent(dtype, {s.batch, s.q_heads, s.q_len, kv_len}, device);
  };
  if (s.bias.given) t.bias = scores(s.dtype);
  if (s.mask.given) t.mask = scores(DType::boolean);
  if (s.alibi > 0) t.alibi_slopes = absent(DType::f32, {s.q_heads}, device);
  if (s.sinks) t.sinks = absent(DType::f32, {s.q_heads}, device);
  if (s.q_varlen) t.cu_seqlens_q = absent(DType::i32, {s.batch + 1}, device);
  if (s.kv_varlen) t.cu_seqlens_k = absent(DType::i32, {s.batch + 1}, device);
  if (s.used_k) t.seqused_k = absent(DType::i32, {s.batch}, device);
  if (s.q_start) t.q_start = absent(DType::i32, {s.batch}, device);
  if (s.k_start) t.k_start = absent(DType::i32, {s.batch}, device);
  const auto scale = [&](verify::ScaleKind kind, std::int64_t heads, std::int64_t rows,
                         std::int64_t block) -> TensorView {
    if (kind == verify::ScaleKind::none) return {};
    if (kind == verify::ScaleKind::per_tensor) return absent(DType::f32, {1}, device);
    if (kind == verify::ScaleKind::per_head) return absent(DType::f32, {s.batch, heads}, device);
    return absent(DType::f32, {s.batch, heads, (rows + block - 1) / block}, device);
  };
  t.q_scale = scale(s.q_scale, s.q_heads, s.q_len, options.q_scale_block);
  t.k_scale = scale(s.k_scale, s.kv_heads, kv_len, options.kv_scale_block);
  t.v_scale = scale(s.v_scale, s.kv_heads, kv_len, options.kv_scale_block);
  Problem problem;
  FLASHCORE_RETURN_IF_ERROR(describe(t, options, problem));
  return problem;
}

std::string kernel_of(const verify::CaseSpec& spec, const DeviceInfo& plan_for) {
  if (spec.options.kernel != nullptr) return spec.options.kernel;
  const Result<Problem> problem = problem_of(spec, plan_for.device);
  if (!problem.ok()) return "(no plan)";
  const Result<Plan> plan = make_plan(*problem, plan_for);
  return plan.ok() ? plan->kernel->id : "(no plan)";
}

}  // namespace flashcore::tool
