// api/validate/overlap.h against an enumeration of all bytes.
#include "api/validate/overlap.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "support/call.h"
#include "verify/inputs/case_memory.h"
#include "verify/inputs/random.h"

namespace flashcore {
namespace {

using verify::Random;

alignas(64) std::byte g_memory[1 << 16];

TensorView strided(DType dtype, std::size_t byte, std::vector<std::int64_t> shape,
                   std::vector<std::int64_t> strides) {
  TensorView t;
  t.data = g_memory + byte;
  t.dtype = dtype;
  t.rank = static_cast<std::int32_t>(shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) {
    t.shape[i] = shape[i];
    t.strides[i] = strides[i];
  }
  return t;
}

std::vector<std::int64_t> first_bytes(const TensorView& t) {
  std::vector<std::int64_t> bytes;
  const std::int64_t base = static_cast<std::byte*>(t.data) - g_memory;
  verify::for_each_element(t,
                           [&](std::int64_t at) { bytes.push_back(base + at * size_of(t.dtype)); });
  return bytes;
}

bool truly_overlaps_itself(const TensorView& t) {
  std::set<std::int64_t> seen;
  for (const std::int64_t byte : first_bytes(t)) {
    if (!seen.insert(byte).second) return true;  // whole elements: strides count elements
  }
  return false;
}

bool truly_share(const TensorView& a, const TensorView& b) {
  std::set<std::int64_t> of_a;
  for (const std::int64_t byte : first_bytes(a)) {
    for (std::int64_t i = 0; i < size_of(a.dtype); ++i) of_a.insert(byte + i);
  }
  for (const std::int64_t byte : first_bytes(b)) {
    for (std::int64_t i = 0; i < size_of(b.dtype); ++i) {
      if (of_a.count(byte + i) > 0) return true;
    }
  }
  return false;
}

TensorView draw_view(Random& random, std::int64_t most_extent, std::int64_t most_stride) {
  static constexpr DType kTypes[] = {DType::f64, DType::f32, DType::f16, DType::boolean};
  std::vector<std::int64_t> shape, strides;
  const std::int64_t rank = random.between(1, 4);
  for (std::int64_t i = 0; i < rank; ++i) {
    shape.push_back(random.chance(0.05) ? 0 : random.between(1, most_extent));
    strides.push_back(random.chance(0.1) ? 0 : random.between(1, most_stride));
  }
  return strided(random.pick(kTypes), static_cast<std::size_t>(8 * random.below(60)), shape,
                 strides);
}

TEST(Overlap, SharingAgreesWithTheEnumeration) {
  Random random(1);
  int shared = 0, apart = 0;
  for (int n = 0; n < test::rounds(60000); ++n) {
    const TensorView a = draw_view(random, 4, 12), b = draw_view(random, 4, 12);
    const bool truth = truly_share(a, b);
    (truth ? shared : apart) += 1;
    ASSERT_EQ(share_memory(a, b), truth) << "draw " << n;
    ASSERT_EQ(share_memory(b, a), truth) << "draw " << n;
  }
  EXPECT_GT(shared, test::rounds(5000));
  EXPECT_GT(apart, test::rounds(5000));
}

TEST(Overlap, SelfOverlapIsNeverMissed) {
  Random random(2);
  int overlapping = 0, clean = 0;
  for (int n = 0; n < test::rounds(60000); ++n) {
    const TensorView t = draw_view(random, 4, 40);
    const bool truth = truly_overlaps_itself(t);
    if (truth) {
      ++overlapping;
      ASSERT_TRUE(overlaps_itself(t)) << "draw " << n;
    } else if (!overlaps_itself(t)) {
      ++clean;
    }
  }
  EXPECT_GT(overlapping, test::rounds(2000));
  EXPECT_GT(clean, test::rounds(2000));
}

TEST(Overlap, NestedLayoutsDoNotOverlapThemselves) {
  Random random(3);
  for (int n = 0; n < test::rounds(20000); ++n) {
    // A compact layout with permuted axes, padding after any axis, and any slice of it.
    std::int64_t shape[4], strides[4];
    int order[] = {0, 1, 2, 3};
    for (int i = 3; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
    std::int64_t stride = random.between(1, 2);
    for (const int axis : order) {
      const std::int64_t room = random.between(1, 5);
      shape[axis] = random.between(1, room);
      strides[axis] = stride;
      stride *= room;
    }
    const TensorView t = strided(DType::f32, 0, {shape, shape + 4}, {strides, strides + 4});
    ASSERT_FALSE(truly_overlaps_itself(t));
    ASSERT_FALSE(overlaps_itself(t)) << "draw " << n;
  }
}

TEST(Overlap, ATensorWithoutElementsOverlapsNothing) {
  const TensorView all = view(g_memory, DType::f32, {64});
  for (int axis = 0; axis < 4; ++axis) {
    std::vector<std::int64_t> shape{2, 3, 4, 5};
    shape[static_cast<std::size_t>(axis)] = 0;
    // A compact view of an empty tensor has strides of 0; a broadcast one may have others.
    for (const std::vector<std::int64_t>& strides :
         {std::vector<std::int64_t>{0, 0, 5, 1}, {0, 0, 0, 0}, {60, 20, 5, 1}}) {
      const TensorView empty = strided(DType::f32, 0, shape, strides);
      EXPECT_FALSE(overlaps_itself(empty)) << axis;
      EXPECT_FALSE(share_memory(empty, all));
      EXPECT_FALSE(share_memory(all, empty));
    }
  }
}

TEST(Overlap, InterleavedViewsOfOneBufferDoNotOverlap) {
  // q, k and v in [batch, len, 3, heads, dim] memory, the output of a fused projection.
  const std::vector<std::int64_t> shape{2, 4, 8, 16};
  const std::vector<std::int64_t> strides{8 * 3 * 4 * 16, 16, 3 * 4 * 16, 1};
  const TensorView part[] = {strided(DType::f16, 0, shape, strides),
                             strided(DType::f16, 2 * 4 * 16, shape, strides),
                             strided(DType::f16, 2 * 2 * 4 * 16, shape, strides)};
  for (int a = 0; a < 3; ++a) {
    EXPECT_FALSE(overlaps_itself(part[a]));
    for (int b = 0; b < 3; ++b) EXPECT_EQ(share_memory(part[a], part[b]), a == b);
  }
  // Even and odd columns of one matrix, and a column past either.
  const TensorView even = strided(DType::f32, 0, {16, 16}, {32, 2});
  const TensorView odd = strided(DType::f32, 4, {16, 16}, {32, 2});
  EXPECT_FALSE(share_memory(even, odd));
  EXPECT_TRUE(share_memory(even, strided(DType::f32, 8, {16, 16}, {32, 2})));
  // Half an element of overlap counts.
  EXPECT_TRUE(share_memory(even, strided(DType::f16, 2, {1}, {1})));
}

TEST(Overlap, HandlesDistantAndNullPointers) {
  const TensorView a = strided(DType::f32, 0, {8, 8}, {8, 1});
  EXPECT_FALSE(share_memory(a, strided(DType::f32, 256, {8, 8}, {8, 1})));
  EXPECT_TRUE(share_memory(a, strided(DType::f32, 252, {8, 8}, {8, 1})));
  TensorView nowhere = a;
  nowhere.data = nullptr;
  EXPECT_FALSE(share_memory(a, nowhere));
  // At opposite ends of the address space the distance does not fit a signed 64-bit integer.
  TensorView low = a, high = a;
  low.data = reinterpret_cast<void*>((std::uintptr_t{1} << 62) + 4096);
  high.data = reinterpret_cast<void*>(std::uintptr_t{3} << 62);
  EXPECT_FALSE(share_memory(low, high));
  EXPECT_FALSE(share_memory(high, low));
}

}  // namespace
}  // namespace flashcore
