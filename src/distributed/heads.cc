// The exchange between "some rows of all heads" and "all rows of some heads": Ulysses' all-to-all.
#include "distributed/heads.h"

#include "core/error.h"

namespace flashcore::distributed {
namespace {

std::size_t as_size(std::int64_t bytes) noexcept { return static_cast<std::size_t>(bytes); }

/// A tensor's place in a message.
TensorView packed(std::byte*& at, const HeadTensor& tensor, std::int64_t batch, std::int64_t heads,
                  std::int64_t rows, Device device) {
  const TensorView made = compact(at, tensor.dtype, batch, heads, rows, tensor.dim, device);
  at += bytes_of(made);
  return made;
}

}  // namespace

HeadExchange::HeadExchange(const Job& job, const Engine& engine, Local& local)
    : job_(job),
      engine_(engine),
      local_(local),
      first_(job.group_of(engine.rank())),
      count_(job.head_ranks),
      me_(engine.rank() - first_) {}

const Spans& HeadExchange::spans_of(const HeadTensor& tensor, std::int32_t member) const {
  return tensor.of_q ? job_.q_of(first_ + member) : job_.k_of(first_ + member);
}

Spans HeadExchange::group_spans(const HeadTensor& tensor) const {
  Spans all;
  for (std::int32_t member = 0; member < count_; ++member) {
    const Spans& one = spans_of(tensor, member);
    all.insert(all.end(), one.begin(), one.end());
  }
  return joined(std::move(all));
}

HeadExchange::Heads HeadExchange::heads_of(const HeadTensor& tensor, std::int32_t member) const {
  const HeadRange heads = job_.heads(member);
  return tensor.of_q ? Heads{heads.q_begin, heads.q_heads()}
                     : Heads{heads.k_begin, heads.kv_heads()};
}

std::int64_t HeadExchange::part_bytes(const HeadTensors& tensors, std::int32_t heads_member,
                                      std::int32_t rows_member) const {
  std::int64_t bytes = 0;
  for (const HeadTensor& one : tensors) {
    bytes += heads_of(one, heads_member).count * rows_of(spans_of(one, rows_member)) * one.dim *
             size_of(one.dtype);
  }
  return job_.batch * bytes;
}

Status HeadExchange::reserve(HeadTensors& tensors) {
  std::int64_t by_heads = 0, by_rows = 0;  // bytes of the messages in these divisions
  for (std::int32_t member = 0; member < count_; ++member) {
    if (member == me_) continue;
    by_heads += part_bytes(tensors, me_, member);
    by_rows += part_bytes(tensors, member, me_);
  }
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(heads_message_, by_heads));
  FLASHCORE_RETURN_IF_ERROR(local_.reserve(rows_message_, by_rows));
  for (HeadTensor& one : tensors) {
    const std::int64_t heads = heads_of(one, me_).count, rows = rows_of(group_spans(one));
    FLASHCORE_RETURN_IF_ERROR(
        local_.reserve(one.memory, job_.batch * heads * rows * one.dim * size_of(one.dtype)));
    one.heads =
        compact(one.memory.data(), one.dtype, job_.batch, heads, rows, one.dim, local_.device());
  }
  return {};
}

Status HeadExchange::exchange(const char* step, const HeadTensors& tensors, bool to_heads) const {
  std::vector<std::size_t> by_heads(as_size(engine_.size())), by_rows(by_heads);
  for (std::int32_t member = 0; member < count_; ++member) {
    if (member == me_) continue;
    by_heads[as_size(first_ + member)] = as_size(part_bytes(tensors, me_, member));
    by_rows[as_size(first_ + member)] = as_size(part_bytes(tensors, member, me_));
  }
  return to_heads ? engine_.all_to_all(step, rows_message_.data(), by_rows, heads_message_.data(),
                                       by_heads)
                  : engine_.all_to_all(step, heads_message_.data(), by_heads, rows_message_.data(),
                                       by_rows);
}

Status HeadExchange::to_heads(const char* step, HeadTensors& tensors) const {
  const Device device = local_.device();
  for (const HeadTensor& one : tensors) {
    if (one.rows.given()) continue;
    FLASHCORE_RETURN_IF_ERROR(local_.zero(one.memory.data(), bytes_of(one.heads)));
  }
  std::byte* at = rows_message_.data();
  for (std::int32_t member = 0; member < count_; ++member) {
    if (member == me_) continue;
    for (const HeadTensor& one : tensors) {
      const Heads its = heads_of(one, member);
      const TensorView to =
          packed(at, one, job_.batch, its.count, rows_of(spans_of(one, me_)), device);
      FLASHCORE_RETURN_IF_ERROR(one.rows.given()
                                    ? local_.copy(to, slice(one.rows, 1, its.begin, its.count))
                                    : local_.zero(static_cast<std::byte*>(to.data), bytes_of(to)));
    }
  }
  FLASHCORE_RETURN_IF_ERROR(exchange(step, tensors, true));
  at = heads_message_.data();
  for (std::int32_t member = 0; member < count_; ++member) {
    for (const HeadTensor& one : tensors) {
      const Spans &rows = spans_of(one, member), all = group_spans(one);
      const Heads own = heads_of(one, me_);
      if (member != me_) {
        const TensorView from = packed(at, one, job_.batch, own.count, rows_of(rows), device);
        FLASHCORE_RETURN_IF_ERROR(local_.move(one.heads, all, from, rows));
      } else if (one.rows.given()) {
        FLASHCORE_RETURN_IF_ERROR(
            local_.move(one.heads, all, slice(one.rows, 1, own.begin, own.count), rows));
      }
    }
  }
  return {};
}

Status HeadExchange::to_rows(const char* step, const HeadTensors& tensors) const {
  const Device device = local_.device();
  std::byte* at = heads_message_.data();
  for (std::int32_t member = 0; member < count_; ++member) {
    if (member == me_) continue;
    for (const HeadTensor& one : tensors) {
      const Spans& rows = spans_of(one, member);
      const TensorView to =
          packed(at, one, job_.batch, heads_of(one, me_).count, rows_of(rows), device);
      FLASHCORE_RETURN_IF_ERROR(local_.move(to, rows, one.heads, group_spans(one)));
    }
  }
  FLASHCORE_RETURN_IF_ERROR(exchange(step, tensors, false));
  at = rows_message_.data();
  for (std::int32_t member = 0; member < count_; ++member) {
    for (const HeadTensor& one : tensors) {
      const Spans& rows = spans_of(one, me_);
      const Heads its = heads_of(one, member);
      TensorView from = one.heads;
      if (member != me_) from = packed(at, one, job_.batch, its.count, rows_of(rows), device);
      if (!one.rows.given()) continue;
      FLASHCORE_RETURN_IF_ERROR(local_.move(slice(one.rows, 1, its.begin, its.count), rows, from,
                                            member == me_ ? group_spans(one) : rows, one.how));
    }
  }
  return {};
}

}  // namespace flashcore::distributed
