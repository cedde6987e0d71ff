#include "verify/inputs/case_memory.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/backend.h"
#include "core/numeric.h"
#include "core/quant_formats.h"
#include "verify/inputs/call.h"
#include "verify/inputs/case_lengths.h"
#include "verify/inputs/random.h"

namespace flashcore::verify {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kGuardBytes = 256;

// Larger tensors repeat a table of this (prime) length.
constexpr std::int64_t kTableLength = 1'000'003;

/// Rounds to odd, so that the float rounds to any format of at most 21 bits like the double.
float rounded_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const double back = nearest;
  if (back == value || std::isnan(value)) return nearest;
  const std::uint32_t away_from_zero = std::fabs(back) > std::fabs(value) ? 1 : 0;
  return core::float_of_bits((core::bits_of_float(nearest) - away_from_zero) | 1u);
}

/// Standard deviation of the stored values: a quarter of the range of an 8-bit format with a scale.
double stored_sigma(DType dtype, ScaleKind scale, double sigma) {
  if (!is_8bit(dtype) || scale == ScaleKind::none) return sigma;
  return dtype == DType::e5m2 ? 57344.0 / 4 : dtype == DType::int8 ? 127.0 / 4 : 448.0 / 4;
}

DType stored(const CaseSpec& s, DType storage) {
  return storage == DType::none ? s.dtype : storage;
}

std::byte* address(std::vector<std::byte>& bytes, const TensorView& t) {
  return bytes.data() + reinterpret_cast<std::uintptr_t>(t.data);
}

double largest_finite(DType dtype) {
  switch (dtype) {
    case DType::f64: return std::numeric_limits<double>::max();
    case DType::f16: return 65504;
    case DType::bf16: return core::float_of_bf16(0x7f7f);
    default: return std::numeric_limits<float>::max();
  }
}

}  // namespace

std::uint64_t poison(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x7ff8dead0000beefu;
    case DType::f32: return 0x7fc0beefu;
    case DType::f16: return 0x7e5bu;
    case DType::bf16: return 0x7fdbu;
    default: return 0;
  }
}

bool are_equal(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

std::uint8_t encode(DType dtype, double value) {
  const core::Element element = element_of(dtype);
  // A NaN without an encoding becomes the encoding that is never produced.
  if (std::isnan(value) && !core::has_nan(element)) return dtype == DType::int8 ? 0x80 : 0;
  if (dtype == DType::u8) value /= 448.0 / 127.0;
  return core::encode(element, rounded_to_odd(value)).bits;
}

void store(void* data, DType dtype, std::int64_t index, double value) {
  switch (dtype) {
    case DType::f64: static_cast<double*>(data)[index] = value; break;
    case DType::f32: static_cast<float*>(data)[index] = static_cast<float>(value); break;
    case DType::f16:
      static_cast<std::uint16_t*>(data)[index] = core::f16_of_float(static_cast<float>(value));
      break;
    case DType::bf16:
      static_cast<std::uint16_t*>(data)[index] = core::bf16_of_float(static_cast<float>(value));
      break;
    case DType::i32:
      static_cast<std::int32_t*>(data)[index] = static_cast<std::int32_t>(value);
      break;
    case DType::boolean: static_cast<std::uint8_t*>(data)[index] = value != 0 ? 1 : 0; break;
    case DType::e4m3:
    case DType::e5m2:
    case DType::int8:
    case DType::u8: static_cast<std::uint8_t*>(data)[index] = encode(dtype, value); break;
    case DType::none: break;
  }
}

/// Reserves memory for a tensor. Until the block is complete, `data` is the offset in the block.
TensorView CaseMemory::place(DType dtype, std::vector<std::int64_t> shape, MemoryLayout layout) {
  TensorView t;
  t.dtype = dtype;
  t.rank = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  std::vector<int> order(shape.size());  // axes from slowest to fastest
  for (int i = 0; i < t.rank; ++i) order[static_cast<std::size_t>(i)] = i;
  if (layout == MemoryLayout::rows_first && t.rank >= 3) {
    std::swap(order[static_cast<std::size_t>(t.rank - 3)],
              order[static_cast<std::size_t>(t.rank - 2)]);
  }
  std::int64_t stride = layout == MemoryLayout::strided_columns ? 2 : 1;
  for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
    t.strides[*axis] = stride;
    stride *= std::max<std::int64_t>(t.shape[*axis], 1);
    // Keeps rows of 16-bit and 8-bit elements 16-byte aligned.
    if (layout == MemoryLayout::padded) stride += is_8bit(dtype) ? 16 : 8;
  }
  const std::int64_t size = size_of(dtype);
  auto offset = static_cast<std::int64_t>(bytes_.size()) + kGuardBytes;
  offset = (offset + kAlignment - 1) / kAlignment * kAlignment;
  if (layout == MemoryLayout::misaligned) offset += size;
  t.data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(offset));
  std::int64_t reach = 1;
  for (int i = 0; i < t.rank; ++i)
    reach += std::max<std::int64_t>(t.shape[i] - 1, 0) * t.strides[i];
  bytes_.resize(static_cast<std::size_t>(offset + reach * size + kGuardBytes), std::byte{0xff});
  return t;
}

TensorView CaseMemory::place_compact(DType dtype, std::vector<std::int64_t> shape) {
  return place(dtype, std::move(shape), MemoryLayout::heads_first);
}

void CaseMemory::fill_normal(const TensorView& t, double sigma, std::uint64_t stream) {
  Random random(spec_.seed, stream);
  std::int64_t count = 1;
  for (int i = 0; i < t.rank; ++i) count *= t.shape[i];
  std::byte* data = address(bytes_, t);
  if (count <= 4 * kTableLength) {
    for_each_element(t,
                     [&](std::int64_t at) { store(data, t.dtype, at, sigma * random.normal()); });
    return;
  }
  std::vector<std::uint64_t> table(kTableLength);  // rounded once, then copied
  for (std::uint64_t& bits : table) store(&bits, t.dtype, 0, sigma * random.normal());
  std::int64_t next = 0;
  const auto size = static_cast<std::size_t>(size_of(t.dtype));
  for_each_element(t, [&](std::int64_t at) {
    std::memcpy(data + static_cast<std::size_t>(at) * size, &table[static_cast<std::size_t>(next)],
                size);
    if (++next == kTableLength) next = 0;
  });
}

void CaseMemory::fill_scale(const TensorView& t, double typical, std::uint64_t stream) {
  if (!t.given()) return;
  Random random(spec_.seed, stream);
  for_each_element(t, [&](std::int64_t at) {
    store(address(bytes_, t), DType::f32, at, typical * std::exp2(2 * random.uniform() - 1));
  });
}

/// Derived sizes: rows of varlen tensors, capacities of score tensors and scales, pages.
struct CaseMemory::Sizes {
  CaseLengths lengths;
  std::int64_t q_capacity = 0, k_capacity = 0;
  std::int64_t pages = 0, max_pages = 0;
  bool padded_table = false;
};

CaseMemory::CaseMemory(const CaseSpec& spec) : spec_(spec) {
  CaseSpec& s = spec_;
  Sizes sizes{draw_lengths(s)};
  const CaseLengths& l = sizes.lengths;
  if (l.sets_max_q_len) s.options.max_q_len = s.q_len;
  if (l.sets_max_kv_len) s.options.max_kv_len = s.kv_len;
  const bool full_q = !s.q_varlen || (s.options.max_q_len > 0 && s.q_len <= l.total_q);
  const bool full_k = !s.kv_varlen || (s.options.max_kv_len > 0 && s.kv_len <= l.total_k);
  sizes.q_capacity = full_q ? s.q_len : l.total_q;
  sizes.k_capacity = full_k ? s.kv_len : l.total_k;
  if (s.page_size > 0) {
    // Some columns of the table and some pages stay unused.
    Random random(s.seed, kPageTable);
    const std::int64_t pages_each = (s.kv_len + s.page_size - 1) / s.page_size;
    sizes.max_pages = pages_each + (s.used_k ? random.between(0, 2) : 0);
    sizes.k_capacity = sizes.max_pages * s.page_size;
    if (!s.kv_varlen) {
      sizes.pages = s.batch * pages_each + random.between(1, 3);
      sizes.padded_table = random.chance(0.5);
    }
  }
  place_operands(sizes);
  place_options(sizes);
  place_scales(sizes);
  fill_operands();
  fill_lengths(sizes);
  if (s.page_size > 0) assign_pages(l.used_k);
  Tensors& t = tensors_;
  if (!s.kv_varlen && s.shared_kv) {
    for (TensorView* view : {&t.k, &t.v}) {
      view->shape[0] = s.batch;
      view->strides[0] = 0;
    }
  }
  fill_scores();
  if (s.non_finite) sprinkle_non_finite();
  poison_outputs();
  for (TensorView* view : views_of(t)) {
    if (view->given()) view->data = address(bytes_, *view);
  }
}

void CaseMemory::place_operands(const Sizes& sizes) {
  const CaseSpec& s = spec_;
  Tensors& t = tensors_;
  const std::int64_t total_q = sizes.lengths.total_q, total_k = sizes.lengths.total_k;
  const DType q_dtype = stored(s, s.q_storage), k_dtype = stored(s, s.k_storage),
              v_dtype = stored(s, s.v_storage);
  const DType out_dtype = s.options.partial ? wide(s.dtype) : s.out_f32 ? DType::f32 : s.dtype;
  if (s.q_varlen) {
    t.q = place(q_dtype, {total_q, s.q_heads, s.head_dim}, s.q_layout);
    t.out = place(out_dtype, {total_q, s.q_heads, s.v_dim}, s.out_layout);
    if (s.lse) t.lse = place_compact(wide(s.dtype), {s.q_heads, total_q});
  } else {
    t.q = place(q_dtype, {s.batch, s.q_heads, s.q_len, s.head_dim}, s.q_layout);
    t.out = place(out_dtype, {s.batch, s.q_heads, s.q_len, s.v_dim}, s.out_layout);
    if (s.lse) t.lse = place_compact(wide(s.dtype), {s.batch, s.q_heads, s.q_len});
  }
  if (s.kv_varlen) {
    t.k = place(k_dtype, {total_k, s.kv_heads, s.head_dim}, s.k_layout);
    t.v = place(v_dtype, {total_k, s.kv_heads, s.v_dim}, s.v_layout);
  } else if (s.page_size > 0) {
    t.k = place(k_dtype, {sizes.pages, s.page_size, s.kv_heads, s.head_dim}, s.k_layout);
    t.v = place(v_dtype, {sizes.pages, s.page_size, s.kv_heads, s.v_dim}, s.v_layout);
    t.block_table = place(DType::i32, {s.batch, sizes.max_pages},
                          sizes.padded_table ? MemoryLayout::padded : MemoryLayout::heads_first);
  } else {
    const std::int64_t batches = s.shared_kv ? std::min<std::int64_t>(s.batch, 1) : s.batch;
    t.k = place(k_dtype, {batches, s.kv_heads, s.kv_len, s.head_dim}, s.k_layout);
    t.v = place(v_dtype, {batches, s.kv_heads, s.kv_len, s.v_dim}, s.v_layout);
  }
}

void CaseMemory::place_options(const Sizes& sizes) {
  const CaseSpec& s = spec_;
  Tensors& t = tensors_;
  const auto score_shape = [&](const ScoreTensorSpec& tensor) -> std::vector<std::int64_t> {
    return {tensor.per_batch ? s.batch : 1, tensor.per_head ? s.q_heads : 1,
            tensor.per_query ? sizes.q_capacity : 1, sizes.k_capacity};
  };
  if (s.bias.given) {
    t.bias = place(s.bias_f32 ? DType::f32 : s.dtype, score_shape(s.bias), s.q_layout);
  }
  if (s.mask_block_q > 0) {
    constexpr std::int64_t kTiles = 3;
    t.mask_blocks = place(DType::i32,
                          {s.mask.per_batch ? s.batch : 1, s.mask.per_head ? s.q_heads : 1,
                           (sizes.q_capacity + s.mask_block_q - 1) / s.mask_block_q,
                           (sizes.k_capacity + s.mask_block_k - 1) / s.mask_block_k},
                          s.k_layout);
    t.mask_bits = place_compact(DType::i32, {kTiles, s.mask_block_q, s.mask_block_k / 32});
  } else if (s.mask.given) {
    t.mask = place(DType::boolean, score_shape(s.mask), s.k_layout);
  }
  if (s.alibi == 1) t.alibi_slopes = place_compact(DType::f32, {s.q_heads});
  if (s.alibi == 2) t.alibi_slopes = place_compact(DType::f32, {s.batch, s.q_heads});
  if (s.sinks) t.sinks = place_compact(DType::f32, {s.q_heads});
  if (s.q_varlen) t.cu_seqlens_q = place_compact(DType::i32, {s.batch + 1});
  if (s.kv_varlen) t.cu_seqlens_k = place_compact(DType::i32, {s.batch + 1});
  if (s.used_k) t.seqused_k = place_compact(DType::i32, {s.batch});
  if (s.q_start) t.q_start = place_compact(DType::i32, {s.batch});
  if (s.k_start) t.k_start = place_compact(DType::i32, {s.batch});
}

void CaseMemory::place_scales(const Sizes& sizes) {
  const CaseSpec& s = spec_;
  const Options& o = s.options;
  const auto place_scale = [&](ScaleKind kind, std::int64_t heads, std::int64_t rows,
                               std::int64_t block, MemoryLayout layout) -> TensorView {
    switch (kind) {
      case ScaleKind::none: return {};
      case ScaleKind::per_tensor: return place_compact(DType::f32, {1});
      case ScaleKind::per_head: return place(DType::f32, {s.batch, heads}, layout);
      case ScaleKind::per_block: break;
    }
    return place(DType::f32, {s.batch, heads, (rows + block - 1) / block}, layout);
  };
  Tensors& t = tensors_;
  t.q_scale = place_scale(s.q_scale, s.q_heads, sizes.q_capacity, o.q_scale_block, s.q_layout);
  t.k_scale = place_scale(s.k_scale, s.kv_heads, sizes.k_capacity, o.kv_scale_block, s.k_layout);
  t.v_scale = place_scale(s.v_scale, s.kv_heads, sizes.k_capacity, o.kv_scale_block, s.v_layout);
}

void CaseMemory::fill_operands() {
  const CaseSpec& s = spec_;
  const double q_sigma = stored_sigma(stored(s, s.q_storage), s.q_scale, s.sigma);
  const double k_sigma = stored_sigma(stored(s, s.k_storage), s.k_scale, s.sigma);
  const double v_sigma = stored_sigma(stored(s, s.v_storage), s.v_scale, s.sigma);
  fill_normal(tensors_.q, q_sigma, kQ);
  fill_normal(tensors_.k, k_sigma, kK);
  fill_normal(tensors_.v, v_sigma, kV);
  fill_scale(tensors_.q_scale, s.sigma / q_sigma, kQScale);
  fill_scale(tensors_.k_scale, s.sigma / k_sigma, kKScale);
  fill_scale(tensors_.v_scale, s.sigma / v_sigma, kVScale);
}

void CaseMemory::fill_lengths(const Sizes& sizes) {
  const CaseSpec& s = spec_;
  const CaseLengths& lengths = sizes.lengths;
  Tensors& t = tensors_;
  const auto put = [&](const TensorView& view, std::int64_t at, double value) {
    store(address(bytes_, view), view.dtype, at, value);
  };
  for (std::int64_t b = 0; b <= s.batch; ++b) {
    if (s.q_varlen) put(t.cu_seqlens_q, b, lengths.q_ends[static_cast<std::size_t>(b)]);
    if (s.kv_varlen) put(t.cu_seqlens_k, b, lengths.k_ends[static_cast<std::size_t>(b)]);
  }
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const auto i = static_cast<std::size_t>(b);
    if (s.used_k) {
      const std::int64_t first = s.kv_varlen ? lengths.k_ends[i] : 0;
      const std::int64_t length = s.kv_varlen ? lengths.k_ends[i + 1] - first : s.kv_len;
      put(t.seqused_k, b, static_cast<double>(lengths.used_k[i]));
      if (!s.shared_kv && s.page_size == 0) hide_unused_keys(b, first, lengths.used_k[i], length);
    }
    if (s.q_start) put(t.q_start, b, lengths.q_start[i]);
    if (s.k_start) put(t.k_start, b, lengths.k_start[i]);
  }
}

/// Writes NaN to the keys of a sequence past used_k.
void CaseMemory::hide_unused_keys(std::int64_t b, std::int64_t first, std::int64_t used,
                                  std::int64_t length) {
  for (const TensorView* view : {&tensors_.k, &tensors_.v}) {
    const int row_axis = spec_.kv_varlen ? 0 : 2, head_axis = 1, column_axis = view->rank - 1;
    const std::int64_t batch_offset = spec_.kv_varlen ? 0 : b * view->strides[0];
    for (std::int64_t h = 0; h < spec_.kv_heads; ++h) {
      for (std::int64_t j = used; j < length; ++j) {
        for (std::int64_t c = 0; c < view->shape[column_axis]; ++c) {
          store(address(bytes_, *view), view->dtype,
                batch_offset + h * view->strides[head_axis] +
                    (first + j) * view->strides[row_axis] + c * view->strides[column_axis],
                std::numeric_limits<double>::quiet_NaN());
        }
      }
    }
  }
}

void CaseMemory::fill_scores() {
  const Tensors& t = tensors_;
  const double infinity = std::numeric_limits<double>::infinity();
  if (t.bias.given()) {
    Random random(spec_.seed, kBias);
    // Callers express masks as -infinity or as the lowest finite number.
    const double largest = largest_finite(t.bias.dtype);
    const double extremes[] = {-infinity, -infinity, -infinity, -largest, -largest, largest};
    for_each_element(t.bias, [&](std::int64_t at) {
      const bool extreme = spec_.bias_has_infinities && random.chance(0.1);
      store(address(bytes_, t.bias), t.bias.dtype, at,
            extreme ? random.pick(extremes) : random.normal());
    });
  }
  if (t.mask.given()) {
    Random random(spec_.seed, kMask);
    for_each_element(t.mask, [&](std::int64_t at) {
      store(address(bytes_, t.mask), t.mask.dtype, at, random.chance(0.8) ? 1 : 0);
    });
  }
  fill_block_mask();
  if (t.alibi_slopes.given()) {
    Random random(spec_.seed, kAlibi);
    for_each_element(t.alibi_slopes, [&](std::int64_t at) {
      store(address(bytes_, t.alibi_slopes), DType::f32, at, random.uniform());
    });
  }
  if (t.sinks.given()) {
    Random random(spec_.seed, kSinks);
    const double largest = largest_finite(DType::f32);
    const double extremes[] = {-infinity, -infinity, -largest, largest};
    for_each_element(t.sinks, [&](std::int64_t at) {
      store(address(bytes_, t.sinks), DType::f32, at,
            random.chance(0.1) ? random.pick(extremes) : 3.0 * random.normal());
    });
  }
}

void CaseMemory::fill_block_mask() {
  const Tensors& t = tensors_;
  if (!t.mask_blocks.given()) return;
  Random random(spec_.seed, kMaskBlocks);
  const auto tiles = static_cast<double>(t.mask_bits.shape[0]);
  // Entries out of range hide their blocks.
  const double entries[] = {0, 0, 0, 1, 1, 1, 2, 3, 4, 2 + tiles, -1};
  for_each_element(t.mask_blocks, [&](std::int64_t at) {
    store(address(bytes_, t.mask_blocks), DType::i32, at, random.pick(entries));
  });
  for_each_element(t.mask_bits, [&](std::int64_t at) {
    const auto word = static_cast<std::int32_t>(random.bits() | random.bits());
    store(address(bytes_, t.mask_bits), DType::i32, at, word);
  });
}

void CaseMemory::sprinkle_non_finite() {
  Random random(spec_.seed, kSpecials);
  const double specials[] = {std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity()};
  const TensorView* tensors[] = {&tensors_.q, &tensors_.k, &tensors_.v};
  for (std::int64_t n = random.between(1, 3); n > 0; --n) {
    const TensorView& t = *random.pick(tensors);
    std::int64_t at = 0;
    bool empty = false;
    for (int i = 0; i < t.rank; ++i) {
      if (t.shape[i] == 0) empty = true;
      if (!empty) at += random.below(t.shape[i]) * t.strides[i];
    }
    if (!empty) store(address(bytes_, t), t.dtype, at, random.pick(specials));
  }
}

void CaseMemory::poison_outputs() {
  for (const TensorView* t : {&tensors_.out, &tensors_.lse}) {
    if (!t->given()) continue;
    const std::uint64_t bits = poison(t->dtype);
    const auto size = static_cast<std::size_t>(size_of(t->dtype));
    for_each_element(*t, [&](std::int64_t at) {
      std::memcpy(address(bytes_, *t) + static_cast<std::size_t>(at) * size, &bits, size);
    });
  }
}

Tensors CaseMemory::at(void* base, Device device) const {
  return moved(tensors_, bytes_.data(), base, device);
}

bool CaseMemory::only_outputs_changed(const std::vector<std::byte>& after) const {
  std::vector<std::byte> expected = bytes_;
  for (const TensorView* t : {&tensors_.out, &tensors_.lse}) {
    if (!t->given()) continue;
    const auto size = static_cast<std::size_t>(size_of(t->dtype));
    const auto first = static_cast<std::size_t>(static_cast<std::byte*>(t->data) - bytes_.data());
    for_each_element(*t, [&](std::int64_t at) {
      const std::size_t offset = first + static_cast<std::size_t>(at) * size;
      std::memcpy(expected.data() + offset, after.data() + offset, size);
    });
  }
  return are_equal(expected, after);
}

}  // namespace flashcore::verify
