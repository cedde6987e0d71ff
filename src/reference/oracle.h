// The fp64 oracle: attention by definition (docs/numerics.md), one row at a time, without tiles or
// online softmax. It shares no code with the kernels: it has its own masks, conversions and
// index arithmetic. All tensors must be in host memory, whatever the device of the problem.
#pragma once

#include <cstdint>
#include <vector>

#include "flashcore/problem.h"

namespace flashcore::reference {

/// Query i of batch b, query head h.
struct RowId {
  std::int32_t b, h, i;
  bool operator==(const RowId&) const = default;
};

/// Lengths and positions of one sequence, and its first rows in varlen q, k and v.
struct Lengths {
  std::int64_t q_len, kv_len, q_row, k_row, q_start, k_start;
};
Lengths lengths_of(const Problem& problem, const Tensors& tensors, std::int64_t b);

/// Results for some rows of a problem, and the terms of the error bound (verify/inputs/compare.h).
struct Oracle {
  std::vector<RowId> rows;
  std::int64_t head_dim = 0, v_dim = 0;
  std::vector<double> out;  ///< [rows, v_dim]
  std::vector<double> lse;  ///< [rows]; with the sink, unless the problem is partial
  std::vector<double> max;  ///< [rows]: largest visible score; -inf: none
  std::vector<double> sum;  ///< [rows]: Σ exp(score - max) over visible keys, without the sink

  // Terms of the error bound.
  std::vector<double> magnitude;  ///< [rows]: max_j |scale|·Σ|q_d k_d| + |alibi| + |bias| +
                                  ///< softcap, over keys with a finite score; at least |sink|
  std::vector<double>
      largest_product;              ///< [rows]: max_j max_d |scale·q_d k_d|, likewise, if finite
  std::vector<double> largest_sum;  ///< [rows]: max_j max_n |scale·Σ_{d<n} q_d k_d|, likewise
  std::vector<double> largest_cut;  ///< [rows]: max_j of what tensor cores may cut from
                                    ///< scale·Σ q_d k_d, in units of 2⁻²⁴, likewise; 0: not 16 bits
  std::vector<double> spread;     ///< [rows, v_dim]: sqrt(Σ p² v²)
  std::vector<double> deviation;  ///< [rows, v_dim]: Σ p·|v - out|
  std::vector<double> v_mass;     ///< [rows, v_dim]: Σ |v| / (sum of the softmax, sink included)
  std::vector<double> v_mass_in_steps;   ///< likewise, with each v divided by its scale, times the
                                         ///< largest scale; v_mass if all keys share a scale
  std::vector<std::int32_t> kv_len;      ///< [rows]: keys of the row's sequence
  std::vector<std::int32_t> equal_keys;  ///< [rows]: the most keys with weight and one score in
                                         ///< f32, without the first of them

  /// [rows]: a hidden key has a non-finite V, so 0·NaN may poison the row.
  std::vector<std::uint8_t> may_be_poisoned;

  // Stages, on request only: one value per row and key of its sequence.
  std::vector<std::vector<double>> scores;         ///< final scores; -inf: hidden
  std::vector<std::vector<double>> probabilities;  ///< normalised over all keys (and the sink)
};

/// All rows of the problem in order of batch, head, query. Reads the lengths from the tensors.
std::vector<RowId> all_rows(const Problem& problem, const Tensors& tensors);

/// Selects what compute() adds to out, lse, max, sum and magnitude. Other parts stay 0 or empty.
struct OracleParts {
  bool bound = true;     ///< the other terms of the error bound of out
  bool cut_sums = true;  ///< largest_cut
  bool stages = false;   ///< scores and probabilities
};

/// Computes the given rows on `threads` threads (0: as many as the machine has).
Oracle compute(const Problem& problem, const Tensors& tensors, std::vector<RowId> rows,
               const OracleParts& parts, int threads = 0);
Oracle compute(const Problem& problem, const Tensors& tensors, std::vector<RowId> rows,
               bool keep_stages = false, int threads = 0);

/// Whether the block mask of the call shows key j of the sequence to a row.
bool block_shows(const Problem& problem, const Tensors& tensors, const RowId& row, std::int64_t j);

/// One element as a double; 8-bit formats without scale. Does not use the kernels' decoders.
double element(const void* data, DType dtype, std::int64_t index);

}  // namespace flashcore::reference
