// Products with 8-bit K and V: tiles of codes become f16 or bf16 operands in registers, exactly
// (core/dequant_f16.h). Scales never touch those: they multiply scores, probabilities and the
// output, which are f32.
#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/mma.cuh"
#include "cuda/primitives/reduce.cuh"
#include "cuda/sm80/load.cuh"
#include "cuda/sm80/score.cuh"
#include "cuda/sm80/softmax.cuh"

namespace flashcore::cuda::sm80 {

/// Calls use(read) with the reader of a format, read(codes) giving their pairs: one branch for a
/// whole tile.
template <typename C, typename Use>
__device__ __forceinline__ void with_codes(const AttentionParams& p, core::Element element,
                                           Use use) {
  using core::Element;
  const auto use_reader = [&](auto reader) {
    use([&](std::uint32_t codes) { return reader(codes & core::code_mask(p)); });
  };
  if (element == Element::e4m3) {
    use_reader(core::Dequantizer<Element::e4m3>(element));
  } else if (element == Element::e5m2) {
    use_reader(core::Dequantizer<Element::e5m2>(element));
  } else {
    use_reader(core::Dequantizer<Element::int8>(element));
  }
}

// ---------------------------------------------------------------------------------------------
// Before the loop

/// 16 columns of a query from `column` on, 16-bit or 8-bit, in the order of even_odd_index():
/// `even` is the first chunk, `odd` the second. Past head_dim they are 0.
template <typename C, bool kFastPath>
__device__ __forceinline__ void read_paired_query(std::uint32_t (&even)[4], std::uint32_t (&odd)[4],
                                                  const AttentionParams& p, std::int64_t offset,
                                                  int column) {
  const int left = p.head_dim - column;
  const bool vectors = kFastPath || (p.async_rows && left >= 16);
  const std::int64_t first = offset + column * p.q_strides.column;
  if (core::is_8bit(p.q_element)) {
    const auto* g_q = static_cast<const std::uint8_t*>(p.q) + first;
    std::uint32_t codes[4];
    if (vectors) {
      const uint4 all = *reinterpret_cast<const uint4*>(g_q);
      codes[0] = all.x, codes[1] = all.y, codes[2] = all.z, codes[3] = all.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes[i] = gather_word(g_q + 4 * i * p.q_strides.column, left - 4 * i, p.q_strides.column,
                               core::zero_codes(p.q_element));
      }
    }
    with_codes<C>(p, p.q_element, [&](auto read) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const core::F16x2Pair pairs = read(codes[i]);
        even[i] = pairs.even;
        odd[i] = pairs.odd;
      }
    });
    return;
  }
  const auto* g_q = static_cast<const std::uint16_t*>(p.q) + first;
  std::uint32_t words[8];
  if (vectors) {
    const uint4 low = *reinterpret_cast<const uint4*>(g_q);
    const uint4 high = *reinterpret_cast<const uint4*>(g_q + 8);
    words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
    words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      words[i] = gather_word(g_q + 2 * i * p.q_strides.column, left - 2 * i, p.q_strides.column);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    even[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
    odd[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
  }
}

/// bf16 queries become f16 operands: times a power of two that brings the largest of a row, whose
/// pieces are with kLanes neighbouring lanes, to 2^14 or more. What is then below f16's range is
/// below 2^-38 of the largest. Returns what undoes it.
template <int kLanes>
__device__ __forceinline__ float narrow_row(std::uint32_t (&even)[4], std::uint32_t (&odd)[4]) {
  std::uint32_t largest = 0;  // bf16 without the sign: larger bits, larger value
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    largest = max(largest, max(even[i] & 0x7fffu, even[i] >> 16 & 0x7fffu));
    largest = max(largest, max(odd[i] & 0x7fffu, odd[i] >> 16 & 0x7fffu));
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  // Infinities and NaN stay what they are under any factor.
  const int exponent = min(max(static_cast<int>(largest >> 7), 15), 253) - 127;
  const float unit = core::float_of_bits(static_cast<std::uint32_t>(127 + exponent - 14) << 23);
  const float inverse = core::float_of_bits(static_cast<std::uint32_t>(127 - exponent + 14) << 23);
  const auto narrow = [&](std::uint32_t pair) {
    return pack<__half>(core::float_of_bits(pair << 16) * inverse,
                        core::float_of_bits(pair & 0xffff0000u) * inverse);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    even[i] = narrow(even[i]);
    odd[i] = narrow(odd[i]);
  }
  return unit;
}

/// Q in the order that K's codes come in, and what its products are multiplied by: of_row, and what
/// undoes the narrowing. (Queries that are codes have scales of their own, see leave_scales().)
template <typename C, bool kFastPath>
__device__ __forceinline__ void load_paired_queries(SharedStorage<C>& s, const AttentionParams& p,
                                                    const WorkTile& item, float of_row) {
  using Tile = typename C::QueryTile;
  constexpr int kGroups = C::kHeadDim / 16;
  const std::int64_t sequence = item.b * p.q_strides.batch + item.seq.q_row * p.q_strides.row;
#pragma unroll(kFastPath ? 4 : 1)
  for (int index = threadIdx.x; index < C::kTileQ * kGroups; index += C::kThreads) {
    const int r = index / kGroups, group = index % kGroups;
    std::uint32_t even[4] = {}, odd[4] = {};
    if (r < item.rows && (kFastPath || 16 * group < p.head_dim)) {
      const Row row = row_of(p, item, r);
      read_paired_query<C, kFastPath>(
          even, odd, p, sequence + row.head * p.q_strides.head + row.query * p.q_strides.row,
          16 * group);
    }
    if (!core::is_8bit(p.q_element)) {
      const float unit = p.q_element == core::Element::bf16 ? narrow_row<kGroups>(even, odd) : 1.f;
      if (group == 0) s.of_row[r] = of_row * unit;
    }
    const std::uint32_t s_q = shared_address(s.q);
    store_shared_16(s_q + Tile::offset(r, 2 * group), even);
    store_shared_16(s_q + Tile::offset(r, 2 * group + 1), odd);
  }
}

/// What one thread finds out about scales: those of single keys come with the keys.
struct FoundScales {
  float of_row;  // of the row of the tile with the thread's number
  float of_output;
};

/// Reads them. The values are not looked at: the loads are under way while others begin.
template <typename C>
__device__ __forceinline__ FoundScales find_scales(const AttentionParams& p, const WorkTile& item) {
  static_assert(C::kTileQ <= C::kThreads);
  const auto of_head = [&](core::Element element, const core::Scales& scales) {
    return core::code_unit(element) *
           (scales.is_per_block() ? core::format_step(element)
                                  : core::row_scale(p, element, scales, item.b, item.kv_head, 0));
  };
  FoundScales found{score_scale(p) * of_head(p.k_element, p.k_scale),
                    of_head(p.v_element, p.v_scale)};
  if (core::is_8bit(p.q_element)) {
    const Row row = row_of(p, item, min(static_cast<int>(threadIdx.x), item.rows - 1));
    found.of_row *= core::code_unit(p.q_element) *
                    core::row_scale(p, p.q_element, p.q_scale, item.b, row.head, row.query);
  }
  return found;
}

/// Leaves them in shared memory. The values' own scales may be far from 1: a unit keeps their
/// products with probabilities inside the operand's range.
template <typename C>
__device__ __forceinline__ void leave_scales(Kv8Scales<C>& s, const FoundScales& found,
                                             const AttentionParams& p, const WorkTile& item) {
  if (core::is_8bit(p.q_element) && threadIdx.x < C::kTileQ) s.of_row[threadIdx.x] = found.of_row;
  if (threadIdx.x >= 32) return;
  float unit = 1.f;
  if (p.v_scale.is_per_block() && !item.visible.empty()) {
    const float* g_scales = p.v_scale.address(item.b, item.kv_head, 0);
    float largest = 0.f;
    const std::int32_t end = (item.visible.end - 1) / p.v_scale.block_rows + 1;
    for (std::int32_t block = item.visible.begin / p.v_scale.block_rows + threadIdx.x; block < end;
         block += 32) {
      largest = max_ignore_nan(largest, fabsf(g_scales[block * p.v_scale.block]));
    }
    unit = core::power_of_two_near(warp_max(largest));
  }
  if (threadIdx.x == 0) {
    s.v_unit_inverse = 1.f / unit;
    s.of_output = unit * found.of_output;
  }
}

// ---------------------------------------------------------------------------------------------
// A step

/// score = Q K^T of the warp's rows and the keys from row s_key of the tile on, in codes. One chunk
/// of K is one k-step.
template <typename C, bool kFastPath, int kKeys>
__device__ __forceinline__ void gemm_qk_kv8(AccS<C, kKeys>& acc_s,
                                            const QFragments<C, kFastPath>& q,
                                            const SharedStorage<C>& s, const AttentionParams& p,
                                            int stage, int s_key, const Thread<C>& t) {
  using Tile = typename C::KeyTile;
  constexpr bool kKept = QFragments<C, kFastPath>::kKept;
  const core::Coordinate b = core::ldmatrix_b(t.lane);
  const std::uint32_t s_k = shared_address(s.k[stage]) + Tile::offset(s_key + b.row, b.column);
  with_codes<C>(p, p.k_element, [&](auto read) {
#pragma unroll(kKept ? C::kSteps / 2 : kFastPath ? 2 : 1)
    for (int steps = 0; steps < C::kSteps; steps += 2) {
      [[maybe_unused]] std::uint32_t q_now[2][C::kRowTiles][4];
      if constexpr (!kKept) {
        read_queries<C>(q_now[0], s, steps, t);
        read_queries<C>(q_now[1], s, steps + 1, t);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        std::uint32_t k[4];  // of two n-tiles, two k-steps each
        ldmatrix_x4(k, Tile::advance_rows8(Tile::advance_k(s_k, steps / 2), n));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const core::F16x2Pair pairs = read(k[i]);
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) {
            if constexpr (kKept) {
              mma_m16n8k16<typename C::Operand>(acc_s[m][n + i / 2], q.read[steps + i % 2][m],
                                                pairs.even, pairs.odd);
            } else {
              mma_m16n8k16<typename C::Operand>(acc_s[m][n + i / 2], q_now[i % 2][m], pairs.even,
                                                pairs.odd);
            }
          }
        }
      }
    }
  });
}

/// Multiplies the columns of a warp's scores or probabilities by what belongs to their keys.
template <typename C, int kKeys>
__device__ __forceinline__ void scale_columns(AccS<C, kKeys>& acc_s, const float* s_of_key,
                                              float factor, const Thread<C>& t) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    const float2 scale = *reinterpret_cast<const float2*>(s_of_key + t.column(n, 0));
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        acc_s[m][n][reg] *= (reg % 2 == 0 ? scale.x : scale.y) * factor;
      }
    }
  }
}

template <typename C, int kKeys>
__device__ __forceinline__ void scale_scores(AccS<C, kKeys>& acc_s, const Kv8Scales<C>& s,
                                             const AttentionParams& p, int stage, int s_key,
                                             const Thread<C>& t) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    const float of_row[2] = {s.of_row[t.row(m, 0)], s.of_row[t.row(m, 1)]};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) acc_s[m][n][reg] *= of_row[reg / 2];
    }
  }
  if (p.k_scale.is_per_block()) scale_columns<C, kKeys>(acc_s, s.k_of_key[stage] + s_key, 1.f, t);
}

/// Probabilities have been summed: what follows is their product with V.
template <typename C, int kKeys>
__device__ __forceinline__ void scale_probabilities(AccS<C, kKeys>& acc_s, const Kv8Scales<C>& s,
                                                    const AttentionParams& p, int stage, int s_key,
                                                    const Thread<C>& t) {
  if (!p.v_scale.is_per_block()) return;
  scale_columns<C, kKeys>(acc_s, s.v_of_key[stage] + s_key, s.v_unit_inverse, t);
}

/// O += P V of the warp's rows and keys, V in codes. One chunk of V is two n-tiles: its even
/// columns and its odd ones.
template <typename C, int kKeys>
__device__ __forceinline__ void gemm_pv_kv8(AccO<C>& acc_o, const AccS<C, kKeys>& probabilities,
                                            const SharedStorage<C>& s, const AttentionParams& p,
                                            int stage, int s_key, const Thread<C>& t) {
  using T = typename C::Operand;
  using Tile = typename C::KeyTile;
  const core::Coordinate b = core::ldmatrix_b_trans(t.lane);
  const std::uint32_t s_v = shared_address(s.v[stage]) + Tile::offset(s_key + b.row, b.column);
  with_codes<C>(p, p.v_element, [&](auto read) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      std::uint32_t a[C::kRowTiles][4];
      pack_probabilities<C, kKeys>(a, probabilities, step);
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; n += 4) {
        std::uint32_t v[4];  // of two chunks, eight keys each
        ldmatrix_x4_trans(v, Tile::advance_rows8(Tile::advance_k(s_v, n / 4), 2 * step));
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          const core::F16x2Pair first = read(v[2 * chunk]), second = read(v[2 * chunk + 1]);
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) {
            mma_m16n8k16<T>(acc_o[m][n + 2 * chunk], a[m], first.even, second.even);
            mma_m16n8k16<T>(acc_o[m][n + 2 * chunk + 1], a[m], first.odd, second.odd);
          }
        }
      }
    }
  });
}

}  // namespace flashcore::cuda::sm80
