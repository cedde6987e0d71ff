// The tensors of a case in one block of memory. A copy of the block on any device is the same case.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flashcore/attention.h"
#include "verify/inputs/case.h"

namespace flashcore::verify {

class CaseMemory {
 public:
  /// Places and fills the inputs, poisons the outputs (see poison()), and fills the memory between
  /// and around the tensors with NaN, which must never affect a result.
  explicit CaseMemory(const CaseSpec& spec);

  const CaseSpec& spec() const { return spec_; }
  /// Views into bytes().
  const Tensors& tensors() const { return tensors_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }

  /// The same views into a copy of bytes() at `base`, on `device`.
  Tensors at(void* base, Device device) const;

  /// True if `after`, the bytes after a call, differs from bytes() only in elements of out and lse.
  bool only_outputs_changed(const std::vector<std::byte>& after) const;

 private:
  TensorView place(DType dtype, std::vector<std::int64_t> shape, MemoryLayout layout);
  TensorView place_compact(DType dtype, std::vector<std::int64_t> shape);
  /// Scales within a factor of two of a typical one.
  void fill_scale(const TensorView& view, double typical, std::uint64_t stream);
  void fill_normal(const TensorView& view, double sigma, std::uint64_t stream);
  /// Fills the block table at random for sequences of these lengths, and writes NaN to the unused
  /// rows of the pages.
  void assign_pages(const std::vector<std::int32_t>& lengths);
  void fill_scores();
  void fill_block_mask();
  void poison_outputs();
  void sprinkle_non_finite();
  // Steps of the constructor.
  struct Sizes;
  void place_operands(const Sizes& sizes);
  void place_options(const Sizes& sizes);
  void place_scales(const Sizes& sizes);
  void fill_operands();
  void fill_lengths(const Sizes& sizes);
  void hide_unused_keys(std::int64_t batch, std::int64_t first_row, std::int64_t used,
                        std::int64_t length);

  CaseSpec spec_;
  Tensors tensors_;
  std::vector<std::byte> bytes_;
};

/// Random streams of a case, one per purpose, so that a new stream changes no other data.
enum DataStream : std::uint64_t {
  kQ = 1,
  kK,
  kV,
  kBias,
  kMask,
  kAlibi,
  kSinks,
  kLengths,
  kSpecials,
  kPageIds,
  kQScale,
  kKScale,
  kVScale,
  kPageTable,
  kMaskBlocks
};

/// Bits of an output element before a call: a NaN that no arithmetic produces.
std::uint64_t poison(DType dtype);

/// True if all bytes are equal. The comparison of std::vector takes one std::byte at a time.
bool are_equal(const std::vector<std::byte>& a, const std::vector<std::byte>& b);

/// Calls visit(element offset) for each element of a view.
template <typename Visit>
void for_each_element(const TensorView& t, Visit visit) {
  std::int64_t extent[4] = {1, 1, 1, 1}, stride[4] = {};
  for (int i = 0; i < t.rank; ++i) {
    extent[4 - t.rank + i] = t.shape[i];
    stride[4 - t.rank + i] = t.strides[i];
  }
  for (std::int64_t a = 0; a < extent[0]; ++a) {
    for (std::int64_t b = 0; b < extent[1]; ++b) {
      for (std::int64_t c = 0; c < extent[2]; ++c) {
        const std::int64_t base = a * stride[0] + b * stride[1] + c * stride[2];
        for (std::int64_t d = 0; d < extent[3]; ++d) visit(base + d * stride[3]);
      }
    }
  }
}

/// The nearest encoding of an 8-bit format (ties to even, saturating). A format without NaN gets
/// the encoding that is never produced.
std::uint8_t encode(DType dtype, double value);

/// Rounds to the format (ties to even) and stores.
void store(void* data, DType dtype, std::int64_t index, double value);

}  // namespace flashcore::verify
