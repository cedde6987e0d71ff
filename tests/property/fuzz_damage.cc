// Damages calls: changes one argument to an arbitrary value.
#include <algorithm>
#include <limits>

#include "property/fuzz_call.h"
#include "support/to_c.h"

namespace flashcore::test {

using verify::Random;

namespace {
constexpr DType kFloats[] = {DType::f32, DType::f16, DType::bf16, DType::f64};
}  // namespace

std::int64_t any_number(Random& random) {
  static constexpr std::int64_t kSpecial[] = {0,
                                              1,
                                              -1,
                                              2,
                                              3,
                                              7,
                                              16,
                                              576,
                                              577,
                                              1 << 20,
                                              INT32_MAX,
                                              INT64_C(1) << 31,
                                              INT64_C(1) << 32,
                                              INT64_C(1) << 40,
                                              INT64_MAX,
                                              INT64_MIN,
                                              INT64_MAX / 8,
                                              -16};
  if (random.chance(0.6)) return random.pick(kSpecial);
  if (random.chance(0.5)) return random.between(-20, 20);
  return static_cast<std::int64_t>(random.bits());
}

void damage_tensor(Random& random, std::byte* memory, std::size_t bytes, FuzzTensor& t) {
  const std::int64_t axis = random.below(4);
  switch (random.below(10)) {
    case 0: t.shape[axis] = any_number(random); break;
    case 1:
      if (t.shape[axis] > -1000 && t.shape[axis] < 1000) t.shape[axis] += random.between(-2, 2);
      break;
    case 2:
      t.tensor.strides = t.strides;
      t.strides[axis] = random.chance(0.5) ? any_number(random) : random.between(0, 40);
      break;
    case 3: t.tensor.ndim = static_cast<std::int32_t>(any_number(random)); break;
    case 4: t.tensor.ndim = static_cast<std::int32_t>(random.between(0, 8)); break;
    case 5:
      t.tensor.dtype = random.chance(0.7)
                           ? c_dtype(random.pick(kFloats))
                           : flashcore_dtype{static_cast<std::uint8_t>(random.below(8)),
                                             static_cast<std::uint8_t>(8 << random.below(5)),
                                             static_cast<std::uint16_t>(random.below(3))};
      break;
    case 6:
      t.tensor.device = {static_cast<std::int32_t>(any_number(random)),
                         static_cast<std::int32_t>(any_number(random))};
      break;
    case 7:
      t.tensor.byte_offset =
          static_cast<std::uint64_t>(random.chance(0.5) ? any_number(random) : random.below(64));
      break;
    case 8:
      t.tensor.data =
          random.chance(0.3) ? nullptr : memory + random.below(static_cast<std::int64_t>(bytes));
      break;
    default: t.tensor.shape = random.chance(0.5) ? nullptr : t.shape; break;
  }
}

namespace {

void damage_option(Random& random, FuzzCall& call) {
  static constexpr double kDoubles[] = {0.0, -1.0, 0.5, 1e-300, 1e300, 1e38, -0.0};
  static constexpr const char* kKernels[] = {"",
                                             "fwd_generic_f32",
                                             "fwd_generic_f16",
                                             "fwd_neon_f32",
                                             "fwd_avx2_f32",
                                             "fwd_simt_f16_d64_q64",
                                             "%s%n"};
  flashcore_params& p = call.params;
  const double number =
      random.chance(0.2) ? std::numeric_limits<double>::quiet_NaN() : random.pick(kDoubles);
  const auto small = static_cast<std::int32_t>(any_number(random));
  switch (random.below(18)) {
    case 0: p.window_left = any_number(random); break;
    case 1: p.window_right = any_number(random); break;
    case 2: p.max_q_len = any_number(random); break;
    case 3: p.max_kv_len = any_number(random); break;
    case 4:
      p.scale = number;
      p.has_scale = 1;
      break;
    case 5: p.softcap = number; break;
    case 6: p.has_scale = small; break;
    case 7: p.causal = small; break;
    case 8: p.partial = random.chance(0.7) ? 1 : small; break;
    case 9: p.checked = random.chance(0.7) ? 1 : small; break;
    case 10:
      p.num_splits = random.chance(0.7) ? static_cast<std::int32_t>(random.below(6)) : small;
      break;
    case 11: p.reproducibility = random.chance(0.7) ? 1 : small; break;
    case 12:
      p.threads = random.chance(0.7) ? static_cast<std::int32_t>(random.below(4)) : small;
      break;
    case 13: p.layout = small; break;
    case 14:
      call.kernel = random.chance(0.1) ? std::string(3000, 'k') : random.pick(kKernels);
      p.kernel = call.kernel.c_str();
      break;
    case 15:
      p.workspace_bytes = random.below(static_cast<std::int64_t>(p.workspace_bytes) + 1);
      break;
    case 16:
      p.workspace = random.chance(0.5) ? nullptr : static_cast<char*>(p.workspace) + 8;
      p.workspace_bytes -= std::min<std::size_t>(p.workspace_bytes, 256);
      break;
    default: p.struct_size = static_cast<std::size_t>(any_number(random)); break;
  }
}

}  // namespace

void damage(Random& random, Arena& arena, FuzzCall& call) {
  const auto index = static_cast<std::size_t>(random.below(Arena::kSlots));
  const flashcore_tensor** slot = tensor_slot(call.params, index);
  switch (random.below(8)) {
    case 0: *slot = nullptr; break;
    case 1:  // the descriptor of another tensor
      *slot = *tensor_slot(call.params, static_cast<std::size_t>(random.below(Arena::kSlots)));
      break;
    case 2:  // an arbitrary integer among the lengths and starts
      fill_ints(arena, kCuQ + static_cast<std::size_t>(random.below(6)),
                {random.between(-3, 30), any_number(random) & INT32_MAX, random.between(0, 9)});
      break;
    case 3:
    case 4: damage_option(random, call); break;
    default: damage_tensor(random, arena.data(), arena.size(), call.tensors[index]); break;
  }
}

void damage(Random& random, Arena& arena, FuzzAppend& append) {
  const auto any_slot = [&] {
    return static_cast<std::size_t>(random.below(FuzzAppend::kTensors));
  };
  const std::size_t index = any_slot();
  switch (random.below(8)) {
    case 0: *append.slot(index) = nullptr; break;
    case 1: *append.slot(index) = *append.slot(any_slot()); break;
    case 2:
    case 3:  // an arbitrary integer among lengths, page ids and cu_seqlens
      fill_ints(arena, 4 + static_cast<std::size_t>(random.below(3)),
                {random.between(-3, 30), any_number(random) & INT32_MAX, random.between(0, 9)});
      break;
    case 4: append.params.struct_size = static_cast<std::size_t>(any_number(random)); break;
    default: damage_tensor(random, arena.data(), arena.size(), append.tensors[index]); break;
  }
}

void damage(Random& random, FuzzMerge& merge) {
  FuzzTensor* all[] = {&merge.partials[0], &merge.partials[1], &merge.partials[2],
                       &merge.partials[3], &merge.partials[4], &merge.partials[5],
                       &merge.out,         &merge.lse,         &merge.sinks};
  FuzzTensor& t = *random.pick(all);
  auto* memory = static_cast<std::byte*>(merge.out.tensor.data);
  switch (random.below(8)) {
    case 0: merge.params.struct_size = static_cast<std::size_t>(any_number(random)); break;
    case 1: merge.params.parts = static_cast<std::size_t>(any_number(random)); break;
    case 2: merge.params.out = random.chance(0.5) ? nullptr : &t.tensor; break;
    case 3: merge.params.lse = random.chance(0.5) ? nullptr : &t.tensor; break;
    case 4: merge.params.outs = random.chance(0.5) ? nullptr : merge.outs; break;
    case 5: merge.params.lses = random.chance(0.5) ? nullptr : merge.outs; break;
    default: damage_tensor(random, memory, memory == nullptr ? 1 : Arena::kSlotBytes, t); break;
  }
}

}  // namespace flashcore::test
