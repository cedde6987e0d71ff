#include "distributed/traffic.h"

#include "distributed/decimal.h"

namespace flashcore::distributed {
namespace {

using Steps = std::vector<SentBytes>;

/// K and V travel; in the backward pass the sums dK and dV follow, and go home at the end.
Steps ring_traffic(const Job& job, std::int32_t rank, bool backward) {
  Steps steps;
  std::int64_t home = 0;
  for (std::int32_t step = 0; step < job.ranks(); ++step) {
    const std::int32_t block = (rank - step + job.ranks()) % job.ranks();
    const std::int64_t rows = rows_of(job.k_of(block));
    const std::int32_t hops = job.last_hop(block);
    const bool goes_on = step < hops;
    if (step + 1 < job.ranks()) {
      const std::string name = "ring step " + decimal(step + 1);
      steps.push_back({name, goes_on ? job.kv_bytes(rows) : 0});
      if (backward) {
        steps.push_back({name + ", dK and dV", goes_on ? job.kv_bytes(rows, true) : 0});
      }
    }
    if (step > 0 && step == hops) home += job.kv_bytes(rows, true);
  }
  if (backward) steps.push_back({"dK and dV home", home});
  return steps;
}

Steps gather_traffic(const Job& job, std::int32_t rank, bool backward) {
  std::int64_t keys = 0, sums = 0;
  for (std::int32_t other = 0; other < job.ranks(); ++other) {
    if (other == rank) continue;
    keys += job.kv_bytes(rows_of(job.message(rank, other)));
    if (backward) sums += job.kv_bytes(rows_of(job.message(other, rank)), true);
  }
  Steps steps{{"keys and values", keys}};
  if (backward) steps.push_back({"dK and dV", sums});
  return steps;
}

const char* in_step(bool backward, bool forward) {
  if (!backward) return "q, k, v by heads";
  return forward ? "q, k, v, out and dO by heads" : "dO by heads";
}

/// The exchanges of rows and heads, before and after the steps between.
Steps heads_traffic(const Job& job, std::int32_t rank, bool backward, const Steps& between) {
  const std::int32_t first = job.group_of(rank), me = rank - first;
  const std::int64_t size = size_of(job.dtype), lse = 4;
  const std::int64_t kv_size = job.head_ranks > job.kv_heads ? job.wide_bytes() : size;
  const HeadRange own = job.heads(me);
  const std::int64_t q_rows = rows_of(job.q_of(rank)), k_rows = rows_of(job.k_of(rank));
  // Bytes of one row of one head, of queries and of keys. A separate backward pass has the
  // forward's tensors too.
  const bool forward = !backward || job.separate_backward;
  std::int64_t q_in = forward ? job.head_dim * size : 0;
  if (backward) q_in += lse + job.v_dim * size;             // of dLSE and dO
  if (backward && forward) q_in += lse + job.v_dim * size;  // of the LSE and out
  const std::int64_t k_in = forward ? (job.head_dim + job.v_dim) * size : 0;
  const std::int64_t q_out = backward ? job.head_dim * size : lse + job.v_dim * size;
  const std::int64_t k_out = backward ? (job.head_dim + job.v_dim) * kv_size : 0;
  std::int64_t to_heads = 0, to_rows = 0;
  for (std::int32_t member = 0; member < job.head_ranks; ++member) {
    if (member == me) continue;
    const HeadRange its = job.heads(member);
    to_heads += its.q_heads() * q_rows * q_in + its.kv_heads() * k_rows * k_in;
    to_rows += own.q_heads() * rows_of(job.q_of(first + member)) * q_out +
               own.kv_heads() * rows_of(job.k_of(first + member)) * k_out;
  }
  Steps steps{{in_step(backward, forward), job.batch * to_heads}};
  steps.insert(steps.end(), between.begin(), between.end());
  steps.push_back({backward ? "gradients by rows" : "out by rows", job.batch * to_rows});
  return steps;
}

}  // namespace

std::vector<std::int32_t> sampled_ranks(std::int32_t ranks) {
  constexpr std::int32_t kMost = 64;
  if (ranks > kMost) return {0, ranks / 2, ranks - 1};
  std::vector<std::int32_t> all(static_cast<std::size_t>(ranks));
  for (std::int32_t r = 0; r < ranks; ++r) all[static_cast<std::size_t>(r)] = r;
  return all;
}

Steps traffic(const Job& job, std::int32_t rank, bool backward) {
  const Job inner = job.one_head_group(rank);
  const std::int32_t place = rank / job.head_ranks;
  const Steps between =
      job.is_ring() ? ring_traffic(inner, place, backward) : gather_traffic(inner, place, backward);
  return job.head_ranks == 1 ? between : heads_traffic(job, rank, backward, between);
}

}  // namespace flashcore::distributed
