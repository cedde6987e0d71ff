// Schemes "gather" and "halo": each rank receives all keys that its rows see, then attends once per
// piece of its rows.
#include "distributed/gather.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace flashcore::distributed {
namespace {

std::size_t as_size(std::int64_t bytes) noexcept { return static_cast<std::size_t>(bytes); }

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

/// The keys that a piece of queries sees. A batch-invariant gather starts at the first: see
/// Job::gathered_keys().
Span keys_of_piece(const Job& job, Span piece) {
  return job.mask.keys_of(piece, job.scheme == Scheme::halo || !job.in_order);
}

/// Some of the rows that a block holds.
KeyBlock rows_of_block(const KeyBlock& block, const Spans& held, Span rows) {
  const std::int64_t first = rows_of(overlap(held, {{0, rows.begin}}));
  return {slice(block.k, 2, first, rows.size()), slice(block.v, 2, first, rows.size())};
}

/// `count` rows of queries.
Shards query_rows(const Shards& shards, std::int64_t first, std::int64_t count) {
  Shards part = shards;
  part.q = slice(shards.q, 2, first, count);
  part.out = slice(shards.out, 2, first, count);
  if (shards.lse.given()) part.lse = slice(shards.lse, 2, first, count);
  return part;
}

}  // namespace

GatheredKeys::GatheredKeys(const Job& job, const Engine& engine, Local& local)
    : job_(job),
      engine_(engine),
      local_(local),
      needed_(joined(job.gathered_keys(engine.rank()))),
      whole_(everything_is_seen(job)) {}

Status GatheredKeys::reserve() {
  const std::int32_t me = engine_.rank(), ranks = job_.ranks();
  std::int64_t send_total = 0, recv_total = 0;
  for (std::int32_t r = 0; r < ranks; ++r) {
    sent_.push_back(r == me ? Spans() : job_.message(me, r));
    received_.push_back(whole_ ? job_.k_of(r) : r == me ? Spans() : job_.message(r, me));
    send_bytes_.push_back(as_size(job_.kv_bytes(rows_of(sent_.back()))));
    recv_bytes_.push_back(as_size(job_.kv_bytes(rows_of(received_.back()))));
    send_total += job_.kv_bytes(rows_of(sent_.back()));
    recv_total += job_.kv_bytes(rows_of(received_.back()));
  }
  if (whole_) {
    sent_ = {job_.k_of(me)};
    send_total = job_.kv_bytes(rows_of(sent_[0]));
  }
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(send_, send_total));
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(recv_, recv_total));
  return local_.reserve(memory_, job_.kv_bytes(rows_of(needed_)));
}

Status GatheredKeys::receive(const Shards& shards) {
  const std::int32_t me = engine_.rank();
  const Spans& own = job_.k_of(me);
  std::byte* at = send_.data();
  for (const Spans& rows : sent_) {
    const KeyBlock message(job_, at, job_.dtype, rows_of(rows), local_.device());
    FLASHCORE_RETURN_IF_ERROR(local_.move(message.k, rows, shards.k, own));
    FLASHCORE_RETURN_IF_ERROR(local_.move(message.v, rows, shards.v, own));
    at += job_.kv_bytes(rows_of(rows));
  }
  FLASHCORE_RETURN_IF_ERROR(
      whole_ ? engine_.all_gather("keys and values", send_.data(), recv_.data(), recv_bytes_)
             : engine_.all_to_all("keys and values", send_.data(), send_bytes_, recv_.data(),
                                  recv_bytes_));
  const KeyBlock all = keys();
  at = recv_.data();
  for (std::int32_t r = 0; r < job_.ranks(); ++r) {
    const Spans& rows = r == me ? own : received_[static_cast<std::size_t>(r)];
    const KeyBlock message(job_, at, job_.dtype, rows_of(rows), local_.device());
    FLASHCORE_RETURN_IF_ERROR(local_.move(all.k, needed_, r == me ? shards.k : message.k, rows));
    FLASHCORE_RETURN_IF_ERROR(local_.move(all.v, needed_, r == me ? shards.v : message.v, rows));
    at += recv_bytes_[static_cast<std::size_t>(r)];
  }
  return {};
}

KeyBlock GatheredKeys::keys() const {
  return {job_, memory_.data(), job_.dtype, rows_of(needed_), local_.device()};
}

Status run_gather(const Job& job, const Engine& engine, Local& local, const Shards& shards) {
  GatheredKeys keys(job, engine, local);
  FLASHCORE_RETURN_IF_ERROR(keys.reserve());
  FLASHCORE_RETURN_IF_ERROR(keys.receive(shards));
  return attend_to_all(job, engine.rank(), local, shards, keys.keys(), keys.needed());
}

Status attend_to_all(const Job& job, std::int32_t rank, Local& local, const Shards& shards,
                     const KeyBlock& keys, const Spans& held) {
  const Spans pieces = job.q_pieces(rank);
  Starts starts;
  std::vector<std::size_t> positions;
  for (const Span piece : pieces) {
    positions.push_back(add_starts(starts, job.mask, piece, keys_of_piece(job, piece)));
  }
  FLASHCORE_RETURN_IF_ERROR(local.upload(starts, job.batch));
  std::int64_t row = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const KeyBlock seen = rows_of_block(keys, held, keys_of_piece(job, pieces[i]));
    const Shards part = query_rows(shards, row, pieces[i].size());
    row += pieces[i].size();
    FLASHCORE_RETURN_IF_ERROR(
        local.attend(local_call(part, seen.k, seen.v, starts, positions[i]), false));
  }
  return {};
}

AllKeysBackward::AllKeysBackward(const Job& job, std::int32_t rank, Local& local,
                                 const Shards& shards, const Gradients& gradients, Spans held)
    : job_(job),
      local_(local),
      shards_(shards),
      gradients_(gradients),
      q_(job.q_pieces(rank)),
      held_(std::move(held)) {}

Status AllKeysBackward::reserve() {
  std::int64_t workspace = 0, most_keys = 0;
  for (const Span piece : q_) {
    seen_.push_back(keys_of_piece(job_, piece));
    positions_.push_back(add_starts(starts_, job_.mask, piece, seen_.back()));
    const Result<std::int64_t> needed =
        local_.workspace_of(job_, piece.size(), seen_.back().size());
    if (!needed.ok()) return needed.status();
    workspace = std::max(workspace, *needed);
    most_keys = std::max(most_keys, seen_.back().size());
  }
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(starts_));
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(workspace_, workspace));
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(term_, job_.kv_bytes(most_keys, true)));
  return local_.reserve(sums_, job_.kv_bytes(rows_of(held_), true));
}

Status AllKeysBackward::run(const KeyBlock& keys) {
  FLASHCORE_RETURN_IF_ERROR(local_.upload(starts_, job_.batch));
  FLASHCORE_RETURN_IF_ERROR(local_.zero(sums_.data(), job_.kv_bytes(rows_of(held_), true)));
  std::int64_t row = 0;
  for (std::size_t i = 0; i < q_.size(); ++i) {
    const std::int64_t count = q_[i].size();
    const KeyBlock seen = rows_of_block(keys, held_, seen_[i]);
    const KeyBlock term(job_, term_.data(), DType::f32, seen_[i].size(), local_.device());
    Gradients wanted;
    wanted.dout = slice(gradients_.dout, 2, row, count);
    if (gradients_.dlse.given()) wanted.dlse = slice(gradients_.dlse, 2, row, count);
    wanted.dq = slice(gradients_.dq, 2, row, count);
    wanted.dk = term.k;
    wanted.dv = term.v;
    FLASHCORE_RETURN_IF_ERROR(local_.differentiate(
        local_call(query_rows(shards_, row, count), seen.k, seen.v, starts_, positions_[i]), wanted,
        true, workspace_));
    const KeyBlock to = rows_of_block(sums(), held_, seen_[i]);
    FLASHCORE_RETURN_IF_ERROR(local_.add(to.k, term.k));
    FLASHCORE_RETURN_IF_ERROR(local_.add(to.v, term.v));
    row += count;
  }
  return {};
}

KeyBlock AllKeysBackward::sums() const {
  return {job_, sums_.data(), DType::f32, rows_of(held_), local_.device()};
}

GatherBackward::GatherBackward(const Job& job, const Engine& engine, Local& local,
                               const Shards& shards, const Gradients& gradients)
    : job_(job),
      engine_(engine),
      local_(local),
      shards_(shards),
      gradients_(gradients),
      keys_(job, engine, local),
      all_keys_(job, engine.rank(), local, shards, gradients, keys_.needed()) {}

Status GatherBackward::reserve() {
  const std::int32_t me = engine_.rank();
  FLASHCORE_RETURN_IF_ERROR(keys_.reserve());
  FLASHCORE_RETURN_IF_ERROR(all_keys_.reserve());
  std::int64_t send = 0, recv = 0;
  for (std::int32_t r = 0; r < job_.ranks(); ++r) {
    if (r == me) continue;
    send += job_.kv_bytes(rows_of(job_.message(r, me)), true);
    recv += job_.kv_bytes(rows_of(job_.message(me, r)), true);
  }
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(send_, send));
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(recv_, recv));
  return local_.reserve(own_, job_.kv_bytes(rows_of(job_.k_of(me)), true));
}

Status GatherBackward::run() {
  FLASHCORE_RETURN_IF_ERROR(keys_.receive(shards_));
  FLASHCORE_RETURN_IF_ERROR(all_keys_.run(keys_.keys()));
  FLASHCORE_RETURN_IF_ERROR(exchange());
  const Spans& rows = job_.k_of(engine_.rank());
  const KeyBlock own(job_, own_.data(), DType::f32, rows_of(rows), local_.device());
  FLASHCORE_RETURN_IF_ERROR(local_.store(gradients_.dk, own.k));
  return local_.store(gradients_.dv, own.v);
}

Status GatherBackward::exchange() const {
  const std::int32_t me = engine_.rank(), ranks = job_.ranks();
  const Device device = local_.device();
  const KeyBlock sums = all_keys_.sums();
  std::vector<std::size_t> send_bytes(as_size(ranks)), recv_bytes(send_bytes);
  std::byte* at = send_.data();
  for (std::int32_t r = 0; r < ranks; ++r) {
    if (r == me) continue;
    const Spans rows = job_.message(r, me);
    const KeyBlock message(job_, at, DType::f32, rows_of(rows), device);
    FLASHCORE_RETURN_IF_ERROR(local_.move(message.k, rows, sums.k, keys_.needed()));
    FLASHCORE_RETURN_IF_ERROR(local_.move(message.v, rows, sums.v, keys_.needed()));
    send_bytes[as_size(r)] = as_size(job_.kv_bytes(rows_of(rows), true));
    recv_bytes[as_size(r)] = as_size(job_.kv_bytes(rows_of(job_.message(me, r)), true));
    at += send_bytes[as_size(r)];
  }
  FLASHCORE_RETURN_IF_ERROR(
      engine_.all_to_all("dK and dV", send_.data(), send_bytes, recv_.data(), recv_bytes));
  const Spans& held = job_.k_of(me);
  const std::int64_t own_bytes = job_.kv_bytes(rows_of(held), true);
  const KeyBlock own(job_, own_.data(), DType::f32, rows_of(held), device);
  FLASHCORE_RETURN_IF_ERROR(local_.zero(own_.data(), own_bytes));
  at = recv_.data();
  for (std::int32_t r = 0; r < ranks; ++r) {
    const Spans rows = r == me ? keys_.needed() : job_.message(me, r);
    const KeyBlock message(job_, at, DType::f32, rows_of(rows), device);
    const KeyBlock& from = r == me ? sums : message;
    FLASHCORE_RETURN_IF_ERROR(local_.move(own.k, held, from.k, rows, Write::add));
    FLASHCORE_RETURN_IF_ERROR(local_.move(own.v, held, from.v, rows, Write::add));
    at += recv_bytes[as_size(r)];
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
