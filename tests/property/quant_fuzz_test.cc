// flashcore_quantize and flashcore_dequantize under random and damaged calls: they never crash, a
// refused call changes no memory, and an accepted call writes its outputs only.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "property/fuzz_call.h"
#include "support/fuzz_cases.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

using verify::Random;

constexpr std::uint64_t kSeed = 0xf1a9;
constexpr DType kWide[] = {DType::f32, DType::f16, DType::bf16};
constexpr DType kFormats[] = {DType::e4m3, DType::e5m2, DType::int8, DType::u8};

struct FuzzQuant {
  enum Tensor : std::size_t { kFrom, kTo, kScale, kSaturated, kCount };
  flashcore_quant_params params{};
  FuzzTensor tensors[kCount];
  bool quantizes = false;

  const flashcore_tensor** slot(std::size_t index) {
    const flashcore_tensor** slots[] = {&params.from, &params.to, &params.scale, &params.saturated};
    return slots[index];
  }
  bool fits(const Arena& arena) {
    for (std::size_t i = 0; i < kCount; ++i) {
      if (*slot(i) != nullptr && !arena.holds(**slot(i))) return false;
    }
    return true;
  }
  bool writes(std::size_t index) const {
    return index == kTo || (quantizes && index == kScale && params.given_scale == 0) ||
           (quantizes && index == kSaturated);
  }
};

/// Makes the scales positive. The library refuses other scales.
void make_positive(Arena& arena, std::size_t slot) {
  for (std::size_t at = 0; at < Arena::kSlotBytes; at += sizeof(float)) {
    float scale = 0;
    std::memcpy(&scale, arena.slot(slot) + at, sizeof scale);
    scale = std::fabs(scale) + 0x1p-4F;
    std::memcpy(arena.slot(slot) + at, &scale, sizeof scale);
  }
}

void draw(Random& random, Arena& arena, FuzzQuant& quant) {
  quant = {};
  quant.quantizes = random.chance(0.5);
  quant.params.struct_size = sizeof quant.params;
  const std::int64_t batch = random.between(1, 2), heads = random.between(1, 3);
  const std::int64_t rows = random.between(1, 9), dim = random.between(1, 9);
  const DType wide = random.pick(kWide), format = random.pick(kFormats);
  const auto tensor = [&](std::size_t index, DType dtype,
                          std::initializer_list<std::int64_t> shape) {
    place(random, arena, index, quant.tensors[index], dtype, shape);
    fill_slot(random, arena, index, dtype);
    *quant.slot(index) = &quant.tensors[index].tensor;
  };
  tensor(FuzzQuant::kFrom, quant.quantizes ? wide : format, {batch, heads, rows, dim});
  tensor(FuzzQuant::kTo, quant.quantizes ? format : wide, {batch, heads, rows, dim});
  const std::int64_t per = random.below(3), block = random.between(1, 4);
  const bool counts = quant.quantizes && random.chance(0.3);
  for (const std::size_t index : {FuzzQuant::kScale, FuzzQuant::kSaturated}) {
    if (index == FuzzQuant::kSaturated && !counts) continue;
    const DType dtype = index == FuzzQuant::kScale ? DType::f32 : DType::i32;
    if (per == 0) tensor(index, dtype, {1});
    if (per == 1) tensor(index, dtype, {batch, heads});
    if (per == 2) tensor(index, dtype, {batch, heads, (rows - 1) / block + 1});
  }
  make_positive(arena, FuzzQuant::kScale);
  if (per == 2) quant.params.block_rows = block;
  quant.params.given_scale = quant.quantizes && random.chance(0.3) ? 1 : 0;
}

void damage(Random& random, Arena& arena, FuzzQuant& quant) {
  const auto index = static_cast<std::size_t>(random.below(FuzzQuant::kCount));
  switch (random.below(9)) {
    case 0: quant.params.struct_size = static_cast<std::size_t>(any_number(random)); break;
    case 1: quant.params.block_rows = any_number(random); break;
    case 2: quant.params.given_scale = static_cast<std::int32_t>(any_number(random)); break;
    case 3: quant.params.rotate = static_cast<std::int32_t>(random.between(-1, 2)); break;
    case 4:
      *quant.slot(index) = random.chance(0.5) ? nullptr : &quant.tensors[random.below(4)].tensor;
      break;
    case 5: fill_slot(random, arena, FuzzQuant::kScale, DType::f32); break;
    default: damage_tensor(random, arena.data(), arena.size(), quant.tensors[index]); break;
  }
}

/// Returns `before` with the current elements of the outputs.
std::vector<std::byte> with_outputs(std::vector<std::byte> before, Arena& arena, FuzzQuant& quant) {
  for (std::size_t i = 0; i < FuzzQuant::kCount; ++i) {
    if (*quant.slot(i) == nullptr || !quant.writes(i)) continue;
    const TensorView view = view_of(*quant.slot(i));
    const auto size = static_cast<std::size_t>(size_of(view.dtype));
    const auto first = static_cast<std::size_t>(static_cast<std::byte*>(view.data) - arena.data());
    verify::for_each_element(view, [&](std::int64_t at) {
      const std::size_t byte = first + static_cast<std::size_t>(at) * size;
      std::memcpy(before.data() + byte, arena.data() + byte, size);
    });
  }
  return before;
}

TEST(CAbiFuzz, Quantize) {
  Arena arena;
  FuzzQuant quant;
  flashcore_error error{};
  std::map<std::int32_t, int> outcomes;
  FuzzCases fuzz(15000, 0.1, kSeed);
  while (fuzz.next()) {
    const int n = fuzz.number();
    Random random(fuzz.seed(), static_cast<std::uint64_t>(n));
    draw(random, arena, quant);
    const bool valid = random.chance(0.25);
    for (std::int64_t i = valid ? 0 : random.between(1, 3); i > 0; --i) {
      damage(random, arena, quant);
    }
    if (!quant.fits(arena)) continue;
    const std::vector<std::byte> before = arena.copy();
    const std::int32_t code = quant.quantizes ? flashcore_quantize(&quant.params, &error)
                                              : flashcore_dequantize(&quant.params, &error);
    ++outcomes[code];
    ASSERT_EQ(error.code, code) << "case " << n;
    ASSERT_EQ(std::strlen(error.message) == 0, code == FLASHCORE_OK) << "case " << n;
    if (valid) {
      ASSERT_EQ(code, FLASHCORE_OK) << "case " << n << ": " << error.message;
    }
    if (code != FLASHCORE_OK) {
      ASSERT_TRUE(arena == before) << "case " << n << " was refused but wrote: " << error.message;
    } else {
      ASSERT_TRUE(arena == with_outputs(before, arena, quant))
          << "case " << n << " wrote outside its outputs";
    }
  }
  EXPECT_GT(outcomes[FLASHCORE_OK], fuzz.done() / 5);
  EXPECT_GT(outcomes[FLASHCORE_INVALID_ARGUMENT], fuzz.done() / 10);
}

}  // namespace
}  // namespace flashcore::test
