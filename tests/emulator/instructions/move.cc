// mov in all its forms, and conversions of addresses between spaces.
#include <cstdint>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"
#include "emulator/instructions/special.h"
#include "emulator/machine/grid.h"

namespace flashcore::emulator {
namespace {

template <typename T>
struct Same {
  T operator()(T a) const { return a; }
};

Step move_predicate(Warp& w, const Instruction& i, std::uint32_t mask) {
  w.set_predicate(i.ops[0], mask, w.predicate(i.ops[1]));
  return Step::next;
}

/// A generic address has the bits of its window.
template <std::uint64_t kWindow, bool kToGeneric>
Step convert_address(Warp& w, const Instruction& i, std::uint32_t mask) {
  std::uint8_t* d = w.out<std::uint8_t>(i.ops[0]);
  for_lanes(mask, [&](int lane) {
    std::uint64_t address = i.second_bytes == 8 ? w.in<std::uint64_t>(i.ops[1])[lane]
                                                : w.in<std::uint32_t>(i.ops[1])[lane];
    if (kToGeneric) {
      address |= kWindow;
    } else {
      address &= ~kWindow;
    }
    __builtin_memcpy(d + lane * i.first_bytes, &address, i.first_bytes);
  });
  return Step::next;
}

Handler find_cvta(const Opcode& opcode) {
  const bool to = opcode.has("to");
  switch (opcode.space()) {
    case Space::shared:
      return to ? convert_address<kSharedWindow, false> : convert_address<kSharedWindow, true>;
    case Space::local:
      return to ? convert_address<kLocalWindow, false> : convert_address<kLocalWindow, true>;
    case Space::param:
      return to ? convert_address<kParamWindow, false> : convert_address<kParamWindow, true>;
    case Space::global: return convert_address<0, true>;
    default: return nullptr;
  }
}

template <std::uint64_t kWindow>
Step is_space(Warp& w, const Instruction& i, std::uint32_t mask) {
  std::uint32_t result = 0;
  for_lanes(mask, [&](int lane) {
    const bool inside =
        w.in<std::uint64_t>(i.ops[1])[lane] >> kSpaceShift == kWindow >> kSpaceShift;
    result |= static_cast<std::uint32_t>(inside) << lane;
  });
  w.set_predicate(i.ops[0], mask, result);
  return Step::next;
}

/// mapa d, address, rank: the address in the shared memory of another CTA of the cluster.
Step map_address(Warp& w, const Instruction& i, std::uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint32_t rank = w.in<std::uint32_t>(i.ops[2])[lane];
    if (rank >= w.cta().cluster->ctas.size()) w.fail("mapa of a rank outside the cluster", lane);
    constexpr std::uint32_t kOffset = (1u << kRankShift) - 1;
    const auto map = [&](std::uint32_t a) { return (a & kOffset) | (rank + 1) << kRankShift; };
    if (i.first_bytes == 8) {
      const std::uint64_t a = w.in<std::uint64_t>(i.ops[1])[lane];
      w.out<std::uint64_t>(i.ops[0])[lane] = (a >> 32 << 32) | map(static_cast<std::uint32_t>(a));
    } else {
      w.out<std::uint32_t>(i.ops[0])[lane] = map(w.in<std::uint32_t>(i.ops[1])[lane]);
    }
  });
  return Step::next;
}

}  // namespace

Step pack_elements(Warp& w, const Instruction& i, std::uint32_t mask) {
  const int elements = i.op_count - 1, bytes = i.first_bytes / elements;
  std::uint8_t* d = w.out<std::uint8_t>(i.ops[0]);
  for_lanes(mask, [&](int lane) {
    std::uint8_t packed[16];
    for (int k = 0; k < elements; ++k) {
      __builtin_memcpy(packed + k * bytes, w.in<std::uint8_t>(i.ops[1 + k]) + lane * bytes, bytes);
    }
    __builtin_memcpy(d + lane * i.first_bytes, packed, i.first_bytes);
  });
  return Step::next;
}

Step unpack_elements(Warp& w, const Instruction& i, std::uint32_t mask) {
  const int elements = i.op_count - 1, bytes = i.first_bytes;
  for_lanes(mask, [&](int lane) {
    std::uint8_t packed[16];
    __builtin_memcpy(packed, w.in<std::uint8_t>(i.ops[elements]) + lane * bytes * elements,
                     bytes * elements);
    for (int k = 0; k < elements; ++k) {
      __builtin_memcpy(w.out<std::uint8_t>(i.ops[k]) + lane * bytes, packed + k * bytes, bytes);
    }
  });
  return Step::next;
}

bool find_move(const Opcode& opcode, Recipe& recipe) {
  const std::string_view type = opcode.type();
  if (opcode.base() == "mov") {
    if (type == "pred") recipe.handler = move_predicate;
    if (type.ends_with("64"))
      recipe.handler = unary<std::uint64_t, std::uint64_t, Same<std::uint64_t>>;
    if (type.ends_with("32") || type == "f16x2" || type == "bf16x2") {
      recipe.handler = unary<std::uint32_t, std::uint32_t, Same<std::uint32_t>>;
    }
    if (type.ends_with("16"))
      recipe.handler = unary<std::uint16_t, std::uint16_t, Same<std::uint16_t>>;
  } else if (opcode.base() == "cvta") {
    recipe.handler = find_cvta(opcode);
  } else if (opcode.base() == "isspacep") {
    if (opcode.space() == Space::shared) recipe.handler = is_space<kSharedWindow>;
    if (opcode.space() == Space::local) recipe.handler = is_space<kLocalWindow>;
    if (opcode.space() == Space::global) recipe.handler = is_space<0>;
    recipe.immediate_bytes[1] = 8;
  } else if (opcode.base() == "mapa") {
    recipe.handler = map_address;
    recipe.immediate_bytes[2] = 4;
  }
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
