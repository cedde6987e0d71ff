// TMA: copies of boxes of tensors and of plain ranges, between global and shared memory. A copy to
// shared memory arrives later and then counts towards its mbarrier. A copy to global memory runs
// when the wait for its bulk group requires it.
#include <cstdint>
#include <vector>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"
#include "emulator/machine/floats.h"
#include "emulator/machine/grid.h"
#include "emulator/machine/mbarrier.h"
#include "emulator/runtime/tensor_map.h"

namespace flashcore::emulator {
namespace {

enum class Reduce : std::uint32_t { none, add_f32, add_f16, add_bf16, add_u32 };
constexpr std::uint32_t kRankBits = 7;
constexpr int kReduceShift = 3;

std::uint64_t address_in(Warp& w, std::int32_t op, int bytes, int lane) {
  return bytes == 8 ? w.in<std::uint64_t>(op)[lane] : w.in<std::uint32_t>(op)[lane];
}

/// A contiguous part of a copy. Bytes outside the tensor have no global address.
struct Piece {
  std::uint8_t *global, *shared;
  int bytes;
};

void combine(Reduce reduce, std::uint8_t* to, const std::uint8_t* from, int bytes) {
  const auto each = [&](auto zero, auto add) {
    using T = decltype(zero);
    for (int at = 0; at < bytes; at += static_cast<int>(sizeof(T))) {
      T old, x;
      std::memcpy(&old, to + at, sizeof(T));
      std::memcpy(&x, from + at, sizeof(T));
      old = add(old, x);
      std::memcpy(to + at, &old, sizeof(T));
    }
  };
  switch (reduce) {
    case Reduce::none: std::memcpy(to, from, bytes); break;
    case Reduce::add_f32: each(0.f, [](float a, float b) { return a + b; }); break;
    case Reduce::add_u32: each(0u, [](std::uint32_t a, std::uint32_t b) { return a + b; }); break;
    case Reduce::add_f16:
      each(std::uint16_t{}, [](std::uint16_t a, std::uint16_t b) {
        return float_to_half(half_to_float(a) + half_to_float(b));
      });
      break;
    case Reduce::add_bf16:
      each(std::uint16_t{}, [](std::uint16_t a, std::uint16_t b) {
        return float_to_bfloat(bfloat_to_float(a) + bfloat_to_float(b));
      });
      break;
  }
}

TensorMap read_map(Warp& w, std::uint64_t address, int lane) {
  TensorMap map;
  std::memcpy(&map, w.resolve(Space::generic, address, sizeof map, 64, lane), sizeof map);
  if (map.magic != kTensorMapMagic) w.fail("the address is not that of a tensor map", lane);
  return map;
}

/// The pieces of a box: 16 bytes each, because the swizzle permutes these. `coordinates` are those
/// of the box's first element.
std::vector<Piece> pieces_of(Warp& w, const TensorMap& map, const std::int32_t* coordinates,
                             std::uint64_t shared, int lane, int& total) {
  constexpr int kChunk = 16;
  const int row_bytes = map.boxes[0] * map.element_bytes;
  int rows = 1;
  for (int d = 1; d < map.rank; ++d) rows *= map.boxes[d];
  total = rows * row_bytes;
  if (shared % 128 != 0)
    w.fail("the shared address of a tensor copy is not a multiple of 128", lane);
  std::uint8_t* const base = w.resolve(Space::shared, shared, total, 16, lane);
  std::vector<Piece> pieces;
  for (int row = 0; row < rows; ++row) {
    std::uint64_t global = map.address;
    bool inside = true;
    for (int d = 1, rest = row; d < map.rank; ++d) {
      const std::int64_t at = coordinates[d] + rest % map.boxes[d];
      rest /= map.boxes[d];
      inside = inside && at >= 0 && at < map.sizes[d];
      global += static_cast<std::uint64_t>(at) * map.strides[d - 1];
    }
    for (int chunk = 0; chunk < row_bytes; chunk += kChunk) {
      const std::uint32_t plain =
          static_cast<std::uint32_t>(shared) + static_cast<std::uint32_t>(row * row_bytes + chunk);
      const std::uint32_t swizzle =
          map.swizzle_bytes == 0 ? 0 : plain >> 3 & (map.swizzle_bytes - 16u);
      Piece piece{nullptr, base + ((plain ^ swizzle) - static_cast<std::uint32_t>(shared)), kChunk};
      const std::int64_t column = coordinates[0] + chunk / map.element_bytes;
      const std::int64_t end =
          std::min<std::int64_t>(column + kChunk / map.element_bytes, map.sizes[0]);
      const std::int64_t first = std::max<std::int64_t>(column, 0);
      if (inside && first < end) {
        if (first != column)
          w.fail("a tensor copy that starts inside 16 bytes is not emulated", lane);
        const int valid = static_cast<int>(end - first) * map.element_bytes;
        piece.global =
            w.resolve(Space::global, global + static_cast<std::uint64_t>(first) * map.element_bytes,
                      valid, 1, lane);
        if (valid != kChunk) {  // the rest is outside
          pieces.push_back({nullptr, piece.shared + valid, kChunk - valid});
          piece.bytes = valid;
        }
      }
      pieces.push_back(piece);
    }
  }
  return pieces;
}

void load_later(Warp& w, std::vector<Piece> pieces, std::uint8_t* barrier, int total, int lane) {
  w.cta().grid->later(
      [pieces = std::move(pieces), total, in_flight = CopyInFlight(w, lane, barrier)] {
        for (const Piece& piece : pieces) {
          in_flight.note_write(piece.shared, piece.bytes);
          if (piece.global != nullptr) {
            std::memcpy(piece.shared, piece.global, piece.bytes);
          } else {
            std::memset(piece.shared, 0, piece.bytes);
          }
        }
        in_flight.complete(total);
      });
}

/// cp.async.bulk.tensor [shared], [map, {coordinates}], [barrier].
Step load_tensor(Warp& w, const Instruction& i, std::uint32_t mask) {
  const int rank = static_cast<int>(i.aux & kRankBits);
  for_lanes(mask, [&](int lane) {
    const TensorMap map = read_map(w, w.in<std::uint64_t>(i.ops[1])[lane], lane);
    if (map.rank != rank) w.fail("a tensor map of another rank", lane);
    std::int32_t coordinates[5] = {};
    for (int d = 0; d < rank; ++d) coordinates[d] = w.in<std::int32_t>(i.ops[2 + d])[lane];
    int total = 0;
    const std::uint64_t shared = address_in(w, i.ops[0], i.first_bytes, lane);
    std::vector<Piece> pieces = pieces_of(w, map, coordinates, shared, lane, total);
    std::uint8_t* barrier =
        find_mbarrier_at(w, address_in(w, i.ops[2 + rank], i.first_bytes, lane), lane);
    load_later(w, std::move(pieces), barrier, total, lane);
  });
  return Step::next;
}

void store_later(Warp& w, std::vector<Piece> pieces, Reduce reduce, int lane) {
  w.stores.push_back({w.store_groups[lane], lane, [&w, lane, pieces = std::move(pieces), reduce] {
                        for (const Piece& piece : pieces) {
                          w.note_read_by_async_proxy(piece.shared, piece.bytes, lane);
                          if (piece.global != nullptr)
                            combine(reduce, piece.global, piece.shared, piece.bytes);
                        }
                      }});
}

/// cp{.reduce}.async.bulk.tensor [map, {coordinates}], [shared].
Step store_tensor(Warp& w, const Instruction& i, std::uint32_t mask) {
  const int rank = static_cast<int>(i.aux & kRankBits);
  for_lanes(mask, [&](int lane) {
    const TensorMap map = read_map(w, w.in<std::uint64_t>(i.ops[0])[lane], lane);
    if (map.rank != rank) w.fail("a tensor map of another rank", lane);
    std::int32_t coordinates[5] = {};
    for (int d = 0; d < rank; ++d) coordinates[d] = w.in<std::int32_t>(i.ops[1 + d])[lane];
    int total = 0;
    const std::uint64_t shared = address_in(w, i.ops[1 + rank], i.address_bytes, lane);
    store_later(w, pieces_of(w, map, coordinates, shared, lane, total),
                static_cast<Reduce>(i.aux >> kReduceShift), lane);
  });
  return Step::next;
}

Piece plain_piece(Warp& w, std::uint64_t global, std::uint64_t shared, std::uint32_t bytes,
                  int lane) {
  if (bytes % 16 != 0) w.fail("the size of a bulk copy is not a multiple of 16", lane);
  const int count = static_cast<int>(bytes);
  return {w.resolve(Space::global, global, count, 16, lane),
          w.resolve(Space::shared, shared, count, 16, lane), count};
}

/// cp.async.bulk.shared [shared], [global], bytes, [barrier].
Step load_range(Warp& w, const Instruction& i, std::uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint32_t bytes = w.in<std::uint32_t>(i.ops[2])[lane];
    const Piece piece = plain_piece(w, w.in<std::uint64_t>(i.ops[1])[lane],
                                    address_in(w, i.ops[0], i.first_bytes, lane), bytes, lane);
    load_later(w, {piece}, find_mbarrier_at(w, address_in(w, i.ops[3], i.first_bytes, lane), lane),
               piece.bytes, lane);
  });
  return Step::next;
}

/// cp{.reduce}.async.bulk.global [global], [shared], bytes.
Step store_range(Warp& w, const Instruction& i, std::uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    const std::uint32_t bytes = w.in<std::uint32_t>(i.ops[2])[lane];
    const Piece piece = plain_piece(w, w.in<std::uint64_t>(i.ops[0])[lane],
                                    address_in(w, i.ops[1], i.second_bytes, lane), bytes, lane);
    store_later(w, {piece}, static_cast<Reduce>(i.aux >> kReduceShift), lane);
  });
  return Step::next;
}

Step commit(Warp& w, const Instruction&, std::uint32_t mask) {
  for_lanes(mask, [&](int lane) { ++w.store_groups[lane]; });
  return Step::next;
}

/// Waits of both kinds complete the copies: .read would only need their reads.
Step wait(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t in_flight = w.in<std::uint32_t>(i.ops[0])[0];
  std::erase_if(w.stores, [&](const PendingStore& store) {
    const bool waited =
        (mask >> store.lane & 1) != 0 && store.group + in_flight < w.store_groups[store.lane];
    if (waited) store.run();
    return waited;
  });
  return Step::next;
}

Step nothing(Warp&, const Instruction&, std::uint32_t) { return Step::next; }

bool find_reduce(const Opcode& opcode, Reduce& reduce) {
  reduce = Reduce::none;
  if (!opcode.has("reduce")) return true;
  if (!opcode.has("add")) return false;
  if (opcode.has("f16")) reduce = Reduce::add_f16;
  if (opcode.has("bf16")) reduce = Reduce::add_bf16;
  if (opcode.has("u32") || opcode.has("s32")) reduce = Reduce::add_u32;
  // The type of a tensor is in its map; only f32 sums are emulated there.
  if (opcode.has("f32") || opcode.has("tensor")) reduce = Reduce::add_f32;
  return reduce != Reduce::none;
}

std::uint32_t rank_of(const Opcode& opcode) {
  for (std::string_view part : opcode.parts()) {
    if (part.size() == 2 && part[1] == 'd') return static_cast<std::uint32_t>(part[0] - '0');
  }
  return 0;
}

}  // namespace

bool find_bulk_copy(const Opcode& opcode, Recipe& recipe) {
  if (opcode.base() != "cp" || !opcode.has("bulk") || opcode.has("multicast::cluster") ||
      opcode.has("im2col"))
    return false;
  for (int& bytes : recipe.immediate_bytes) bytes = 4;
  Reduce reduce;
  if (!find_reduce(opcode, reduce)) return false;
  recipe.aux = rank_of(opcode) | static_cast<std::uint32_t>(reduce) << kReduceShift;
  const bool is_store = opcode.has("bulk_group"), tensor = opcode.has("tensor");
  if (opcode.has("prefetch")) {
    recipe.handler = nothing;
  } else if (opcode.has("commit_group")) {
    recipe.handler = commit;
  } else if (opcode.has("wait_group")) {
    recipe.handler = wait;
  } else if (is_store) {
    recipe.handler = tensor ? store_tensor : store_range;
  } else {
    recipe.handler = tensor ? load_tensor : load_range;
  }
  return true;
}

}  // namespace flashcore::emulator
