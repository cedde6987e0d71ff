// Scheme "ring": at step i, place r holds the block of K and V of place r - i. A block stops at the
// last place that sees one of its keys.
#include "distributed/ring.h"

#include <algorithm>

#include "core/error.h"
#include "distributed/decimal.h"
#include "distributed/gather.h"

namespace flashcore::distributed {
namespace {

std::int64_t offset_of(const Spans& spans, std::size_t index) noexcept {
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < index; ++i) offset += spans[i].size();
  return offset;
}

/// The rows of one span of a tensor that holds these spans.
TensorView span_of(const TensorView& tensor, const Spans& spans, std::size_t index) noexcept {
  return slice(tensor, 2, offset_of(spans, index), spans[index].size());
}

Shards rows_of_span(const Shards& shards, const Spans& spans, std::size_t index) noexcept {
  Shards part = shards;
  part.q = span_of(shards.q, spans, index);
  part.out = span_of(shards.out, spans, index);
  if (shards.lse.given()) part.lse = span_of(shards.lse, spans, index);
  return part;
}

class Ring {
 public:
  Ring(const Job& job, const Members& members, const Engine& engine, Local& local,
       const Shards& shards)
      : job_(job),
        walk_(job, members, engine),
        q_(job.q_pieces(members.rank)),
        local_(local),
        shards_(shards) {}

  Status run() {
    FLASHCORE_RETURN_IF_ERROR(start());
    for (std::int32_t step = 0; step < job_.ranks(); ++step) {
      // The exchange comes before the computation, so that an engine with a stream of its own can
      // overlap them.
      FLASHCORE_RETURN_IF_ERROR(walk_.pass_on(step, "", false, held(step), held(step + 1)));
      FLASHCORE_RETURN_IF_ERROR(compute(step));
    }
    return finish();
  }

 private:
  Status start() {
    for (Buffer& one : blocks_) FLASHCORE_RETURN_IF_ERROR(walk_.reserve(local_, one, false));
    pairs_ = walk_.visible_pairs(starts_);
    FLASHCORE_RETURN_IF_ERROR(local_.upload(starts_, job_.batch));
    for (std::size_t i = 0; i < q_.size(); ++i) {
      const Shards part = rows_of_span(shards_, q_, i);
      partials_.emplace_back(part.out, part.lse, job_.in_order);
    }
    return walk_.begin(local_, shards_, held(0));
  }

  Status compute(std::int32_t step) {
    const Spans k = job_.k_pieces(walk_.block(step));
    const KeyBlock block(job_, held(step).data(), job_.dtype, rows_of(k), local_.device());
    for (const VisiblePair& pair : pairs_) {
      if (pair.step != step) continue;
      Shards part = rows_of_span(shards_, q_, pair.q);
      const Result<PartialResult> to = partials_[pair.q].next(local_, k[pair.k].begin);
      if (!to.ok()) return to.status();
      part.out = to->out;
      part.lse = to->lse;
      part.sinks = {};
      FLASHCORE_RETURN_IF_ERROR(
          local_.attend(local_call(part, span_of(block.k, k, pair.k), span_of(block.v, k, pair.k),
                                   starts_, pair.starts),
                        true));
    }
    return {};
  }

  Status finish() {
    std::vector<bool> sees_keys(q_.size());
    for (const VisiblePair& pair : pairs_) sees_keys[pair.q] = true;
    for (std::size_t i = 0; i < partials_.size(); ++i) {
      if (sees_keys[i]) {
        FLASHCORE_RETURN_IF_ERROR(partials_[i].finish(local_, shards_.sinks));
        continue;
      }
      // No key: attention over none writes zeros, and the LSE of the sink.
      const KeyBlock none(job_, held(0).data(), job_.dtype, 0, local_.device());
      FLASHCORE_RETURN_IF_ERROR(local_.attend(
          local_call(rows_of_span(shards_, q_, i), none.k, none.v, starts_, kNoStarts), false));
    }
    return {};
  }

  Buffer& held(std::int32_t step) { return blocks_[static_cast<std::size_t>(step % 2)]; }

  const Job& job_;
  const RingWalk walk_;
  const Spans q_;
  Local& local_;
  const Shards& shards_;
  std::array<Buffer, 2> blocks_;
  Starts starts_;
  std::vector<VisiblePair> pairs_;
  std::vector<Partials> partials_;
};

}  // namespace

RingWalk::RingWalk(const Job& job, const Members& members, const Engine& engine)
    : job_(job), members_(members), engine_(engine) {
  for (std::int32_t block = 0; block < job.ranks(); ++block) hops_.push_back(job.last_hop(block));
}

std::int32_t RingWalk::block(std::int32_t step) const noexcept {
  return (members_.rank - step % job_.ranks() + job_.ranks()) % job_.ranks();
}

std::vector<VisiblePair> RingWalk::visible_pairs(Starts& starts) const {
  std::vector<VisiblePair> pairs;
  const Spans q = job_.q_pieces(members_.rank);
  for (std::int32_t step = 0; step < job_.ranks(); ++step) {
    const Spans k = job_.k_pieces(block(step));
    for (std::size_t i = 0; i < q.size(); ++i) {
      const Span seen = job_.mask.keys_of(q[i], true);
      for (std::size_t j = 0; j < k.size(); ++j) {
        if (k[j].begin >= seen.end || k[j].end <= seen.begin) continue;
        if (!job_.mask.sees(q[i], k[j])) continue;
        pairs.push_back({step, i, j, add_starts(starts, job_.mask, q[i], k[j])});
      }
    }
  }
  return pairs;
}

Status RingWalk::reserve(Local& local, Buffer& buffer, bool wide) const {
  std::int64_t most = 0;
  for (const Spans& spans : job_.k_spans) most = std::max(most, rows_of(spans));
  return local.reserve(buffer, job_.kv_bytes(most, wide));
}

Status RingWalk::begin(Local& local, const Shards& shards, const Buffer& to) const {
  const KeyBlock own(job_, to.data(), job_.dtype, rows_at(0), local.device());
  FLASHCORE_RETURN_IF_ERROR(local.copy(own.k, shards.k));
  return local.copy(own.v, shards.v);
}

Status RingWalk::pass_on(std::int32_t step, const char* what, bool wide, const Buffer& held,
                         const Buffer& next) const {
  const std::int32_t ranks = job_.ranks();
  if (step + 1 >= ranks) return {};
  const bool goes_on = step < hops(block(step)), arrives = step + 1 <= hops(block(step + 1));
  const std::int64_t send = goes_on ? job_.kv_bytes(rows_at(step), wide) : 0;
  const std::int64_t recv = arrives ? job_.kv_bytes(rows_at(step + 1), wide) : 0;
  return engine_.sendrecv("ring step " + decimal(step + 1) + what, held.data(), send,
                          members_.global((members_.rank + 1) % ranks), next.data(), recv,
                          members_.global((members_.rank + ranks - 1) % ranks));
}

Status run_ring(const Job& job, const Members& members, const Engine& engine, Local& local,
                const Shards& shards) {
  if (job.ranks() == 1) {  // all rows are here: nothing to merge
    return attend_to_all(job, 0, local, shards, KeyBlock(shards.k, shards.v), job.k_of(0));
  }
  return Ring(job, members, engine, local, shards).run();
}

RingBackward::RingBackward(const Job& job, const Members& members, const Engine& engine,
                           Local& local, const Shards& shards, const Gradients& gradients)
    : job_(job),
      members_(members),
      engine_(engine),
      local_(local),
      shards_(shards),
      gradients_(gradients),
      walk_(job, members, engine),
      q_(job.q_pieces(members.rank)) {}

Status RingBackward::reserve() {
  for (Buffer& one : blocks_) FLASHCORE_RETURN_IF_ERROR(walk_.reserve(local_, one, false));
  for (Buffer& one : sums_) FLASHCORE_RETURN_IF_ERROR(walk_.reserve(local_, one, true));
  pairs_ = walk_.visible_pairs(starts_);
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(starts_));
  std::int64_t workspace = 0, dq_bytes = 0, dkv_bytes = 0;
  for (const VisiblePair& pair : pairs_) {
    const std::int64_t rows = q_[pair.q].size();
    const std::int64_t keys = job_.k_pieces(walk_.block(pair.step))[pair.k].size();
    const Result<std::int64_t> needed = local_.workspace_of(job_, rows, keys);
    if (!needed.ok()) return needed.status();
    workspace = std::max(workspace, *needed);
    dq_bytes = std::max(dq_bytes, job_.wide_q_bytes(rows));
    dkv_bytes = std::max(dkv_bytes, job_.kv_bytes(keys, true));
  }
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(workspace_, workspace));
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(dq_term_, dq_bytes));
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(dkv_term_, dkv_bytes));
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(dq_, job_.wide_q_bytes(rows_of(q_))));
  FLASHCORE_RETURN_IF_ERROR(
      local_.reserve(own_, job_.kv_bytes(rows_of(job_.k_of(members_.rank)), true)));
  std::int64_t finished = 0;
  for (std::int32_t block = 0; block < job_.ranks(); ++block) finished += finished_bytes(block);
  return local_.reserve(finished_, finished);
}

Status RingBackward::run() {
  FLASHCORE_RETURN_IF_ERROR(local_.upload(starts_, job_.batch));
  FLASHCORE_RETURN_IF_ERROR(walk_.begin(local_, shards_, held(blocks_, 0)));
  Buffer& first = held(sums_, 0);
  FLASHCORE_RETURN_IF_ERROR(local_.zero(first.data(), job_.kv_bytes(walk_.rows_at(0), true)));
  FLASHCORE_RETURN_IF_ERROR(local_.zero(dq_.data(), job_.wide_q_bytes(rows_of(q_))));
  for (std::int32_t step = 0; step < job_.ranks(); ++step) {
    FLASHCORE_RETURN_IF_ERROR(
        walk_.pass_on(step, "", false, held(blocks_, step), held(blocks_, step + 1)));
    FLASHCORE_RETURN_IF_ERROR(compute(step));
    FLASHCORE_RETURN_IF_ERROR(keep_finished(step));
    FLASHCORE_RETURN_IF_ERROR(
        walk_.pass_on(step, ", dK and dV", true, held(sums_, step), held(sums_, step + 1)));
  }
  FLASHCORE_RETURN_IF_ERROR(send_home());
  const Device device = local_.device();
  const TensorView dq =
      compact(dq_.data(), DType::f32, job_.batch, job_.q_heads, rows_of(q_), job_.head_dim, device);
  const KeyBlock own(job_, own_.data(), DType::f32, walk_.rows_at(0), device);
  FLASHCORE_RETURN_IF_ERROR(local_.store(gradients_.dq, dq));
  FLASHCORE_RETURN_IF_ERROR(local_.store(gradients_.dk, own.k));
  return local_.store(gradients_.dv, own.v);
}

Status RingBackward::compute(std::int32_t step) {
  const Device device = local_.device();
  const Spans k = job_.k_pieces(walk_.block(step));
  const KeyBlock keys(job_, held(blocks_, step).data(), job_.dtype, rows_of(k), device);
  const KeyBlock sums(job_, held(sums_, step).data(), DType::f32, rows_of(k), device);
  const TensorView dq =
      compact(dq_.data(), DType::f32, job_.batch, job_.q_heads, rows_of(q_), job_.head_dim, device);
  for (const VisiblePair& pair : pairs_) {
    if (pair.step != step) continue;
    Shards part = rows_of_span(shards_, q_, pair.q);
    part.sinks = {};  // the LSE contains them
    const KeyBlock term(job_, dkv_term_.data(), DType::f32, k[pair.k].size(), device);
    Gradients wanted;
    wanted.dout = span_of(gradients_.dout, q_, pair.q);
    if (gradients_.dlse.given()) wanted.dlse = span_of(gradients_.dlse, q_, pair.q);
    wanted.dq = compact(dq_term_.data(), DType::f32, job_.batch, job_.q_heads, q_[pair.q].size(),
                        job_.head_dim, device);
    wanted.dk = term.k;
    wanted.dv = term.v;
    FLASHCORE_RETURN_IF_ERROR(
        local_.differentiate(local_call(part, span_of(keys.k, k, pair.k),
                                        span_of(keys.v, k, pair.k), starts_, pair.starts),
                             wanted, false, workspace_));
    FLASHCORE_RETURN_IF_ERROR(local_.add(span_of(dq, q_, pair.q), wanted.dq));
    FLASHCORE_RETURN_IF_ERROR(local_.add(span_of(sums.k, k, pair.k), term.k));
    FLASHCORE_RETURN_IF_ERROR(local_.add(span_of(sums.v, k, pair.k), term.v));
  }
  return {};
}

Status RingBackward::keep_finished(std::int32_t step) {
  const std::int32_t block = walk_.block(step);
  if (step != walk_.hops(block)) return {};
  std::byte* to = own_.data();
  if (step > 0) {  // in order of blocks, as all_to_all() wants them
    to = finished_.data();
    for (std::int32_t before = 0; before < block; ++before) to += finished_bytes(before);
  }
  const std::int64_t count = job_.kv_bytes(walk_.rows_at(step), true) / 4;
  const auto flat = [&](std::byte* data) {
    return compact(data, DType::f32, 1, 1, 1, count, local_.device());
  };
  return local_.copy(flat(to), flat(held(sums_, step).data()));
}

std::int64_t RingBackward::finished_bytes(std::int32_t block) const {
  const bool ends_here = (block + walk_.hops(block)) % job_.ranks() == members_.rank;
  if (!ends_here || block == members_.rank) return 0;
  return job_.kv_bytes(rows_of(job_.k_of(block)), true);
}

Status RingBackward::send_home() const {
  std::vector<std::size_t> send(static_cast<std::size_t>(engine_.size())), recv(send);
  for (std::int32_t block = 0; block < job_.ranks(); ++block) {
    send[static_cast<std::size_t>(members_.global(block))] =
        static_cast<std::size_t>(finished_bytes(block));
  }
  const std::int32_t me = members_.rank, hops = walk_.hops(me);
  if (hops > 0) {
    recv[static_cast<std::size_t>(members_.global((me + hops) % job_.ranks()))] =
        static_cast<std::size_t>(job_.kv_bytes(walk_.rows_at(0), true));
  }
  return engine_.all_to_all("dK and dV home", finished_.data(), send, own_.data(), recv);
}

}  // namespace flashcore::distributed
