#include "distributed/job.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace flashcore::distributed {
namespace {

using ll = long long;

Status check_documents(const std::vector<std::int64_t>& documents, std::int64_t q_length,
                       std::int64_t k_length) {
  if (documents.empty()) return {};
  if (documents.front() != 0 || !std::is_sorted(documents.begin(), documents.end())) {
    return invalid_argument("cu_seqlens: wanted ascending numbers that start with 0");
  }
  for (const auto& [name, length] : {std::pair{"q", q_length}, {"k", k_length}}) {
    if (documents.back() == length) continue;
    return invalid_argument("cu_seqlens: ends with %lld; the ranks have %lld rows of %s together",
                            ll{documents.back()}, ll{length}, name);
  }
  return {};
}

Status check_problem(const DistributedProblem& p) {
  if (p.q_rows.empty() || p.q_rows.size() != p.k_rows.size()) {
    return invalid_argument(
        "q_rows and k_rows: have %zu and %zu ranks; wanted equal numbers, at "
        "least 1",
        p.q_rows.size(), p.k_rows.size());
  }
  for (const std::vector<std::int64_t>* rows : {&p.q_rows, &p.k_rows}) {
    for (const std::int64_t n : *rows) {
      if (n < 0 || n > INT32_MAX)
        return invalid_argument("rows is %lld; wanted 0 to 2^31-1", ll{n});
    }
  }
  const struct {
    const char* name;
    std::int64_t value, least;
  } sizes[] = {{"batch", p.batch, 0},       {"q_heads", p.q_heads, 0},
               {"kv_heads", p.kv_heads, 1}, {"head_dim", p.head_dim, 1},
               {"v_dim", p.v_dim, 1},       {"ranks_per_node", p.ranks_per_node, 1}};
  for (const auto& size : sizes) {
    if (size.value < size.least || size.value > INT32_MAX) {
      return invalid_argument("%s is %lld; wanted %lld to 2^31-1", size.name, ll{size.value},
                              ll{size.least});
    }
  }
  if (p.q_heads % p.kv_heads != 0) {
    return invalid_argument("k: has %lld heads, q has %lld; q's number must be a multiple",
                            ll{p.kv_heads}, ll{p.q_heads});
  }
  if (p.dtype == DType::none || is_8bit(p.dtype) || size_of(p.dtype) == 1) {
    return invalid_argument("dtype is %s; wanted f64, f32, f16 or bf16", to_string(p.dtype));
  }
  return {};
}

}  // namespace

HeadRange Job::heads(std::int32_t member) const noexcept {
  const std::int64_t count = q_heads / head_ranks, per_kv = q_heads / kv_heads;
  const std::int64_t begin = member * count;
  if (count == 0) return {};
  return {begin, begin + count, begin / per_kv, (begin + count + per_kv - 1) / per_kv};
}

Job Job::one_head_group(std::int32_t rank) const {
  const HeadRange own = heads(rank % head_ranks);
  Job inner = *this;
  inner.head_ranks = 1;
  inner.q_heads = own.q_heads();
  inner.kv_heads = own.kv_heads();
  for (const auto& [from, to] : {std::pair{&q_spans, &inner.q_spans}, {&k_spans, &inner.k_spans}}) {
    to->clear();
    for (std::size_t first = 0; first < from->size();
         first += static_cast<std::size_t>(head_ranks)) {
      Spans all;
      for (std::size_t r = first; r < first + static_cast<std::size_t>(head_ranks); ++r) {
        all.insert(all.end(), (*from)[r].begin(), (*from)[r].end());
      }
      to->push_back(joined(std::move(all)));
    }
  }
  return inner;
}

std::int64_t Job::kv_bytes(std::int64_t rows, bool wide) const noexcept {
  return batch * kv_heads * rows * (head_dim + v_dim) * (wide ? wide_bytes() : size_of(dtype));
}

Spans Job::gathered_keys(std::int32_t rank) const {
  const bool in_window = scheme == Scheme::halo || !in_order;
  Spans keys;
  for (const Span one : q_of(rank)) keys.push_back(mask.keys_of(one, in_window));
  return keys;
}

Spans Job::message(std::int32_t source, std::int32_t target) const {
  return overlap(k_of(source), joined(gathered_keys(target)));
}

std::int32_t Job::last_hop(std::int32_t block) const {
  for (std::int32_t hop = ranks() - 1; hop > 0; --hop) {
    if (mask.any_sees(q_of((block + hop) % ranks()), k_of(block))) return hop;
  }
  return 0;
}

Result<Job> make_job(const DistributedProblem& p) {
  FLASHCORE_RETURN_IF_ERROR(check_problem(p));
  Job job;
  const std::int64_t q_length = std::accumulate(p.q_rows.begin(), p.q_rows.end(), std::int64_t{0});
  const std::int64_t k_length = std::accumulate(p.k_rows.begin(), p.k_rows.end(), std::int64_t{0});
  FLASHCORE_RETURN_IF_ERROR(check_documents(p.documents, q_length, k_length));
  if (p.documents.empty()) {
    job.mask.q_docs = {0, q_length};
    job.mask.k_docs = {0, k_length};
  } else {
    job.mask.q_docs = job.mask.k_docs = p.documents;
  }
  job.mask.causal = p.causal;
  job.mask.left = std::max<std::int64_t>(p.window_left, -1);
  job.mask.right = p.causal ? 0 : std::max<std::int64_t>(p.window_right, -1);
  const Result<SchemeChoice> choice = choose_scheme(p);
  if (!choice.ok()) return choice.status();
  job.scheme = choice->scheme;
  job.head_ranks = choice->head_ranks;
  job.reason = choice->reason;
  Result<std::vector<Spans>> q_spans = place("q", p.q_rows, p.sharding);
  if (!q_spans.ok()) return q_spans.status();
  Result<std::vector<Spans>> k_spans = place("k", p.k_rows, p.sharding);
  if (!k_spans.ok()) return k_spans.status();
  job.q_spans = std::move(*q_spans);
  job.k_spans = std::move(*k_spans);
  job.dtype = p.dtype;
  job.batch = p.batch;
  job.q_heads = p.q_heads;
  job.kv_heads = p.kv_heads;
  job.head_dim = p.head_dim;
  job.v_dim = p.v_dim;
  job.in_order = p.reproducibility == Reproducibility::batch_invariant;
  return job;
}

}  // namespace flashcore::distributed
