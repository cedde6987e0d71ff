// Random and damaged calls of the C ABI. All data is in one arena. The library cannot see that a
// tensor exceeds its buffer, so the arena checks that before the call.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <vector>

#include "flashcore/attention.h"
#include "flashcore/flashcore.h"
#include "verify/inputs/random.h"

namespace flashcore::test {

/// A descriptor with room for more axes than the library supports.
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

  /// True if all elements of the tensor are in the arena and are few enough for a fast test. Also
  /// true for descriptors that the library must refuse: no data, no shape, no axes.
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

/// Places a compact tensor at the start of a slot, sometimes with padded rows.
void place(verify::Random& random, Arena& arena, std::size_t slot, FuzzTensor& t, DType dtype,
           std::initializer_list<std::int64_t> shape);

void fill_slot(verify::Random& random, Arena& arena, std::size_t slot, DType dtype);
void fill_ints(Arena& arena, std::size_t slot, const std::vector<std::int64_t>& values);

/// A boundary of an integer range, a small number, or random bits.
std::int64_t any_number(verify::Random& random);

/// Damages a descriptor. Its data pointer may move to any byte of `memory`.
void damage_tensor(verify::Random& random, std::byte* memory, std::size_t bytes, FuzzTensor& t);

/// One call of flashcore_attention. Tensors are in the order of flashcore_params.
struct FuzzCall {
  flashcore_params params{};
  FuzzTensor tensors[Arena::kSlots];
  std::string kernel;

  bool fits(const Arena& arena) const;
};

/// Draws a small valid call, with its data in the arena.
void draw_call(verify::Random& random, Arena& arena, FuzzCall& call);

/// Changes one argument to an arbitrary value. Pointers stay null or inside the arena.
void damage(verify::Random& random, Arena& arena, FuzzCall& call);

/// One call of flashcore_merge with up to three partial results.
struct FuzzMerge {
  flashcore_merge_params params{};
  FuzzTensor partials[6];  ///< out, lse, out, lse, ...
  flashcore_tensor outs[3]{}, lses[3]{};
  FuzzTensor out, lse, sinks;

  /// Copies the descriptors of `partials` into the two arrays of the call.
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

/// Draws a small valid append to a poisoned cache.
void draw_append(verify::Random& random, Arena& arena, FuzzAppend& append);
void damage(verify::Random& random, Arena& arena, FuzzAppend& append);

/// Converts a descriptor to the C++ API. The dtype is none if the C++ API has no such type.
TensorView view_of(const flashcore_tensor* t);

/// The same call for the C++ API and the oracle. Requires a call that the library accepted.
Tensors tensors_of(const FuzzCall& call);
Options options_of(const FuzzCall& call);

}  // namespace flashcore::test
