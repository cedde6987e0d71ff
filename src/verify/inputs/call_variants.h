// Variants of a call that make the output of a fused kernel equal one of its stages. Each function
// replaces some inputs but not their memory or layout, so that the kernel takes the same path as
// for the original call.
#pragma once

#include <cstdint>

#include "flashcore/status.h"
#include "reference/oracle.h"
#include "verify/inputs/call.h"

namespace flashcore::verify {

/// The call with an f32 or f64 output, whose rounding is negligible, and an LSE.
HostCall with_wide_outputs(const HostCall& call);

/// The call with an LSE.
HostCall with_lse(const HostCall& call);

/// V[j][c] is 1 if j = first_key + c, else 0, in every sequence and head. The output is then
/// columns first_key ... first_key + v_dim - 1 of P. Fails if V repeats keys or columns (stride 0).
Result<HostCall> with_one_hot_values(const HostCall& call, std::int64_t first_key);

/// Q = 0, and no bias, ALiBi, sinks or softcap: P is uniform over the visible keys.
HostCall with_uniform_probabilities(const HostCall& call);

/// Every query selects one key: a key encodes its index in binary (as -1 and 1), a query the index
/// of its key, and the products are so large that all other weights vanish. If head_dim is too
/// small for the digits, or the key is hidden, several keys share the weight, as in the oracle. The
/// call has no bias, ALiBi, sinks or softcap.
HostCall with_selected_keys(const HostCall& call);

/// One-hot queries (query i: column i % head_dim) or keys. A score is then a single element of K,
/// or of Q, times the scale. The call has no bias, ALiBi, sinks or softcap.
HostCall with_one_column_queries(const HostCall& call);
HostCall with_one_column_keys(const HostCall& call);

/// Multiplies all scores (q, bias, ALiBi, softcap, sinks) by `factor`, a power of two.
HostCall with_scaled_scores(const HostCall& call, double factor);

/// Uses only the first `end` keys of every sequence, with unchanged positions.
HostCall with_keys_up_to(const HostCall& call, const Problem& problem, std::int64_t end);

/// The oracle of with_one_hot_values(call, first_key), derived from `whole`, the oracle of the call
/// with its stages. The scores are then computed once for all values of first_key.
reference::Oracle one_hot_oracle(const reference::Oracle& whole, const Problem& problem,
                                 const Tensors& tensors, std::int64_t first_key);

/// The oracle of rows restricted to the keys begin <= j < end of their sequence, at their
/// positions, and without sinks: the partial result of a KV split.
reference::Oracle compute_on_keys(const Problem& problem, const Tensors& tensors,
                                  std::vector<reference::RowId> rows, std::int64_t begin,
                                  std::int64_t end, bool keep_stages = false);

}  // namespace flashcore::verify
