// Lengths and positions of the sequences of a case, determined by its seed.
#pragma once

#include <cstdint>
#include <vector>

#include "verify/inputs/case.h"

namespace flashcore::verify {

struct CaseLengths {
  std::vector<std::int32_t> q_ends, k_ends;  ///< cu_seqlens; empty if not varlen
  std::vector<std::int32_t> used_k;          ///< keys per sequence; all keys without used_k
  std::vector<std::int32_t> q_start, k_start;
  std::int64_t total_q = 0, total_k = 0;  ///< rows of a varlen tensor
  bool sets_max_q_len = false, sets_max_kv_len = false;
};

CaseLengths draw_lengths(const CaseSpec& spec);

}  // namespace flashcore::verify
