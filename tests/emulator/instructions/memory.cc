// ld, st, prefetch and fences. Memory is sequentially consistent here, so fences have no effect;
// the search for races heeds fence.proxy.async.
#include <cstdint>
#include <type_traits>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"

namespace flashcore::emulator {
namespace {

/// Bits of aux: the space, and whether values are sign-extended to wider registers.
constexpr std::uint32_t kSpaceBits = 7, kSigned = 8;

template <typename T, int kCount>
Step load(Warp& w, const Instruction& i, std::uint32_t mask) {
  const auto space = static_cast<Space>(i.aux & kSpaceBits);
  constexpr int kBytes = sizeof(T) * kCount;
  for_lanes(mask, [&](int lane) {
    const std::uint8_t* from = w.resolve(space, w.address(i, kCount, lane), kBytes, kBytes, lane);
    w.note_read(from, kBytes, lane);
    for (int k = 0; k < kCount; ++k) {
      T value;
      __builtin_memcpy(&value, from + k * sizeof(T), sizeof(T));
      if (i.first_bytes == sizeof(T)) {
        w.out<T>(i.ops[k])[lane] = value;
        continue;
      }
      const std::uint64_t wide =
          (i.aux & kSigned) != 0
              ? static_cast<std::uint64_t>(static_cast<std::int64_t>(std::make_signed_t<T>(value)))
              : value;
      __builtin_memcpy(w.out<std::uint8_t>(i.ops[k]) + lane * i.first_bytes, &wide, i.first_bytes);
    }
  });
  return Step::next;
}

template <typename T, int kCount>
Step store(Warp& w, const Instruction& i, std::uint32_t mask) {
  const auto space = static_cast<Space>(i.aux & kSpaceBits);
  constexpr int kBytes = sizeof(T) * kCount;
  for_lanes(mask, [&](int lane) {
    std::uint8_t* to = w.resolve(space, w.address(i, 0, lane), kBytes, kBytes, lane);
    T value[kCount];
    for (int k = 0; k < kCount; ++k) {
      value[k] = w.lane_value<T>(i.ops[1 + k], i.second_bytes, lane);
    }
    w.note_write(to, reinterpret_cast<const std::uint8_t*>(value), kBytes, lane);
    __builtin_memcpy(to, value, kBytes);
  });
  return Step::next;
}

template <typename T>
Handler find_vector(bool is_load, int count) {
  switch (count) {
    case 1: return is_load ? load<T, 1> : store<T, 1>;
    case 2: return is_load ? load<T, 2> : store<T, 2>;
    case 4: return is_load ? load<T, 4> : store<T, 4>;
    default: return nullptr;
  }
}

Step nothing(Warp&, const Instruction&, std::uint32_t) { return Step::next; }

/// fence.proxy.async of shared memory.
Step fence_async_proxy(Warp& w, const Instruction&, std::uint32_t mask) {
  if (Races* races = w.races()) {
    for_lanes(mask, [&](int lane) { races->fence_async_proxy(w.thread_of(lane)); });
  }
  return Step::next;
}

bool is_without_effect(std::string_view base) {
  return base == "membar" || base == "fence" || base == "prefetch" || base == "prefetchu" ||
         base == "discard" || base == "applypriority" || base == "createpolicy" ||
         base == "setmaxnreg" || base == "griddepcontrol" || base == "nanosleep";
}

}  // namespace

bool find_memory(const Opcode& opcode, Recipe& recipe) {
  const std::string_view base = opcode.base(), type = opcode.type();
  if (is_without_effect(base)) {
    recipe.handler =
        opcode.starts("fence.proxy.async") && !opcode.has("global") ? fence_async_proxy : nothing;
    recipe.immediate_bytes[0] = 4;
    return true;
  }
  if ((base != "ld" && base != "st" && base != "ldu") || opcode.has("async") ||
      opcode.has("bulk")) {
    return false;
  }
  const bool is_load = base != "st";
  recipe.aux = static_cast<std::uint32_t>(opcode.space()) | (type.starts_with("s") ? kSigned : 0);
  const int count = opcode.vector_size();
  if (type.ends_with("64")) recipe.handler = find_vector<std::uint64_t>(is_load, count);
  if (type.ends_with("32")) recipe.handler = find_vector<std::uint32_t>(is_load, count);
  if (type.ends_with("16")) recipe.handler = find_vector<std::uint16_t>(is_load, count);
  if (type.ends_with("8") && !type.ends_with("128"))
    recipe.handler = find_vector<std::uint8_t>(is_load, count);
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
