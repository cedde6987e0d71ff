// Scheme "ring": at step i, place r holds the block of K and V of place r - i. A block stops at the
// last place that sees one of its keys.
#include <algorithm>
#include <array>

#include "core/error.h"
#include "distributed/decimal.h"
#include "distributed/schemes.h"

namespace flashcore::distributed {
namespace {

/// A pair of spans of which the first sees keys of the second.
struct VisiblePair {
  std::int32_t step;
  std::size_t q, k;
  std::size_t starts;
};

std::int32_t block_at(const Job& job, std::int32_t place, std::int32_t step) noexcept {
  return (place - step + job.ranks()) % job.ranks();
}

std::vector<VisiblePair> visible_pairs(const Job& job, std::int32_t place, Starts& starts) {
  std::vector<VisiblePair> pairs;
  const Spans& q = job.q_of(place);
  for (std::int32_t step = 0; step < job.ranks(); ++step) {
    const Spans& k = job.k_of(block_at(job, place, step));
    for (std::size_t i = 0; i < q.size(); ++i) {
      for (std::size_t j = 0; j < k.size(); ++j) {
        if (!job.mask.sees(q[i], k[j])) continue;
        pairs.push_back({step, i, j, add_starts(starts, job.mask, q[i], k[j])});
      }
    }
  }
  return pairs;
}

/// K and then V of a block, compact.
struct Block {
  TensorView k, v;
};

Block block_in(const Job& job, const Buffer& memory, std::int64_t rows, Device device) {
  Block block;
  block.k = compact(memory.data(), job.dtype, job.batch, job.kv_heads, rows, job.head_dim, device);
  block.v = compact(memory.data() + bytes_of(block.k), job.dtype, job.batch, job.kv_heads, rows,
                    job.v_dim, device);
  return block;
}

std::int64_t offset_of(const Spans& spans, std::size_t index) noexcept {
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < index; ++i) offset += spans[i].size();
  return offset;
}

Shards rows_of_span(const Shards& shards, const Spans& spans, std::size_t index) noexcept {
  const std::int64_t at = offset_of(spans, index), count = spans[index].size();
  Shards part = shards;
  part.q = slice(shards.q, 2, at, count);
  part.out = slice(shards.out, 2, at, count);
  if (shards.lse.given()) part.lse = slice(shards.lse, 2, at, count);
  return part;
}

class Ring {
 public:
  Ring(const Job& job, const Members& members, const Engine& engine, Local& local,
       const Shards& shards)
      : job_(job), members_(members), engine_(engine), local_(local), shards_(shards) {}

  Status run() {
    FLASHCORE_RETURN_IF_ERROR(start());
    for (std::int32_t step = 0; step < job_.ranks(); ++step) {
      FLASHCORE_RETURN_IF_ERROR(pass_on(step));
      FLASHCORE_RETURN_IF_ERROR(compute(step));
    }
    return finish();
  }

 private:
  std::int64_t rows_at(std::int32_t step) const {
    return rows_of(job_.k_of(block_at(job_, members_.rank, step)));
  }
  /// The block of a step comes as far as this place.
  bool arrives(std::int32_t step) const {
    return step <= job_.last_hop(block_at(job_, members_.rank, step));
  }

  Status start() {
    std::int64_t most = 0;
    for (const Spans& spans : job_.k_spans) most = std::max(most, rows_of(spans));
    for (Buffer& one : blocks_) {
      FLASHCORE_RETURN_IF_ERROR(local_.reserve(one, job_.kv_bytes(most)));
    }
    pairs_ = visible_pairs(job_, members_.rank, starts_);
    FLASHCORE_RETURN_IF_ERROR(local_.upload(starts_, job_.batch));
    const Spans& q = job_.q_of(members_.rank);
    for (std::size_t i = 0; i < q.size(); ++i) {
      const Shards part = rows_of_span(shards_, q, i);
      partials_.emplace_back(part.out, part.lse, job_.in_order);
    }
    const Block own = block_in(job_, blocks_[0], rows_at(0), local_.device());
    FLASHCORE_RETURN_IF_ERROR(local_.copy(own.k, shards_.k));
    return local_.copy(own.v, shards_.v);
  }

  /// Sends the block of this step on, and receives the block of the next. The exchange comes before
  /// the computation, so that an engine with a stream of its own can overlap them.
  Status pass_on(std::int32_t step) {
    if (step + 1 >= job_.ranks()) return {};
    const bool goes_on = step < job_.last_hop(block_at(job_, members_.rank, step));
    const std::int64_t send = goes_on ? job_.kv_bytes(rows_at(step)) : 0;
    const std::int64_t recv = arrives(step + 1) ? job_.kv_bytes(rows_at(step + 1)) : 0;
    const std::int32_t ranks = job_.ranks();
    return engine_.sendrecv("ring step " + decimal(step + 1), held(step).data(), send,
                            members_.global((members_.rank + 1) % ranks), held(step + 1).data(),
                            recv, members_.global((members_.rank + ranks - 1) % ranks));
  }

  Status compute(std::int32_t step) {
    const Spans& q = job_.q_of(members_.rank);
    const Spans& k = job_.k_of(block_at(job_, members_.rank, step));
    const Block block = block_in(job_, held(step), rows_at(step), local_.device());
    for (const VisiblePair& pair : pairs_) {
      if (pair.step != step) continue;
      Shards part = rows_of_span(shards_, q, pair.q);
      const Result<PartialResult> to = partials_[pair.q].next(local_, k[pair.k].begin);
      if (!to.ok()) return to.status();
      part.out = to->out;
      part.lse = to->lse;
      part.sinks = {};
      const std::int64_t at = offset_of(k, pair.k), count = k[pair.k].size();
      FLASHCORE_RETURN_IF_ERROR(
          local_.attend(local_call(part, slice(block.k, 2, at, count), slice(block.v, 2, at, count),
                                   starts_, pair.starts),
                        true));
    }
    return {};
  }

  Status finish() {
    const Spans& q = job_.q_of(members_.rank);
    for (std::size_t i = 0; i < partials_.size(); ++i) {
      const bool sees_keys = std::any_of(pairs_.begin(), pairs_.end(),
                                         [&](const VisiblePair& pair) { return pair.q == i; });
      if (sees_keys) {
        FLASHCORE_RETURN_IF_ERROR(partials_[i].finish(local_, shards_.sinks));
        continue;
      }
      // No key: attention over none writes zeros, and the LSE of the sink.
      const Block none = block_in(job_, blocks_[0], 0, local_.device());
      FLASHCORE_RETURN_IF_ERROR(local_.attend(
          local_call(rows_of_span(shards_, q, i), none.k, none.v, starts_, kNoStarts), false));
    }
    return {};
  }

  Buffer& held(std::int32_t step) { return blocks_[static_cast<std::size_t>(step % 2)]; }

  const Job& job_;
  const Members members_;
  const Engine& engine_;
  Local& local_;
  const Shards& shards_;
  std::array<Buffer, 2> blocks_;
  Starts starts_;
  std::vector<VisiblePair> pairs_;
  std::vector<Partials> partials_;
};

}  // namespace

Status run_ring(const Job& job, const Members& members, const Engine& engine, Local& local,
                const Shards& shards) {
  if (job.ranks() == 1) {  // all rows are here: one call, without a merge
    const Starts none;
    return local.attend(local_call(shards, shards.k, shards.v, none, kNoStarts), false);
  }
  return Ring(job, members, engine, local, shards).run();
}

}  // namespace flashcore::distributed
