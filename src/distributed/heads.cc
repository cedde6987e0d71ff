// The exchange between "some rows of all heads" and "all rows of some heads": Ulysses' all-to-all.
#include "core/error.h"
#include "distributed/schemes.h"

namespace flashcore::distributed {
namespace {

std::size_t as_bytes(std::int64_t bytes) noexcept { return static_cast<std::size_t>(bytes); }

/// A tensor's place in a message: its heads of one member, and its rows of one rank.
TensorView packed(std::byte*& at, DType dtype, std::int64_t batch, std::int64_t heads,
                  std::int64_t rows, std::int64_t dim, Device device) {
  const TensorView made = compact(at, dtype, batch, heads, rows, dim, device);
  at += bytes_of(made);
  return made;
}

Spans group_spans(const std::vector<Spans>& spans, std::int32_t first, std::int32_t count) {
  Spans all;
  for (std::int32_t r = first; r < first + count; ++r) {
    const Spans& one = spans[static_cast<std::size_t>(r)];
    all.insert(all.end(), one.begin(), one.end());
  }
  return joined(std::move(all));
}

/// Bytes of each message of one exchange, over all ranks of the engine.
struct Sizes {
  std::vector<std::size_t> send, recv;
  std::int64_t send_total = 0, recv_total = 0;

  explicit Sizes(std::int32_t ranks) : send(as_bytes(ranks)), recv(as_bytes(ranks)) {}
  void set(std::int32_t rank, std::int64_t send_bytes, std::int64_t recv_bytes) {
    send[as_bytes(rank)] = as_bytes(send_bytes);
    recv[as_bytes(rank)] = as_bytes(recv_bytes);
    send_total += send_bytes;
    recv_total += recv_bytes;
  }
};

/// Bytes of q, k and v of some heads and rows.
std::int64_t qkv_bytes(const Job& job, const HeadRange& heads, std::int32_t rank) {
  const std::int64_t q = heads.q_heads() * rows_of(job.q_of(rank)) * job.head_dim;
  const std::int64_t kv = heads.kv_heads() * rows_of(job.k_of(rank)) * (job.head_dim + job.v_dim);
  return job.batch * (q + kv) * size_of(job.dtype);
}

/// Bytes of the LSE and out.
std::int64_t out_bytes(const Job& job, const HeadRange& heads, std::int32_t rank) {
  return job.batch * heads.q_heads() * rows_of(job.q_of(rank)) *
         (4 + job.v_dim * size_of(job.dtype));
}

}  // namespace

Status rows_to_heads(const Job& job, const Engine& engine, Local& local, const Shards& shards,
                     HeadExchange& exchange, Shards& inner) {
  const std::int32_t me = engine.rank(), first = job.group_of(me), count = job.head_ranks;
  const HeadRange own = job.heads(me - first);
  const Device device = local.device();
  Sizes sizes(engine.size());
  for (std::int32_t member = 0; member < count; ++member) {
    const std::int32_t rank = first + member;
    if (rank == me) continue;
    sizes.set(rank, qkv_bytes(job, job.heads(member), me), qkv_bytes(job, own, rank));
  }
  FLASHCORE_RETURN_IF_ERROR(local.reserve(exchange.send, sizes.send_total));
  FLASHCORE_RETURN_IF_ERROR(local.reserve(exchange.recv, sizes.recv_total));
  const TensorView* given[] = {&shards.q, &shards.k, &shards.v};
  std::byte* at = exchange.send.data();
  for (std::int32_t member = 0; member < count; ++member) {
    if (first + member == me) continue;
    const HeadRange its = job.heads(member);
    for (const TensorView* one : given) {
      const bool is_q = one == &shards.q;
      const std::int64_t heads = is_q ? its.q_heads() : its.kv_heads();
      const TensorView to =
          packed(at, job.dtype, job.batch, heads, one->shape[2], one->shape[3], device);
      FLASHCORE_RETURN_IF_ERROR(
          local.copy(to, slice(*one, 1, is_q ? its.q_begin : its.k_begin, heads)));
    }
  }
  FLASHCORE_RETURN_IF_ERROR(engine.all_to_all("q, k, v by heads", exchange.send.data(), sizes.send,
                                              exchange.recv.data(), sizes.recv));
  const Spans q_all = group_spans(job.q_spans, first, count);
  const Spans k_all = group_spans(job.k_spans, first, count);
  const std::int64_t q_rows = rows_of(q_all), k_rows = rows_of(k_all);
  const std::int64_t q_count = job.batch * own.q_heads() * q_rows;
  const std::int64_t k_count = job.batch * own.kv_heads() * k_rows;
  const std::int64_t element = size_of(job.dtype);
  FLASHCORE_RETURN_IF_ERROR(local.reserve(
      exchange.tensors,
      (q_count * (job.head_dim + job.v_dim) + k_count * (job.head_dim + job.v_dim)) * element +
          q_count * 4));
  std::byte* place = exchange.tensors.data();
  inner.lse =
      without_column(packed(place, DType::f32, job.batch, own.q_heads(), q_rows, 1, device));
  inner.q = packed(place, job.dtype, job.batch, own.q_heads(), q_rows, job.head_dim, device);
  inner.k = packed(place, job.dtype, job.batch, own.kv_heads(), k_rows, job.head_dim, device);
  inner.v = packed(place, job.dtype, job.batch, own.kv_heads(), k_rows, job.v_dim, device);
  inner.out = packed(place, job.dtype, job.batch, own.q_heads(), q_rows, job.v_dim, device);
  inner.sinks = {};
  if (shards.sinks.given()) inner.sinks = slice(shards.sinks, 0, own.q_begin, own.q_heads());
  const TensorView* made[] = {&inner.q, &inner.k, &inner.v};
  at = exchange.recv.data();
  for (std::int32_t member = 0; member < count; ++member) {
    const std::int32_t rank = first + member;
    for (std::size_t i = 0; i < 3; ++i) {
      const bool is_q = i == 0;
      const Spans& rows = is_q ? job.q_of(rank) : job.k_of(rank);
      const TensorView from =
          rank == me ? slice(*given[i], 1, is_q ? own.q_begin : own.k_begin, made[i]->shape[1])
                     : packed(at, job.dtype, job.batch, made[i]->shape[1], rows_of(rows),
                              made[i]->shape[3], device);
      FLASHCORE_RETURN_IF_ERROR(local.put(*made[i], is_q ? q_all : k_all, from, rows));
    }
  }
  return {};
}

Status heads_to_rows(const Job& job, const Engine& engine, Local& local, const Shards& shards,
                     HeadExchange& exchange, const Shards& inner) {
  const std::int32_t me = engine.rank(), first = job.group_of(me), count = job.head_ranks;
  const HeadRange own = job.heads(me - first);
  const Device device = local.device();
  const Spans all = group_spans(job.q_spans, first, count);
  Sizes sizes(engine.size());
  for (std::int32_t member = 0; member < count; ++member) {
    const std::int32_t rank = first + member;
    if (rank == me) continue;
    sizes.set(rank, out_bytes(job, own, rank), out_bytes(job, job.heads(member), me));
  }
  FLASHCORE_RETURN_IF_ERROR(local.reserve(exchange.send, sizes.send_total));
  FLASHCORE_RETURN_IF_ERROR(local.reserve(exchange.recv, sizes.recv_total));
  const TensorView lse = with_column(inner.lse);
  std::byte* at = exchange.send.data();
  for (std::int32_t member = 0; member < count; ++member) {
    const std::int32_t rank = first + member;
    const Spans& rows = job.q_of(rank);
    const std::int64_t n = rows_of(rows), heads = own.q_heads();
    const HeadRange mine = own;
    if (rank == me) {
      FLASHCORE_RETURN_IF_ERROR(
          local.take(slice(shards.out, 1, mine.q_begin, heads), inner.out, all, rows));
      if (shards.lse.given()) {
        FLASHCORE_RETURN_IF_ERROR(
            local.take(slice(with_column(shards.lse), 1, mine.q_begin, heads), lse, all, rows));
      }
      continue;
    }
    const TensorView to_lse = packed(at, DType::f32, job.batch, heads, n, 1, device);
    const TensorView to_out = packed(at, job.dtype, job.batch, heads, n, job.v_dim, device);
    FLASHCORE_RETURN_IF_ERROR(local.take(to_lse, lse, all, rows));
    FLASHCORE_RETURN_IF_ERROR(local.take(to_out, inner.out, all, rows));
  }
  FLASHCORE_RETURN_IF_ERROR(engine.all_to_all("out by rows", exchange.send.data(), sizes.send,
                                              exchange.recv.data(), sizes.recv));
  at = exchange.recv.data();
  const std::int64_t n = rows_of(job.q_of(me));
  for (std::int32_t member = 0; member < count; ++member) {
    if (first + member == me) continue;
    const HeadRange its = job.heads(member);
    const TensorView from_lse = packed(at, DType::f32, job.batch, its.q_heads(), n, 1, device);
    const TensorView from = packed(at, job.dtype, job.batch, its.q_heads(), n, job.v_dim, device);
    FLASHCORE_RETURN_IF_ERROR(local.copy(slice(shards.out, 1, its.q_begin, its.q_heads()), from));
    if (shards.lse.given()) {
      FLASHCORE_RETURN_IF_ERROR(
          local.copy(slice(with_column(shards.lse), 1, its.q_begin, its.q_heads()), from_lse));
    }
  }
  return {};
}

}  // namespace flashcore::distributed
