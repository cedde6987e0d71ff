#include "property/fuzz_call.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "support/call.h"
#include "support/to_c.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

using verify::Random;

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::f64};

// Strides of 0 allow more elements, but such a call takes too long.
constexpr std::int64_t kMostElements = 1 << 14;

/// Normal numbers or booleans of a type. Drawn once; tensors copy them from a random offset.
const std::vector<std::byte>& table_of(DType dtype) {
  static const std::vector<std::vector<std::byte>> tables = [] {
    std::vector<std::vector<std::byte>> all;
    for (int type = 0; type <= static_cast<int>(DType::u8); ++type) {
      const auto of = static_cast<DType>(type);
      std::vector<std::byte> bytes(16 * Arena::kSlotBytes);
      Random random(static_cast<std::uint64_t>(type));
      const std::int64_t size = std::max<std::int64_t>(size_of(of), 1);
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(bytes.size()) / size; ++i) {
        verify::store(bytes.data(), of, i,
                      of == DType::boolean ? (random.chance(0.8) ? 1.0 : 0.0) : random.normal());
      }
      all.push_back(std::move(bytes));
    }
    return all;
  }();
  return tables[static_cast<std::size_t>(dtype)];
}

void fill_poison(Arena& arena, std::size_t slot, DType dtype) {
  const std::uint64_t bits = verify::poison(dtype);
  const auto size = static_cast<std::size_t>(size_of(dtype));
  for (std::size_t at = 0; at + size <= Arena::kSlotBytes; at += size) {
    std::copy_n(reinterpret_cast<const std::byte*>(&bits), size, arena.slot(slot) + at);
  }
}

}  // namespace

void place(Random& random, Arena& arena, std::size_t slot, FuzzTensor& t, DType dtype,
           std::initializer_list<std::int64_t> shape) {
  t.tensor = {arena.slot(slot),
              {FLASHCORE_CPU, 0},
              static_cast<std::int32_t>(shape.size()),
              c_dtype(dtype),
              t.shape,
              t.strides,
              0};
  std::copy(shape.begin(), shape.end(), t.shape);
  const std::int64_t slack = random.chance(0.2) ? 1 : 0;
  std::int64_t stride = 1;
  for (int i = t.tensor.ndim - 1; i >= 0; --i) {
    t.strides[i] = stride;
    stride = stride * std::max<std::int64_t>(t.shape[i], 1) + slack;
  }
  if (slack == 0 && random.chance(0.3)) t.tensor.strides = nullptr;
}

void fill_slot(Random& random, Arena& arena, std::size_t slot, DType dtype) {
  const std::int64_t first = 8 * random.below(15 * Arena::kSlotBytes / 8);
  std::memcpy(arena.slot(slot), table_of(dtype).data() + first, Arena::kSlotBytes);
}

void fill_ints(Arena& arena, std::size_t slot, const std::vector<std::int64_t>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    verify::store(arena.slot(slot), DType::i32, static_cast<std::int64_t>(i),
                  static_cast<double>(values[i]));
  }
}

const flashcore_tensor** tensor_slot(flashcore_params& p, std::size_t index) {
  const flashcore_tensor** slots[] = {&p.q,
                                      &p.k,
                                      &p.v,
                                      &p.out,
                                      &p.lse,
                                      &p.bias,
                                      &p.mask,
                                      &p.alibi_slopes,
                                      &p.sinks,
                                      &p.cu_seqlens_q,
                                      &p.cu_seqlens_k,
                                      &p.used_k,
                                      &p.block_table,
                                      &p.q_start,
                                      &p.k_start};
  return slots[index];
}

bool Arena::holds(const flashcore_tensor& t) const {
  if (t.data == nullptr || t.shape == nullptr || t.ndim < 1 || t.ndim > 4) return true;
  __int128 reach = 0, compact = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] <= 0) return true;
    reach +=
        static_cast<__int128>(t.shape[i] - 1) * (t.strides != nullptr ? t.strides[i] : compact);
    compact *= t.shape[i];
    if (reach > (__int128{1} << 60) || compact > kMostElements) return false;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes_.data());
  const __int128 first =
      static_cast<__int128>(reinterpret_cast<std::uintptr_t>(t.data)) + t.byte_offset;
  // The library refuses negative strides and dtypes of unknown width.
  return first >= begin && first + (reach + 1) * (t.dtype.bits / 8) <= begin + bytes_.size();
}

bool FuzzCall::fits(const Arena& arena) const {
  for (std::size_t i = 0; i < Arena::kSlots; ++i) {
    const flashcore_tensor* t = *tensor_slot(const_cast<flashcore_params&>(params), i);
    if (t != nullptr && !arena.holds(*t)) return false;
  }
  return true;
}

/// Fills the inputs, poisons the outputs and draws the scalar options.
static void fill_call(Random& random, Arena& arena, DType dtype, DType out, FuzzCall& call) {
  flashcore_params& p = call.params;
  for (const std::size_t slot : {kQ, kK, kV, kBias, kMask, kAlibi, kSinks}) {
    const bool is_bias_f32 = slot == kBias && call.tensors[slot].tensor.dtype.bits == 32;
    if (*tensor_slot(p, slot) == nullptr) continue;
    fill_slot(random, arena, slot,
              slot == kMask                                     ? DType::boolean
              : slot == kAlibi || slot == kSinks || is_bias_f32 ? DType::f32
                                                                : dtype);
  }
  fill_poison(arena, kOut, out);
  fill_poison(arena, kLse, wide(dtype));
  p.causal = random.chance(0.4) ? 1 : 0;
  if (random.chance(0.3)) p.window_left = random.between(0, 9);
  if (random.chance(0.2)) p.softcap = 2.0;
  if (random.chance(0.3)) p.num_splits = static_cast<std::int32_t>(random.between(1, 3));
}

void draw_call(Random& random, Arena& arena, FuzzCall& call) {
  call = {};
  flashcore_params& p = call.params;
  flashcore_params_init(&p, sizeof p);
  const DType dtype = random.pick(kTypes);
  const std::int64_t batch = random.between(1, 2), kv_heads = random.between(1, 2);
  const std::int64_t heads = kv_heads * random.between(1, 2);
  const std::int64_t q_len = random.between(1, 4);
  std::int64_t kv_len = random.between(1, 12);
  const std::int64_t dim = random.between(1, 9), v_dim = random.between(1, 9);
  const bool q_varlen = random.chance(0.2), kv_varlen = random.chance(0.2);
  p.partial = random.chance(0.1) ? 1 : 0;
  const DType out = p.partial != 0 ? wide(dtype) : random.chance(0.2) ? DType::f32 : dtype;
  const auto tensor = [&](std::size_t slot, DType type, std::initializer_list<std::int64_t> shape) {
    place(random, arena, slot, call.tensors[slot], type, shape);
    *tensor_slot(p, slot) = &call.tensors[slot].tensor;
  };
  const auto draw_ends = [&](std::int64_t each) {  // cu_seqlens
    std::vector<std::int64_t> ends{0};
    for (std::int64_t b = 0; b < batch; ++b) ends.push_back(ends.back() + random.between(0, each));
    return ends;
  };
  if (q_varlen) {
    const auto ends = draw_ends(q_len);
    tensor(kQ, dtype, {ends.back(), heads, dim});
    tensor(kOut, out, {ends.back(), heads, v_dim});
    if (p.partial != 0 || random.chance(0.7)) tensor(kLse, wide(dtype), {heads, ends.back()});
    tensor(kCuQ, DType::i32, {batch + 1});
    fill_ints(arena, kCuQ, ends);
    call.tensors[kCuQ].tensor.strides = nullptr;
  } else {
    tensor(kQ, dtype, {batch, heads, q_len, dim});
    tensor(kOut, out, {batch, heads, q_len, v_dim});
    if (p.partial != 0 || random.chance(0.7)) tensor(kLse, wide(dtype), {batch, heads, q_len});
  }
  if (kv_varlen) {
    const auto ends = draw_ends(kv_len);
    tensor(kK, dtype, {ends.back(), kv_heads, dim});
    tensor(kV, dtype, {ends.back(), kv_heads, v_dim});
    tensor(kCuK, DType::i32, {batch + 1});
    fill_ints(arena, kCuK, ends);
    call.tensors[kCuK].tensor.strides = nullptr;
  } else if (random.chance(0.3)) {
    const std::int64_t page_size = random.between(1, 4);
    const std::int64_t each = (kv_len + page_size - 1) / page_size;
    const std::int64_t pages = batch * each + random.between(0, 1);
    kv_len = each * page_size;
    tensor(kK, dtype, {pages, page_size, kv_heads, dim});
    tensor(kV, dtype, {pages, page_size, kv_heads, v_dim});
    tensor(kBlockTable, DType::i32, {batch, each});
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < batch * each; ++i) ids.push_back(random.below(pages));
    fill_ints(arena, kBlockTable, ids);
    call.tensors[kBlockTable].tensor.strides = nullptr;
  } else {
    tensor(kK, dtype, {batch, kv_heads, kv_len, dim});
    tensor(kV, dtype, {batch, kv_heads, kv_len, v_dim});
  }
  if (!q_varlen && !kv_varlen && random.chance(0.3)) {
    tensor(kBias, random.chance(0.5) ? dtype : DType::f32,
           {random.chance(0.5) ? batch : 1, random.chance(0.5) ? heads : 1, q_len, kv_len});
  }
  if (!q_varlen && !kv_varlen && random.chance(0.3)) {
    tensor(kMask, DType::boolean, {1, random.chance(0.5) ? heads : 1, 1, kv_len});
  }
  if (random.chance(0.2)) tensor(kAlibi, DType::f32, {heads});
  if (random.chance(0.2)) tensor(kSinks, DType::f32, {heads});
  const std::pair<std::size_t, std::int64_t> per_sequence[] = {
      {kUsedK, 0}, {kQStart, random.between(-3, 9)}, {kKStart, random.between(-3, 3)}};
  for (const auto& [slot, value] : per_sequence) {
    if (random.chance(0.2)) {
      tensor(slot, DType::i32, {batch});
      call.tensors[slot].tensor.strides = nullptr;
      fill_ints(arena, slot, std::vector<std::int64_t>(static_cast<std::size_t>(batch), value));
    }
  }
  fill_call(random, arena, dtype, out, call);
}

const flashcore_tensor** FuzzAppend::slot(std::size_t index) {
  const flashcore_tensor** slots[] = {
      &params.k_new,       &params.v_new,         &params.k, &params.v, &params.used_k,
      &params.block_table, &params.cu_seqlens_new};
  return slots[index];
}

bool FuzzAppend::fits(const Arena& arena) const {
  for (std::size_t i = 0; i < kTensors; ++i) {
    const flashcore_tensor* t = *const_cast<FuzzAppend&>(*this).slot(i);
    if (t != nullptr && !arena.holds(*t)) return false;
  }
  return true;
}

void draw_append(Random& random, Arena& arena, FuzzAppend& append) {
  append = {};
  append.params.struct_size = sizeof append.params;
  const DType dtype = random.pick(kTypes);
  const std::int64_t batch = random.between(1, 2), heads = random.between(1, 2);
  const std::int64_t dim = random.between(1, 6), v_dim = random.between(1, 6);
  const std::int64_t capacity = random.between(1, 8);
  const bool paged = random.chance(0.6), varlen = random.chance(0.4);
  const auto tensor = [&](std::size_t slot, DType type, std::initializer_list<std::int64_t> shape) {
    place(random, arena, slot, append.tensors[slot], type, shape);
    *append.slot(slot) = &append.tensors[slot].tensor;
  };
  const auto numbers = [&](std::size_t slot, std::initializer_list<std::int64_t> shape,
                           const std::vector<std::int64_t>& values) {
    tensor(slot, DType::i32, shape);
    append.tensors[slot].tensor.strides = nullptr;
    fill_ints(arena, slot, values);
  };
  std::int64_t room = capacity;  // rows of each sequence
  if (paged) {
    const std::int64_t page_size = random.between(1, 5), each = (capacity - 1) / page_size + 1;
    const std::int64_t pages = batch * each + random.between(0, 2);
    room = each * page_size;
    tensor(2, dtype, {pages, page_size, heads, dim});
    tensor(3, dtype, {pages, page_size, heads, v_dim});
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < batch * each; ++i) ids.push_back(pages - 1 - i);
    numbers(5, {batch, each}, ids);
  } else {
    tensor(2, dtype, {batch, heads, capacity, dim});
    tensor(3, dtype, {batch, heads, capacity, v_dim});
  }
  const std::int64_t new_len = random.between(0, room);
  std::vector<std::int64_t> used, ends{0};
  for (std::int64_t b = 0; b < batch; ++b) {
    used.push_back(random.between(0, room - new_len));
    ends.push_back(ends.back() + random.between(0, new_len));
  }
  if (varlen) {
    tensor(0, dtype, {ends.back(), heads, dim});
    tensor(1, dtype, {ends.back(), heads, v_dim});
    numbers(6, {batch + 1}, ends);
  } else {
    tensor(0, dtype, {batch, heads, new_len, dim});
    tensor(1, dtype, {batch, heads, new_len, v_dim});
  }
  numbers(4, {batch}, used);
  fill_slot(random, arena, 0, dtype);
  fill_slot(random, arena, 1, dtype);
  fill_poison(arena, 2, dtype);
  fill_poison(arena, 3, dtype);
}

void FuzzMerge::gather() {
  for (std::size_t i = 0; i < 3; ++i) {
    outs[i] = partials[2 * i].tensor;
    lses[i] = partials[2 * i + 1].tensor;
  }
}

bool FuzzMerge::fits(const Arena& arena) const {
  if (params.parts <= 3 && params.outs != nullptr && params.lses != nullptr) {
    for (std::size_t i = 0; i < params.parts; ++i) {
      if (!arena.holds(outs[i]) || !arena.holds(lses[i])) return false;
    }
  }
  for (const flashcore_tensor* t : {params.out, params.lse, params.sinks}) {
    if (t != nullptr && !arena.holds(*t)) return false;
  }
  return params.parts <= 3 || params.parts > INT32_MAX;  // others would read past the arrays
}

void draw_merge(Random& random, Arena& arena, FuzzMerge& merge) {
  merge = {};
  const DType dtype = random.chance(0.3) ? DType::f64 : DType::f32;
  const bool varlen = random.chance(0.3);
  const std::int64_t batch = random.between(1, 2), heads = random.between(1, 3);
  const std::int64_t rows = random.between(1, 5), dim = random.between(1, 9);
  const auto place_out = [&](std::size_t slot, FuzzTensor& t, DType type) {
    if (varlen) {
      place(random, arena, slot, t, type, {rows, heads, dim});
    } else {
      place(random, arena, slot, t, type, {batch, heads, rows, dim});
    }
  };
  const auto place_lse = [&](std::size_t slot, FuzzTensor& t) {
    if (varlen) {
      place(random, arena, slot, t, dtype, {heads, rows});
    } else {
      place(random, arena, slot, t, dtype, {batch, heads, rows});
    }
  };
  merge.params.struct_size = sizeof merge.params;
  merge.params.parts = static_cast<std::size_t>(random.between(1, 3));
  for (std::size_t i = 0; i < 3; ++i) {
    place_out(2 * i, merge.partials[2 * i], dtype);
    place_lse(2 * i + 1, merge.partials[2 * i + 1]);
    fill_slot(random, arena, 2 * i, dtype);
    fill_slot(random, arena, 2 * i + 1, dtype);
  }
  place_out(6, merge.out, random.pick(kTypes));
  place_lse(7, merge.lse);
  place(random, arena, 8, merge.sinks, DType::f32, {heads});
  fill_slot(random, arena, 8, DType::f32);
  merge.params.outs = merge.outs;
  merge.params.lses = merge.lses;
  merge.params.out = &merge.out.tensor;
  if (random.chance(0.7)) merge.params.lse = &merge.lse.tensor;
  if (random.chance(0.3)) merge.params.sinks = &merge.sinks.tensor;
}

TensorView view_of(const flashcore_tensor* t) {
  TensorView view;
  if (t == nullptr) return view;
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::i32,
                            DType::boolean, DType::e4m3, DType::e5m2, DType::int8, DType::u8}) {
    const flashcore_dtype code = c_dtype(dtype);
    if (code.code == t->dtype.code && code.bits == t->dtype.bits) view.dtype = dtype;
  }
  view.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(t->data) + t->byte_offset);
  view.rank = t->ndim;
  std::int64_t stride = 1;
  for (int i = t->ndim - 1; i >= 0; --i) {
    view.shape[i] = t->shape[i];
    view.strides[i] = t->strides != nullptr ? t->strides[i] : stride;
    stride *= std::max<std::int64_t>(t->shape[i], 1);
  }
  return view;
}

Tensors tensors_of(const FuzzCall& call) {
  const flashcore_params& p = call.params;
  // Layout 1 means [batch, len, heads, dim] for tensors that are neither varlen nor paged.
  const auto main_view = [&](const flashcore_tensor* t, bool has_layout) {
    TensorView view = view_of(t);
    if (p.layout == 1 && has_layout && view.rank == 4) {
      std::swap(view.shape[1], view.shape[2]);
      std::swap(view.strides[1], view.strides[2]);
    }
    return view;
  };
  const bool kv_has_layout = p.cu_seqlens_k == nullptr && p.block_table == nullptr;
  TensorView mask = view_of(p.mask);
  if (mask.dtype == DType::u8) mask.dtype = DType::boolean;  // both are 8-bit uint in C
  return {.q = main_view(p.q, true),
          .k = main_view(p.k, kv_has_layout),
          .v = main_view(p.v, kv_has_layout),
          .out = main_view(p.out, true),
          .lse = view_of(p.lse),
          .bias = view_of(p.bias),
          .mask = mask,
          .alibi_slopes = view_of(p.alibi_slopes),
          .sinks = view_of(p.sinks),
          .cu_seqlens_q = view_of(p.cu_seqlens_q),
          .cu_seqlens_k = view_of(p.cu_seqlens_k),
          .seqused_k = view_of(p.used_k),
          .block_table = view_of(p.block_table),
          .q_start = view_of(p.q_start),
          .k_start = view_of(p.k_start)};
}

Options options_of(const FuzzCall& call) {
  const flashcore_params& p = call.params;
  Options o;
  o.causal = p.causal != 0;
  o.window_left = p.window_left;
  o.window_right = p.window_right;
  if (p.has_scale != 0) o.scale = p.scale;
  o.softcap = p.softcap;
  o.partial = p.partial != 0;
  o.max_q_len = p.max_q_len;
  o.max_kv_len = p.max_kv_len;
  return o;
}

}  // namespace flashcore::test
