// append() into an 8-bit cache: quantizes every new row like quantize() with the scale of its key,
// in dense and paged caches. Also its errors.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "core/quant_formats.h"
#include "flashcore/quant.h"
#include "support/draw.h"

namespace flashcore::test {
namespace {

constexpr std::int64_t kDim = 16, kCapacity = 9, kPage = 3, kHeads = 2;
constexpr int kUsed[] = {5, 2};
constexpr int kTable[2][3] = {{4, 1, 0}, {3, 2, 2}};

enum class Granularity { none, tensor, head, block };

/// Appends three keys (varlen: one and two) to two sequences of 5 and 2 keys.
struct Call {
  bool paged, varlen;
  Tensor k, v, k_new, v_new, used_k, block_table, cu_seqlens_new, k_scale, v_scale;
  AppendTensors tensors;

  Call(bool is_paged, bool is_varlen, DType format, DType wide, Granularity granularity,
       MemoryLayout layout = MemoryLayout::heads_first)
      : paged(is_paged), varlen(is_varlen) {
    Random random(11);
    const Shape cache = paged ? Shape{5, kPage, kHeads, kDim} : Shape{2, kHeads, kCapacity, kDim};
    const Shape rows = varlen ? Shape{3, kHeads, kDim} : Shape{2, kHeads, 3, kDim};
    k = Tensor(format, cache, layout);
    v = Tensor(format, cache);
    k.fill_bits(0x2a);
    v.fill_bits(0x2b);
    k_new = rearranged(draw_normal(random, wide, rows, 30.0), layout);
    v_new = draw_normal(random, wide, rows, 30.0);
    used_k = ints({kUsed[0], kUsed[1]});
    if (paged) {
      block_table = tensor_of(DType::i32, {2, 3}, {4, 1, 0, 3, 2, 2});
    }
    if (varlen) cu_seqlens_new = ints({0, 1, 3});
    const auto scale = [&](double first) {
      const Shape shape = granularity == Granularity::tensor ? Shape{1}
                          : granularity == Granularity::head ? Shape{2, kHeads}
                                                             : Shape{2, kHeads, 5};
      Tensor made(DType::f32, shape);
      std::vector<std::uint64_t> bits;
      for (std::size_t i = 0; i < made.bits().size(); ++i) {
        bits.push_back(
            core::bits_of_float(static_cast<float>(first * (1 + 0.3 * static_cast<double>(i)))));
      }
      made.set_bits(bits);
      return made;
    };
    if (granularity != Granularity::none) {
      k_scale = scale(0.11);
      v_scale = scale(0.7);
    }
    refresh();
    if (granularity == Granularity::block) tensors.kv_scale_block = 2;
  }

  void refresh() {
    tensors.k_new = k_new.view();
    tensors.v_new = v_new.view();
    tensors.k = k.view();
    tensors.v = v.view();
    tensors.seqused_k = used_k.view();
    tensors.block_table = block_table.view();
    tensors.cu_seqlens_new = cu_seqlens_new.view();
    tensors.k_scale = k_scale.view();
    tensors.v_scale = v_scale.view();
  }

  float scale_at(const Tensor& scale, int b, std::int64_t h, int key) const {
    switch (scale.rank()) {
      case 0: return 1.f;
      case 1: return static_cast<float>(scale.at({0}));
      case 2: return static_cast<float>(scale.at({b, h}));
      default: return static_cast<float>(scale.at({b, h, key / tensors.kv_scale_block}));
    }
  }

  /// The expected cache: each new row is quantized on its own.
  Tensor wanted(const Tensor& before, const Tensor& rows, const Tensor& scale) const {
    Tensor want = before;
    for (int b = 0; b < 2; ++b) {
      for (int i = 0; i < (varlen ? 1 + b : 3); ++i) {
        const int key = kUsed[b] + i;
        for (std::int64_t h = 0; h < kHeads; ++h) {
          const Tensor one_scale =
              tensor_of(DType::f32, {1}, {static_cast<double>(scale_at(scale, b, h, key))});
          Tensor row(rows.dtype(), {kDim}), encodings(before.dtype(), {kDim});
          for (std::int64_t d = 0; d < kDim; ++d) {
            row.set({d}, rows.at(varlen ? Shape{b + i, h, d} : Shape{b, h, i, d}));
          }
          EXPECT_TRUE(quantize({row.view(), encodings.view(), one_scale.view()}, {0, true}).ok());
          for (std::int64_t d = 0; d < kDim; ++d) {
            const Shape to =
                paged ? Shape{kTable[b][key / kPage], key % kPage, h, d} : Shape{b, h, key, d};
            static_cast<std::uint8_t*>(want.view().data)[want.offset(to)] =
                static_cast<std::uint8_t>(encodings.bits()[static_cast<std::size_t>(d)]);
          }
        }
      }
    }
    return want;
  }
};

constexpr DType k8BitFormats[] = {DType::e4m3, DType::e5m2, DType::int8, DType::u8};

TEST(Append8Bit, QuantizesNewRowsLikeQuantize) {
  for (const DType format : k8BitFormats) {
    for (const DType wide : {DType::f32, DType::f16, DType::bf16}) {
      for (const Granularity granularity :
           {Granularity::none, Granularity::tensor, Granularity::head, Granularity::block}) {
        for (const bool paged : {false, true}) {
          for (const bool varlen : {false, true}) {
            SCOPED_TRACE(testing::Message()
                         << to_string(format) << " of " << to_string(wide) << " granularity "
                         << static_cast<int>(granularity) << (paged ? " paged" : "")
                         << (varlen ? " varlen" : ""));
            Call call(paged, varlen, format, wide, granularity);
            const Tensor k = call.wanted(call.k, call.k_new, call.k_scale);
            const Tensor v = call.wanted(call.v, call.v_new, call.v_scale);
            const Status status = append(call.tensors);
            ASSERT_TRUE(status.ok()) << status.message();
            EXPECT_EQ(difference(call.k, k), "");
            EXPECT_EQ(difference(call.v, v), "");
          }
        }
      }
    }
  }
}

TEST(Append8Bit, WorksInEveryMemoryLayout) {
  for (int layout = 0; layout < verify::kMemoryLayouts; ++layout) {
    Call call(false, false, DType::e4m3, DType::f16, Granularity::block,
              static_cast<MemoryLayout>(layout));
    const Tensor k = call.wanted(call.k, call.k_new, call.k_scale);
    ASSERT_TRUE(append(call.tensors).ok());
    EXPECT_EQ(difference(call.k, k), "") << layout;
  }
}

// Rows of the cache's own type are copied; scales have no effect.
TEST(Append8Bit, CopiesRowsOfTheSameFormat) {
  for (const DType format : k8BitFormats) {
    Call call(true, false, format, DType::f32, Granularity::head);
    call.k_new = Tensor(format, {2, kHeads, 3, kDim});
    call.v_new = call.k_new;
    std::vector<std::uint64_t> bits;
    for (std::uint64_t i = 0; i < 2 * kHeads * 3 * kDim; ++i) bits.push_back(i * 7 % 256);
    call.k_new.set_bits(bits);
    call.v_new.set_bits(bits);
    call.refresh();
    ASSERT_TRUE(append(call.tensors).ok());
    const auto* cache = static_cast<const std::uint8_t*>(call.k.view().data);
    for (int b = 0; b < 2; ++b) {
      for (int i = 0; i < 3; ++i) {
        const int key = kUsed[b] + i;
        for (std::int64_t h = 0; h < kHeads; ++h) {
          for (std::int64_t d = 0; d < kDim; ++d) {
            const std::int64_t at = ((b * kHeads + h) * 3 + i) * kDim + d;
            ASSERT_EQ(cache[call.k.offset({kTable[b][key / kPage], key % kPage, h, d})],
                      bits[static_cast<std::size_t>(at)]);
          }
        }
      }
    }
  }
}

void expect_refused(const char* name, DType format, const std::function<void(Call&)>& corrupt,
                    const std::vector<std::string>& words) {
  SCOPED_TRACE(name);
  Call call(true, false, format, DType::f32, Granularity::block);
  corrupt(call);
  const Tensor k = call.k, v = call.v;
  const Status status = append(call.tensors);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument) << status.message();
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos)
        << "no \"" << word << "\" in: " << status.message();
  }
  EXPECT_EQ(difference(call.k, k), "") << "the cache was written";
  EXPECT_EQ(difference(call.v, v), "") << "the cache was written";
}

TEST(Append8Bit, RejectsBadTensorsAndWritesNothing) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_refused("NaN in int8", DType::int8,
                 [&](Call& c) {
                   c.v_new.set({1, 0, 2, 3}, nan), c.refresh();
                 },
                 {"v_new", "key 4 of batch 1, head 0", "NaN"});
  expect_refused("NaN in byte", DType::u8,
                 [&](Call& c) {
                   c.k_new.set({0, 1, 0, 15}, nan), c.refresh();
                 },
                 {"k_new", "key 5 of batch 0, head 1", "e4m3 and e5m2 can"});
  expect_refused("a scale of 0", DType::e4m3,
                 [&](Call& c) {
                   c.k_scale.set({1, 1, 1}, 0), c.refresh();
                 },
                 {"k_scale", "key 2 of batch 1, head 1", "positive"});
  expect_refused("too few blocks", DType::e4m3, [&](Call& c) { c.tensors.kv_scale_block = 1; },
                 {"k_scale", "blocks"});
  expect_refused("block scales without kv_scale_block", DType::e4m3,
                 [&](Call& c) { c.tensors.kv_scale_block = 0; }, {"kv_scale_block is 0"});
  expect_refused("rows of another 8-bit format", DType::e4m3,
                 [&](Call& c) {
                   c.k_new = Tensor(DType::int8, {2, kHeads, 3, kDim});
                   c.refresh();
                 },
                 {"k_new: dtype is int8", "e4m3"});
  expect_refused("f64 rows", DType::e4m3,
                 [&](Call& c) {
                   c.v_new = Tensor(DType::f64, {2, kHeads, 3, kDim});
                   c.refresh();
                 },
                 {"v_new: dtype is f64", "f32, f16 or bf16"});
}

TEST(Append8Bit, KeepsNanIfTheFormatHasOne) {
  Call call(false, false, DType::e5m2, DType::f32, Granularity::head);
  call.k_new.set({0, 0, 0, 0}, std::numeric_limits<double>::quiet_NaN());
  call.refresh();
  ASSERT_TRUE(append(call.tensors).ok());
  const auto* cache = static_cast<const std::uint8_t*>(call.k.view().data);
  const std::uint8_t encoding = cache[call.k.offset({0, 0, 5, 0})];
  EXPECT_TRUE(std::isnan(core::decode(core::Element::e5m2, encoding)));
}

// Scales of a 16-bit cache would have no effect.
TEST(Append8Bit, RejectsScalesOfA16BitCache) {
  Call call(false, false, DType::e4m3, DType::f16, Granularity::head);
  call.k = Tensor(DType::f16, {2, kHeads, kCapacity, kDim});
  call.v = call.k;
  call.refresh();
  const Status status = append(call.tensors);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find("k_scale: given, but k is f16"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace flashcore::test
