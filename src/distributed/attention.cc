// distributed_attention(): checks, compares headers, runs the scheme.
#include <bit>
#include <cmath>

#include "core/error.h"
#include "distributed/guarded.h"
#include "distributed/schemes.h"

namespace flashcore {
namespace {

using namespace distributed;  // NOLINT: the parts of this file's functions

using ll = long long;

Status check_shard(const char* name, const TensorView& t, const TensorView& q, bool required) {
  if (!t.given()) {
    return required ? invalid_argument("%s: is not given", name) : Status();
  }
  const bool is_lse = std::string_view(name) == "lse";
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

/// One extent of a tensor that must equal another number.
Status same(const char* name, const char* what, std::int64_t got, std::int64_t wanted) {
  if (got == wanted) return {};
  return invalid_argument("%s: %s is %lld; wanted %lld", name, what, ll{got}, ll{wanted});
}

/// Checks this rank's tensors by themselves.
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
      return unsupported("distributed_attention takes q, k, v, out, lse and sinks only");
    }
  }
  if (options.partial) return unsupported("partial: distributed_attention merges all keys");
  return {};
}

std::string dtype_words(std::int64_t dtype) { return to_string(static_cast<DType>(dtype)); }
std::string scheme_words(std::int64_t scheme) { return to_string(static_cast<Scheme>(scheme)); }
std::string sharding_words(std::int64_t sharding) {
  return sharding == static_cast<std::int64_t>(Sharding::zigzag) ? "zigzag" : "contiguous";
}
std::string number_words(std::int64_t bits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", std::bit_cast<double>(bits));
  return text;
}
std::string yes_words(std::int64_t flag) { return flag != 0 ? "given" : "not given"; }

constexpr std::size_t kQRows = 0, kKRows = 1;

std::vector<HeaderField> header_of(const Tensors& t, const Options& o,
                                   const DistributedOptions& d) {
  const double scale =
      o.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(t.q.shape[3], 1))));
  std::vector<HeaderField> fields(2);
  fields[kQRows] = {"q has %s rows", t.q.shape[2], true};
  fields[kKRows] = {"k has %s rows", t.k.shape[2], true};
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
  fields.push_back({"scale is %s", std::bit_cast<std::int64_t>(scale), false, number_words});
  fields.push_back({"softcap is %s", std::bit_cast<std::int64_t>(o.softcap), false, number_words});
  fields.push_back({"sinks are %s", t.sinks.given() ? 1 : 0, false, yes_words});
  fields.push_back({"reproducibility is %s", static_cast<std::int64_t>(o.reproducibility)});
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
  return p;
}

Status run_scheme(const Job& job, const Engine& engine, Local& local, const Shards& shards) {
  if (!job.is_ring()) return run_gather(job, engine, local, shards);
  if (job.head_ranks == 1) {
    return run_ring(job, {engine.rank(), 0, 1}, engine, local, shards);
  }
  HeadExchange exchange;
  Shards inner;
  FLASHCORE_RETURN_IF_ERROR(rows_to_heads(job, engine, local, shards, exchange, inner));
  const std::int32_t member = engine.rank() % job.head_ranks;
  const Members members{engine.rank() / job.head_ranks, member, job.head_ranks};
  const Job one = job.one_head_group(engine.rank());
  FLASHCORE_RETURN_IF_ERROR(run_ring(one, members, engine, local, inner));
  return heads_to_rows(job, engine, local, shards, exchange, inner);
}

Status attend_over_ranks(const Comm& comm, const Tensors& t, const Options& options,
                         const DistributedOptions& how, Stream stream) {
  FLASHCORE_RETURN_IF_ERROR(check_comm(comm));
  Engine engine(comm, "distributed_attention", stream);
  const Status own = check_shards(t, options);
  const auto headers = agree(engine, header_of(t, options, how), own);
  if (!headers.ok()) return headers.status();
  // Every rank that fails here fails with the same error: the job follows from the headers.
  const Result<Job> job = make_job(problem_of(t, options, how, *headers));
  if (!job.ok()) return job.status();
  engine.set_scheme(to_string(job->scheme));
  Options local_options;
  local_options.causal = options.causal;
  local_options.window_left = options.window_left;
  local_options.window_right = options.window_right;
  local_options.scale = options.scale;
  local_options.softcap = options.softcap;
  local_options.reproducibility = options.reproducibility;
  Result<Local> local = Local::make(t.q.device, stream, local_options);
  if (!local.ok()) return local.status();
  return run_scheme(*job, engine, *local, {t.q, t.k, t.v, t.out, t.lse, t.sinks});
}

}  // namespace

Status distributed_attention(const Comm& comm, const Tensors& tensors, const Options& options,
                             const DistributedOptions& distributed, Stream stream) noexcept {
  return guarded<Status>(
      [&] { return attend_over_ranks(comm, tensors, options, distributed, stream); });
}

}  // namespace flashcore
