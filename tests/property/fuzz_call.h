// Random and damaged calls of the C ABI. All data lies in one arena; what the library could not
// know (that a tensor reaches past its buffer) is found out here, before the call.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <vector>

#include "flashcore/attention.h"
#include "flashcore/flashcore.h"
#include "verify/inputs/random.h"

namespace flashcore::test {

/// A descriptor with room for more axes than the library takes.
struct FuzzTensor {
  flashcore_tensor tensor{};
  std::int64_t shape[8] = {};
  std::int64_t strides[8] = {};
};

class Arena {
 public:
  static constexpr std::size_t kSlots = 15;
  static constexpr std::size_t kSlotBytes = 4 * 1024;

  Arena() : bytes_(kSlots * kSlotBytes) {}
  std::byte* data() { return bytes_.data(); }
  std::size_t size() const { return bytes_.size(); }
  std::byte* slot(std::size_t index) { return bytes_.data() + index * kSlotBytes; }
  std::vector<std::byte> copy() const { return bytes_; }
  void restore(const std::vector<std::byte>& copy) { bytes_ = copy; }
  bool operator==(const std::vector<std::byte>& copy) const { return bytes_ == copy; }

  /// Whether every element the descriptor speaks of lies in the arena, and they are not too many to
  /// compute with. Descriptors the library
  /// must refuse anyway (no data, no shape, no axes) count as inside.
  bool holds(const flashcore_tensor& tensor) const;

 private:
  std::vector<std::byte> bytes_;
};

/// The tensors of a call in the order of flashcore_params.
enum Slot : std::size_t {
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kBias,
  kMask,
  kAlibi,
  kSinks,
  kCuQ,
  kCuK,
  kUsedK,
  kBlockTable,
  kQStart,
  kKStart
};
const flashcore_tensor** tensor_slot(flashcore_params& params, std::size_t slot);

/// A compact tensor at the beginning of a slot, sometimes with slack after its rows.
void place(verify::Random& random, Arena& arena, std::size_t slot, FuzzTensor& t, DType dtype,
           std::initializer_list<std::int64_t> shape);

void fill_slot(verify::Random& random, Arena& arena, std::size_t slot, DType dtype);
void fill_ints(Arena& arena, std::size_t slot, const std::vector<std::int64_t>& values);

/// Edges of number ranges, small numbers, or any bits.
std::int64_t any_number(verify::Random& random);

/// Damages a descriptor. `memory` is where its data pointer may be moved to.
void damage_tensor(verify::Random& random, std::byte* memory, std::size_t bytes, FuzzTensor& t);

/// One call of flashcore_attention. Tensors are in the order of flashcore_params.
struct FuzzCall {
  flashcore_params params{};
  FuzzTensor tensors[Arena::kSlots];
  std::string kernel;

  bool fits(const Arena& arena) const;
};

/// A small valid call whose data is freshly drawn into the arena.
void draw_call(verify::Random& random, Arena& arena, FuzzCall& call);

/// Changes one thing, anywhere, to anything. Pointers stay null or inside the arena.
void damage(verify::Random& random, Arena& arena, FuzzCall& call);

/// One call of flashcore_merge with up to three parts.
struct FuzzMerge {
  flashcore_merge_params params{};
  FuzzTensor parts[6];  ///< out, lse, out, lse, ...
  flashcore_tensor outs[3]{}, lses[3]{};
  FuzzTensor out, lse, sinks;

  /// Copies the parts' descriptors into the two arrays, as the call wants them.
  void gather();
  bool fits(const Arena& arena) const;
};

void draw_merge(verify::Random& random, Arena& arena, FuzzMerge& merge);
void damage(verify::Random& random, FuzzMerge& merge);

/// One call of flashcore_append.
struct FuzzAppend {
  static constexpr std::size_t kTensors = 7;
  flashcore_append_params params{};
  FuzzTensor tensors[kTensors];  ///< in the order of flashcore_append_params

  const flashcore_tensor** slot(std::size_t index);
  bool fits(const Arena& arena) const;
};

/// A small valid append; the cache is poisoned.
void draw_append(verify::Random& random, Arena& arena, FuzzAppend& append);
void damage(verify::Random& random, Arena& arena, FuzzAppend& append);

/// A descriptor for the C++ API; dtype none where that has no such type.
TensorView view_of(const flashcore_tensor* t);

/// The same call for the C++ API, for the oracle. Only for calls the library accepted.
Tensors tensors_of(const FuzzCall& call);
Options options_of(const FuzzCall& call);

}  // namespace flashcore::test
