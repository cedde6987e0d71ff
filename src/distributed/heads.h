// The exchange between "some rows of all heads" and "all rows of some heads".
#pragma once

#include <cstdint>
#include <vector>

#include "distributed/schemes.h"

namespace flashcore::distributed {

/// A tensor in both divisions.
struct HeadTensor {
  TensorView rows;  ///< this rank's rows of all heads; not given: zeros, or not wanted
  DType dtype = DType::none;
  std::int64_t dim = 1;
  bool of_q = true;         ///< has the heads and rows of q; else those of k
  Write how = Write::copy;  ///< add: ranks share heads, and f32 `rows` get their sum
  TensorView heads = {};    ///< this rank's heads of all rows of its group; set by reserve()
  Buffer memory = {};
};
using HeadTensors = std::vector<HeadTensor>;

/// The all-to-all of the ranks that divide heads. Tensors of f32 come first, for alignment.
class HeadExchange {
 public:
  HeadExchange(const Job& job, const Engine& engine, Local& local);
  /// Memory for the messages and for the tensors by heads.
  Status reserve(HeadTensors& tensors);
  Status to_heads(const char* step, HeadTensors& tensors) const;
  /// Adds shared heads in order of ranks.
  Status to_rows(const char* step, const HeadTensors& tensors) const;

 private:
  struct Heads {
    std::int64_t begin, count;
  };
  const Spans& spans_of(const HeadTensor& tensor, std::int32_t member) const;
  Spans group_spans(const HeadTensor& tensor) const;
  Heads heads_of(const HeadTensor& tensor, std::int32_t member) const;
  /// The bytes of one member's heads in another member's rows.
  std::int64_t part_bytes(const HeadTensors& tensors, std::int32_t heads_member,
                          std::int32_t rows_member) const;
  Status exchange(const char* step, const HeadTensors& tensors, bool to_heads) const;

  const Job& job_;
  const Engine& engine_;
  Local& local_;
  const std::int32_t first_, count_, me_;  ///< the group's first rank and size; this member
  Buffer rows_message_, heads_message_;    ///< this rank's rows of others' heads, and the inverse
};

}  // namespace flashcore::distributed
