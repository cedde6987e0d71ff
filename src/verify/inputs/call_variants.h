// Inputs under which a fused kernel shows one of its stages. Each function takes a call and gives
// the same call with some inputs replaced, in the memory and layout they had, so that the kernel
// goes the way it goes for the call itself.
#pragma once

#include <cstdint>

#include "flashcore/status.h"
#include "reference/oracle.h"
#include "verify/inputs/call.h"

namespace flashcore::verify {

/// The call with a wide (f32 or f64) output and an LSE: what is read out loses nothing to the
/// output's format.
HostCall with_wide_outputs(const HostCall& call);

/// The call with an LSE.
HostCall with_lse(const HostCall& call);

/// V[j][c] is 1 where j = first_key + c, else 0, in every sequence and head. The output is then
/// columns first_key ... first_key + v_dim - 1 of P. Fails where V repeats keys or columns (a
/// stride of 0), for then it cannot hold this.
Result<HostCall> with_one_hot_values(const HostCall& call, std::int64_t first_key);

/// Q = 0, and no bias, ALiBi, sinks or softcap: P is uniform over the visible keys.
HostCall with_uniform_probabilities(const HostCall& call);

/// Every query finds one key of its own: keys carry their index in binary (as -1 and 1), a query
/// that of its key, and the products are so large that no other weight is left. Where head_dim is
/// too small for the binary digits, or the key is hidden, some keys share the weight; the oracle
/// knows which. No bias, ALiBi, sinks or softcap.
HostCall with_selected_keys(const HostCall& call);

/// Query i sees column i % head_dim of K alone; key j column j % head_dim of Q. Scores are then
/// these values times the scale. No bias, ALiBi, sinks or softcap.
HostCall with_one_column_queries(const HostCall& call);
HostCall with_one_column_keys(const HostCall& call);

/// All scores (q, bias, ALiBi, softcap, sinks) times `factor`, a power of two.
HostCall with_scaled_scores(const HostCall& call, double factor);

/// Only the first `end` keys of every sequence are in use; nothing moves to another position.
HostCall with_keys_up_to(const HostCall& call, const Problem& problem, std::int64_t end);

/// The oracle of with_one_hot_values(call, first_key), from the oracle of the call itself (with its
/// stages kept): the scores need not be computed again for every block of keys.
reference::Oracle one_hot_oracle(const reference::Oracle& whole, const Problem& problem,
                                 const Tensors& tensors, std::int64_t first_key);

/// The oracle of rows that see only the keys begin <= j < end of their sequence, at the positions
/// they have there; without sinks, as a key range's partial result is defined.
reference::Oracle compute_on_keys(const Problem& problem, const Tensors& tensors,
                                  std::vector<reference::RowId> rows, std::int64_t begin,
                                  std::int64_t end, bool keep_stages = false);

}  // namespace flashcore::verify
