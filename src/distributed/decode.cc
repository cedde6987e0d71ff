// distributed_decode(): a KV cache whose keys are divided between ranks, and one exchange of (out,
// LSE) in f32.
#include <algorithm>

#include "core/error.h"
#include "distributed/engine.h"
#include "distributed/guarded.h"
#include "distributed/header_words.h"
#include "distributed/local.h"

namespace flashcore {
namespace {

using namespace distributed;  // NOLINT: the parts of this file's functions

using ll = long long;

/// Checks out, lse and sinks as those of a call with `heads` heads that has all keys.
Status check_result(const Tensors& t, const Options& options, std::int64_t heads) {
  const std::int64_t wanted[] = {t.q.shape[0], heads, t.q.shape[2], t.v.shape[3]};
  for (int i = 0; i < 4; ++i) {
    if (t.out.shape[i] != wanted[i]) {
      return invalid_argument("out: an extent is %lld; wanted %lld", ll{t.out.shape[i]},
                              ll{wanted[i]});
    }
  }
  if (t.sinks.given() && (t.sinks.rank != 1 || t.sinks.shape[0] != t.q.shape[1])) {
    return invalid_argument("sinks: wanted f32 [%lld], one for each query head", ll{t.q.shape[1]});
  }
  Tensors call = t;
  call.q = slice(t.q, 1, 0, heads);
  if (t.sinks.given()) call.sinks = slice(t.sinks, 0, 0, heads);
  const int head_axis = t.block_table.given() ? 2 : 1;
  call.k = slice(t.k, head_axis, 0, std::min<std::int64_t>(t.k.shape[head_axis], 1));
  call.v = slice(t.v, head_axis, 0, std::min<std::int64_t>(t.v.shape[head_axis], 1));
  Options of_result;
  of_result.scale = options.scale;
  of_result.softcap = options.softcap;
  return make_problem(call, of_result).status();
}

Status check_decode(const Tensors& t, std::span<const std::int32_t> lengths, const Options& o,
                    const DecodeOptions& how, std::int32_t ranks) {
  for (const auto& [name, one] :
       {std::pair{"q", &t.q}, {"k", &t.k}, {"v", &t.v}, {"out", &t.out}}) {
    if (one->rank != 4) {
      return invalid_argument("%s: rank is %d; wanted 4", name, one->rank);
    }
    if (one->device != t.q.device) return invalid_argument("%s: is on another device", name);
  }
  if (how.interleave < 1) {
    return invalid_argument("interleave is %lld; wanted 1 or more", ll{how.interleave});
  }
  if (lengths.size() != static_cast<std::size_t>(t.q.shape[0])) {
    return invalid_argument("lengths: has %zu entries; wanted %lld, one for each sequence",
                            lengths.size(), ll{t.q.shape[0]});
  }
  for (const std::int32_t length : lengths) {
    if (length < 0) return invalid_argument("lengths: has %d; wanted 0 or more", length);
  }
  if (how.by_heads && t.q.shape[1] % ranks != 0) {
    return invalid_argument("by_heads: %d ranks cannot divide %lld heads", ranks, ll{t.q.shape[1]});
  }
  if (t.seqused_k.given()) {
    return invalid_argument("seqused_k: pass the whole lengths as `lengths`, in host memory");
  }
  if (o.causal || o.window_left >= 0 || o.window_right >= 0) {
    return unsupported(
        "decode has no causal mask and no window: row i sees all keys up to its own");
  }
  return check_result(t, o, how.by_heads ? t.q.shape[1] / ranks : t.q.shape[1]);
}

/// Checks that the cache of this rank can hold its part of the keys.
Status check_capacity(const Tensors& t, std::span<const std::int32_t> lengths, const Comm& comm,
                      std::int64_t interleave) {
  const std::int64_t capacity =
      t.block_table.given() ? t.k.shape[1] * t.block_table.shape[1] : t.k.shape[2];
  for (const std::int32_t length : lengths) {
    const std::int64_t own = decode_length(length, comm.rank, comm.size, interleave);
    if (own <= capacity) continue;
    return invalid_argument(
        "k: holds %lld keys of a sequence; this rank's part of a length of %d has %lld",
        ll{capacity}, length, ll{own});
  }
  return {};
}

std::vector<HeaderField> decode_header(const Tensors& t, std::span<const std::int32_t> lengths,
                                       const Options& o, const DecodeOptions& how) {
  std::vector<HeaderField> fields;
  fields.push_back({"q has dtype %s", static_cast<std::int64_t>(t.q.dtype), false, dtype_words});
  fields.push_back({"q has batch %s", t.q.shape[0]});
  fields.push_back({"q has %s heads", t.q.shape[1]});
  fields.push_back({"k has %s heads", t.k.shape[t.block_table.given() ? 2 : 1]});
  fields.push_back({"block_table is %s", t.block_table.given() ? 1 : 0, false, yes_words});
  fields.push_back({"q has %s rows", t.q.shape[2]});
  fields.push_back({"q has head_dim %s", t.q.shape[3]});
  fields.push_back({"v has v_dim %s", t.v.shape[3]});
  fields.push_back({"interleave is %s", how.interleave});
  fields.push_back({"by_heads is %s", how.by_heads ? 1 : 0});
  fields.push_back({"scale is %s", bits_of(scale_of(o, t.q.shape[3])), false, number_words});
  fields.push_back({"softcap is %s", bits_of(o.softcap), false, number_words});
  fields.push_back({"sinks are %s", t.sinks.given() ? 1 : 0, false, yes_words});
  fields.push_back({"reproducibility is %s", static_cast<std::int64_t>(o.reproducibility)});
  fields.push_back({"lengths have hash %s", hash_of(lengths)});
  return fields;
}

/// The memory of the partial results: out, then the LSE, of some heads.
PartialResult partial_in(std::byte* data, const Tensors& t, std::int64_t heads) {
  PartialResult made;
  made.out = compact(data, DType::f32, t.q.shape[0], heads, t.q.shape[2], t.v.shape[3], t.q.device);
  made.lse =
      view(data + bytes_of(made.out), DType::f32, {t.q.shape[0], heads, t.q.shape[2]}, t.q.device);
  return made;
}

std::int64_t partial_bytes(const Tensors& t, std::int64_t heads) noexcept {
  return t.q.shape[0] * heads * t.q.shape[2] * (t.v.shape[3] + 1) * 4;
}

/// Queries see different numbers of this rank's keys, so each has its own call.
Status attend_local(const Tensors& t, std::span<const std::int32_t> lengths, const Comm& comm,
                    const DecodeOptions& how, Local& local, const PartialResult& to) {
  const std::int64_t batch = t.q.shape[0], rows = t.q.shape[2];
  std::vector<std::int32_t> own;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (const std::int32_t length : lengths) {
      const std::int64_t whole = std::max<std::int64_t>(length - (rows - 1 - i), 0);
      own.push_back(
          static_cast<std::int32_t>(decode_length(whole, comm.rank, comm.size, how.interleave)));
    }
  }
  Buffer memory;
  FLASHCORE_RETURN_IF_ERROR(local.upload(memory, own));
  for (std::int64_t i = 0; i < rows; ++i) {
    Tensors call = t;
    call.sinks = {};
    call.q = slice(t.q, 2, i, 1);
    call.out = slice(to.out, 2, i, 1);
    call.lse = slice(to.lse, 2, i, 1);
    call.seqused_k = view(memory.data() + i * batch * 4, DType::i32, {batch}, t.q.device);
    FLASHCORE_RETURN_IF_ERROR(local.attend(call, true));
  }
  return {};
}

/// A rank's part of the result, and memory for those of the others. Made before anything is sent.
struct LocalPart {
  Buffer computed, send, recv;
  PartialResult result;  ///< in `computed`

  Status make(const Tensors& t, std::span<const std::int32_t> lengths, const Comm& comm,
              const DecodeOptions& how, Local& local) {
    FLASHCORE_RETURN_IF_ERROR(check_capacity(t, lengths, comm, how.interleave));
    const std::int64_t heads = t.q.shape[1], part = how.by_heads ? heads / comm.size : heads;
    FLASHCORE_RETURN_IF_ERROR(local.reserve(computed, partial_bytes(t, heads)));
    FLASHCORE_RETURN_IF_ERROR(local.reserve(recv, partial_bytes(t, part) * comm.size));
    if (how.by_heads) FLASHCORE_RETURN_IF_ERROR(local.reserve(send, partial_bytes(t, heads)));
    result = partial_in(computed.data(), t, heads);
    return attend_local(t, lengths, comm, how, local, result);
  }
};

/// One exchange of (out, LSE), and the merge in order of ranks.
Status exchange_parts(const Engine& engine, const Tensors& t, const DecodeOptions& how,
                      const Local& local, const LocalPart& mine) {
  const auto ranks = static_cast<std::int64_t>(engine.size());
  const std::int64_t heads = t.q.shape[1], part = how.by_heads ? heads / ranks : heads;
  const std::int64_t bytes = partial_bytes(t, part);
  const std::vector<std::size_t> sizes(static_cast<std::size_t>(ranks),
                                       static_cast<std::size_t>(bytes));
  if (how.by_heads) {
    for (std::int64_t r = 0; r < ranks; ++r) {
      const PartialResult to = partial_in(mine.send.data() + r * bytes, t, part);
      FLASHCORE_RETURN_IF_ERROR(local.copy(to.out, slice(mine.result.out, 1, r * part, part)));
      FLASHCORE_RETURN_IF_ERROR(
          local.copy(with_column(to.lse), with_column(slice(mine.result.lse, 1, r * part, part))));
    }
    FLASHCORE_RETURN_IF_ERROR(
        engine.all_to_all("out and lse", mine.send.data(), sizes, mine.recv.data(), sizes));
  } else {
    FLASHCORE_RETURN_IF_ERROR(
        engine.all_gather("out and lse", mine.computed.data(), mine.recv.data(), sizes));
  }
  std::vector<PartialResult> parts;
  for (std::int64_t r = 0; r < ranks; ++r) {
    parts.push_back(partial_in(mine.recv.data() + r * bytes, t, part));
  }
  TensorView sinks = t.sinks;
  if (sinks.given() && how.by_heads) sinks = slice(sinks, 0, engine.rank() * part, part);
  return merge(parts, t.out, t.lse, sinks, local.stream());
}

Status decode_over_ranks(const Comm& comm, const Tensors& t, std::span<const std::int32_t> lengths,
                         const Options& options, const DecodeOptions& how, Stream stream) {
  FLASHCORE_RETURN_IF_ERROR(check_comm(comm));
  const Engine engine(comm, "decode", stream);
  Options local_options;
  local_options.scale = options.scale;
  local_options.softcap = options.softcap;
  local_options.reproducibility = options.reproducibility;
  Result<Local> local = Local::make(t.q.device, stream, local_options);
  LocalPart mine;
  // Before the header, so that whatever this rank alone cannot compute is an error on all ranks.
  Status own = check_decode(t, lengths, options, how, comm.size);
  if (own.ok()) own = local.status();
  if (own.ok()) own = mine.make(t, lengths, comm, how, *local);
  const auto headers = agree(engine, decode_header(t, lengths, options, how), own);
  if (!headers.ok()) return headers.status();
  return exchange_parts(engine, t, how, *local, mine);
}
}  // namespace

std::int64_t decode_length(std::int64_t length, std::int32_t rank, std::int32_t ranks,
                           std::int64_t interleave) noexcept {
  const std::int64_t turn = interleave * ranks;
  const std::int64_t last =
      std::clamp<std::int64_t>(length % turn - rank * interleave, 0, interleave);
  return length / turn * interleave + last;
}

Status distributed_decode(const Comm& comm, const Tensors& tensors,
                          std::span<const std::int32_t> lengths, const Options& options,
                          const DecodeOptions& decode, Stream stream) noexcept {
  return guarded<Status>(
      [&] { return decode_over_ranks(comm, tensors, lengths, options, decode, stream); });
}

}  // namespace flashcore
