// Schemes "gather" and "halo": each rank receives all keys that its rows see, then attends once per
// span of its rows.
#include "core/error.h"
#include "distributed/schemes.h"

namespace flashcore::distributed {
namespace {

std::size_t as_size(std::int64_t bytes) noexcept { return static_cast<std::size_t>(bytes); }

/// K and V of some rows as one message: K, then V.
struct Message {
  TensorView k, v;

  Message(const Job& job, std::byte* data, std::int64_t rows, Device device)
      : k(compact(data, job.dtype, job.batch, job.kv_heads, rows, job.head_dim, device)),
        v(compact(data + bytes_of(k), job.dtype, job.batch, job.kv_heads, rows, job.v_dim,
                  device)) {}
};

/// True if every rank receives every row of all others: an all-gather then serves.
bool everything_is_seen(const Job& job) {
  for (std::int32_t target = 0; target < job.ranks(); ++target) {
    const Spans needed = joined(job.gathered_keys(target));
    for (std::int32_t source = 0; source < job.ranks(); ++source) {
      if (source != target &&
          rows_of(overlap(job.k_of(source), needed)) != rows_of(job.k_of(source))) {
        return false;
      }
    }
  }
  return true;
}

/// The messages of all ranks, one after another, as this rank receives them.
struct Received {
  Buffer memory;
  std::vector<Spans> spans;  ///< of each rank; this rank's own are empty unless it was gathered
};

Status receive(const Job& job, const Engine& engine, Local& local, const Shards& shards,
               Received& received) {
  const std::int32_t me = engine.rank(), ranks = job.ranks();
  const bool whole = everything_is_seen(job);
  std::vector<std::size_t> send_bytes, recv_bytes;
  std::vector<Spans> sent;
  std::int64_t send_total = 0, recv_total = 0;
  for (std::int32_t r = 0; r < ranks; ++r) {
    sent.push_back(r == me ? Spans() : job.message(me, r));
    received.spans.push_back(whole ? job.k_of(r) : r == me ? Spans() : job.message(r, me));
    send_bytes.push_back(as_size(job.kv_bytes(rows_of(sent.back()))));
    recv_bytes.push_back(as_size(job.kv_bytes(rows_of(received.spans.back()))));
    send_total += static_cast<std::int64_t>(send_bytes.back());
    recv_total += static_cast<std::int64_t>(recv_bytes.back());
  }
  if (whole) {
    sent = {job.k_of(me)};
    send_total = job.kv_bytes(rows_of(sent[0]));
  }
  Buffer send;
  FLASHCORE_RETURN_IF_ERROR(local.reserve(send, send_total));
  FLASHCORE_RETURN_IF_ERROR(local.reserve(received.memory, recv_total));
  std::byte* at = send.data();
  for (const Spans& rows : sent) {
    const Message message(job, at, rows_of(rows), local.device());
    FLASHCORE_RETURN_IF_ERROR(local.take(message.k, shards.k, job.k_of(me), rows));
    FLASHCORE_RETURN_IF_ERROR(local.take(message.v, shards.v, job.k_of(me), rows));
    at += job.kv_bytes(rows_of(rows));
  }
  if (whole) {
    return engine.all_gather("keys and values", send.data(), received.memory.data(), recv_bytes);
  }
  return engine.all_to_all("keys and values", send.data(), send_bytes, received.memory.data(),
                           recv_bytes);
}

}  // namespace

Status run_gather(const Job& job, const Engine& engine, Local& local, const Shards& shards) {
  const std::int32_t me = engine.rank();
  Received received;
  FLASHCORE_RETURN_IF_ERROR(receive(job, engine, local, shards, received));
  const Spans seen = job.gathered_keys(me);
  const Spans needed = joined(seen);
  Buffer memory;
  FLASHCORE_RETURN_IF_ERROR(local.reserve(memory, job.kv_bytes(rows_of(needed))));
  const Message keys(job, memory.data(), rows_of(needed), local.device());
  const Spans own = overlap(job.k_of(me), needed);
  Buffer own_memory;
  FLASHCORE_RETURN_IF_ERROR(local.reserve(own_memory, job.kv_bytes(rows_of(own))));
  const Message local_keys(job, own_memory.data(), rows_of(own), local.device());
  FLASHCORE_RETURN_IF_ERROR(local.take(local_keys.k, shards.k, job.k_of(me), own));
  FLASHCORE_RETURN_IF_ERROR(local.take(local_keys.v, shards.v, job.k_of(me), own));
  FLASHCORE_RETURN_IF_ERROR(local.put(keys.k, needed, local_keys.k, own));
  FLASHCORE_RETURN_IF_ERROR(local.put(keys.v, needed, local_keys.v, own));
  std::byte* at = received.memory.data();
  for (std::int32_t r = 0; r < job.ranks(); ++r) {
    const Spans& rows = received.spans[static_cast<std::size_t>(r)];
    const Message message(job, at, rows_of(rows), local.device());
    if (r != me) {
      FLASHCORE_RETURN_IF_ERROR(local.put(keys.k, needed, message.k, rows));
      FLASHCORE_RETURN_IF_ERROR(local.put(keys.v, needed, message.v, rows));
    }
    at += job.kv_bytes(rows_of(rows));
  }
  const Spans& q = job.q_of(me);
  Starts starts;
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < q.size(); ++i) {
    indices.push_back(add_starts(starts, job.mask, q[i], seen[i]));
  }
  FLASHCORE_RETURN_IF_ERROR(local.upload(starts, job.batch));
  std::int64_t row = 0;
  for (std::size_t i = 0; i < q.size(); ++i) {
    const std::int64_t first = rows_of(overlap(needed, {{0, seen[i].begin}}));
    Shards part = shards;
    part.q = slice(shards.q, 2, row, q[i].size());
    part.out = slice(shards.out, 2, row, q[i].size());
    if (shards.lse.given()) part.lse = slice(shards.lse, 2, row, q[i].size());
    row += q[i].size();
    FLASHCORE_RETURN_IF_ERROR(
        local.attend(local_call(part, slice(keys.k, 2, first, seen[i].size()),
                                slice(keys.v, 2, first, seen[i].size()), starts, indices[i]),
                     false));
  }
  return {};
}

Tensors local_call(const Shards& shards, const TensorView& k, const TensorView& v,
                   const Starts& starts, std::size_t index) noexcept {
  Tensors call;
  call.q = shards.q;
  call.k = k;
  call.v = v;
  call.out = shards.out;
  call.lse = shards.lse;
  call.sinks = shards.sinks;
  if (index != kNoStarts) {
    call.q_start = starts.q_start(index);
    call.k_start = starts.k_start(index);
  }
  return call;
}

std::size_t add_starts(Starts& starts, const Mask& mask, Span q, Span k) {
  if (mask.left < 0 && mask.right < 0) return kNoStarts;
  const Segment one = mask.segments(q, k).at(0);
  if (one.k_start == 0 && one.q_start == k.size() - q.size()) return kNoStarts;
  return starts.add(one.q_start, one.k_start);
}

}  // namespace flashcore::distributed
