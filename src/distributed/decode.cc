// distributed_decode(): a KV cache whose keys are divided between ranks, and one exchange of (out,
// LSE) in f32.
#include <algorithm>

#include "core/error.h"
#include "distributed/engine.h"
#include "distributed/guarded.h"
#include "distributed/local.h"

namespace flashcore {
namespace {

using namespace distributed;  // NOLINT: the parts of this file's functions

using ll = long long;

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
  const std::int64_t heads = how.by_heads ? t.q.shape[1] / ranks : t.q.shape[1];
  const std::int64_t wanted[] = {t.q.shape[0], heads, t.q.shape[2], t.v.shape[3]};
  for (int i = 0; i < 4; ++i) {
    if (t.out.shape[i] != wanted[i]) {
      return invalid_argument("out: an extent is %lld; wanted %lld", ll{t.out.shape[i]},
                              ll{wanted[i]});
    }
  }
  if (t.seqused_k.given()) {
    return invalid_argument("seqused_k: pass the whole lengths as `lengths`, in host memory");
  }
  if (o.causal || o.window_left >= 0 || o.window_right >= 0) {
    return unsupported(
        "decode has no causal mask and no window: row i sees all keys up to its own");
  }
  return {};
}

std::vector<HeaderField> decode_header(const Tensors& t, std::span<const std::int32_t> lengths,
                                       const Options& o, const DecodeOptions& how) {
  std::vector<HeaderField> fields;
  fields.push_back({"q has dtype number %s", static_cast<std::int64_t>(t.q.dtype)});
  fields.push_back({"q has batch %s", t.q.shape[0]});
  fields.push_back({"q has %s heads", t.q.shape[1]});
  fields.push_back({"q has %s rows", t.q.shape[2]});
  fields.push_back({"q has head_dim %s", t.q.shape[3]});
  fields.push_back({"v has v_dim %s", t.v.shape[3]});
  fields.push_back({"interleave is %s", how.interleave});
  fields.push_back({"by_heads is %s", how.by_heads ? 1 : 0});
  fields.push_back({"sinks given: %s", t.sinks.given() ? 1 : 0});
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

Status decode_over_ranks(const Comm& comm, const Tensors& t, std::span<const std::int32_t> lengths,
                         const Options& options, const DecodeOptions& how, Stream stream) {
  FLASHCORE_RETURN_IF_ERROR(check_comm(comm));
  const Engine engine(comm, "decode", stream);
  const Status own = check_decode(t, lengths, options, how, comm.size);
  const auto headers = agree(engine, decode_header(t, lengths, options, how), own);
  if (!headers.ok()) return headers.status();
  Options local_options;
  local_options.scale = options.scale;
  local_options.softcap = options.softcap;
  local_options.reproducibility = options.reproducibility;
  Result<Local> local = Local::make(t.q.device, stream, local_options);
  if (!local.ok()) return local.status();
  const auto ranks = static_cast<std::int64_t>(comm.size);
  const std::int64_t heads = t.q.shape[1], part = how.by_heads ? heads / ranks : heads;
  Buffer computed, send, recv;
  FLASHCORE_RETURN_IF_ERROR(local->reserve(computed, partial_bytes(t, heads)));
  const PartialResult mine = partial_in(computed.data(), t, heads);
  FLASHCORE_RETURN_IF_ERROR(attend_local(t, lengths, comm, how, *local, mine));
  const std::int64_t bytes = partial_bytes(t, part);
  FLASHCORE_RETURN_IF_ERROR(local->reserve(recv, bytes * ranks));
  const std::vector<std::size_t> sizes(static_cast<std::size_t>(ranks),
                                       static_cast<std::size_t>(bytes));
  if (how.by_heads) {
    FLASHCORE_RETURN_IF_ERROR(local->reserve(send, bytes * ranks));
    for (std::int64_t r = 0; r < ranks; ++r) {
      const PartialResult to = partial_in(send.data() + r * bytes, t, part);
      FLASHCORE_RETURN_IF_ERROR(local->copy(to.out, slice(mine.out, 1, r * part, part)));
      FLASHCORE_RETURN_IF_ERROR(
          local->copy(with_column(to.lse), with_column(slice(mine.lse, 1, r * part, part))));
    }
    FLASHCORE_RETURN_IF_ERROR(
        engine.all_to_all("out and lse", send.data(), sizes, recv.data(), sizes));
  } else {
    FLASHCORE_RETURN_IF_ERROR(
        engine.all_gather("out and lse", computed.data(), recv.data(), sizes));
  }
  std::vector<PartialResult> parts;
  for (std::int64_t r = 0; r < ranks; ++r) {
    parts.push_back(partial_in(recv.data() + r * bytes, t, part));
  }
  TensorView sinks = t.sinks;
  if (sinks.given() && how.by_heads) sinks = slice(sinks, 0, comm.rank * part, part);
  return merge(parts, t.out, t.lse, sinks, stream);
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
