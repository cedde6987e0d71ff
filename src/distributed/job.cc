#include "distributed/job.h"

#include <algorithm>
#include <numeric>
#include <string_view>

#include "core/error.h"
#include "distributed/header_words.h"
#include "distributed/local.h"

namespace flashcore::distributed {
namespace {

using ll = long long;

Status check_documents(const std::vector<std::int64_t>& documents, std::int64_t q_length,
                       std::int64_t k_length) {
  if (documents.empty()) return {};
  if (documents.front() != 0 || !std::is_sorted(documents.begin(), documents.end())) {
    return invalid_argument("documents: wanted ascending numbers that start with 0");
  }
  for (const auto& [name, length] : {std::pair{"q", q_length}, {"k", k_length}}) {
    if (documents.back() == length) continue;
    return invalid_argument("documents: ends with %lld; the ranks have %lld rows of %s together",
                            ll{documents.back()}, ll{length}, name);
  }
  return {};
}

/// One extent of a tensor that must equal another number.
Status same(const char* name, const char* what, std::int64_t got, std::int64_t wanted) {
  if (got == wanted) return {};
  return invalid_argument("%s: %s is %lld; wanted %lld", name, what, ll{got}, ll{wanted});
}

constexpr std::size_t kQRows = 0, kKRows = 1;

}  // namespace

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
  job.separate_backward = p.separate_backward;
  job.in_order = p.reproducibility == Reproducibility::batch_invariant;
  return job;
}

Status check_shard(const char* name, const TensorView& t, const TensorView& q, bool required) {
  if (!t.given()) {
    return required ? invalid_argument("%s: is not given", name) : Status();
  }
  const bool is_lse = std::string_view(name).ends_with("lse");
  if (t.rank != (is_lse ? 3 : 4)) {
    return invalid_argument("%s: rank is %d; wanted %d", name, t.rank, is_lse ? 3 : 4);
  }
  if (t.device != q.device) return invalid_argument("%s: is on another device than q", name);
  const DType wanted = is_lse ? DType::f32 : q.dtype;
  if (t.dtype != wanted) {
    return invalid_argument("%s: dtype is %s; wanted %s", name, to_string(t.dtype),
                            to_string(wanted));
  }
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] < 0 || t.shape[i] > INT32_MAX) {
      return invalid_argument("%s: an extent is %lld; wanted 0 to 2^31-1", name, ll{t.shape[i]});
    }
  }
  if (!is_lse && t.shape[3] > 1 && t.strides[3] != 1) {
    return invalid_argument("%s: the last dimension has stride %lld; wanted 1", name,
                            ll{t.strides[3]});
  }
  if (t.data == nullptr && bytes_of(t) > 0) return invalid_argument("%s: is a null pointer", name);
  return {};
}

Status check_shards(const Tensors& t, const Options& options) {
  if (t.q.dtype != DType::f32 && t.q.dtype != DType::f16 && t.q.dtype != DType::bf16) {
    return invalid_argument("q: dtype is %s; wanted f32, f16 or bf16", to_string(t.q.dtype));
  }
  FLASHCORE_RETURN_IF_ERROR(check_shard("q", t.q, t.q, true));
  FLASHCORE_RETURN_IF_ERROR(check_shard("k", t.k, t.q, true));
  FLASHCORE_RETURN_IF_ERROR(check_shard("v", t.v, t.q, true));
  FLASHCORE_RETURN_IF_ERROR(check_shard("out", t.out, t.q, true));
  FLASHCORE_RETURN_IF_ERROR(check_shard("lse", t.lse, t.q, false));
  FLASHCORE_RETURN_IF_ERROR(same("k", "batch", t.k.shape[0], t.q.shape[0]));
  FLASHCORE_RETURN_IF_ERROR(same("v", "batch", t.v.shape[0], t.q.shape[0]));
  FLASHCORE_RETURN_IF_ERROR(same("v", "heads", t.v.shape[1], t.k.shape[1]));
  FLASHCORE_RETURN_IF_ERROR(same("v", "rows", t.v.shape[2], t.k.shape[2]));
  FLASHCORE_RETURN_IF_ERROR(same("k", "head_dim", t.k.shape[3], t.q.shape[3]));
  const std::int64_t wanted[] = {t.q.shape[0], t.q.shape[1], t.q.shape[2], t.v.shape[3]};
  for (int i = 0; i < 4; ++i) {
    FLASHCORE_RETURN_IF_ERROR(same("out", "an extent", t.out.shape[i], wanted[i]));
    if (t.lse.given() && i < 3) {
      FLASHCORE_RETURN_IF_ERROR(same("lse", "an extent", t.lse.shape[i], wanted[i]));
    }
  }
  if (t.sinks.given() &&
      (t.sinks.rank != 1 || t.sinks.dtype != DType::f32 || t.sinks.shape[0] != t.q.shape[1])) {
    return invalid_argument("sinks: wanted f32 [%lld], one for each query head", ll{t.q.shape[1]});
  }
  for (const TensorView* one :
       {&t.bias, &t.mask, &t.alibi_slopes, &t.cu_seqlens_q, &t.cu_seqlens_k, &t.seqused_k,
        &t.block_table, &t.q_start, &t.k_start, &t.q_scale, &t.k_scale, &t.v_scale}) {
    if (one->given()) {
      return unsupported("distributed calls take q, k, v, out, lse and sinks only");
    }
  }
  if (options.partial) return unsupported("partial: distributed calls have all keys");
  return {};
}

std::vector<HeaderField> header_of(const Tensors& t, const Options& o, const DistributedOptions& d,
                                   bool backward) {
  std::vector<HeaderField> fields(2);
  fields[kQRows] = {"q has %s rows", t.q.shape[2], true};
  fields[kKRows] = {"k has %s rows", t.k.shape[2], true};
  fields.push_back({"calls %s", backward ? 1 : 0, false, call_words});
  fields.push_back({"q has dtype %s", static_cast<std::int64_t>(t.q.dtype), false, dtype_words});
  fields.push_back({"q has batch %s", t.q.shape[0]});
  fields.push_back({"q has %s heads", t.q.shape[1]});
  fields.push_back({"k has %s heads", t.k.shape[1]});
  fields.push_back({"q has head_dim %s", t.q.shape[3]});
  fields.push_back({"v has v_dim %s", t.v.shape[3]});
  fields.push_back({"scheme is %s", static_cast<std::int64_t>(d.scheme), false, scheme_words});
  fields.push_back(
      {"sharding is %s", static_cast<std::int64_t>(d.sharding), false, sharding_words});
  fields.push_back({"ranks_per_node is %s", d.ranks_per_node});
  fields.push_back({"head_ranks is %s", d.head_ranks});
  fields.push_back({"causal is %s", o.causal ? 1 : 0});
  fields.push_back({"window_left is %s", o.window_left});
  fields.push_back({"window_right is %s", o.window_right});
  fields.push_back({"scale is %s", bits_of(scale_of(o, t.q.shape[3])), false, number_words});
  fields.push_back({"softcap is %s", bits_of(o.softcap), false, number_words});
  fields.push_back({"sinks are %s", t.sinks.given() ? 1 : 0, false, yes_words});
  fields.push_back({"reproducibility is %s", static_cast<std::int64_t>(o.reproducibility)});
  fields.push_back({"documents have hash %s", hash_of(d.documents)});
  return fields;
}

DistributedProblem problem_of(const Tensors& t, const Options& o, const DistributedOptions& d,
                              const std::vector<std::vector<std::int64_t>>& headers) {
  DistributedProblem p;
  p.dtype = t.q.dtype;
  p.batch = t.q.shape[0];
  p.q_heads = t.q.shape[1];
  p.kv_heads = t.k.shape[1];
  p.head_dim = t.q.shape[3];
  p.v_dim = t.v.shape[3];
  p.causal = o.causal;
  p.window_left = o.window_left;
  p.window_right = o.window_right;
  p.reproducibility = o.reproducibility;
  for (const auto& header : headers) {
    p.q_rows.push_back(header[kQRows]);
    p.k_rows.push_back(header[kKRows]);
  }
  p.sharding = d.sharding;
  p.scheme = d.scheme;
  p.ranks_per_node =
      d.ranks_per_node > 0 ? d.ranks_per_node : static_cast<std::int32_t>(headers.size());
  p.head_ranks = d.head_ranks;
  p.documents.assign(d.documents.begin(), d.documents.end());
  return p;
}

}  // namespace flashcore::distributed
