// The C ABI of context parallelism.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

#include "api/c_convert.h"
#include "api/c_entry.h"
#include "flashcore/distributed.h"
#include "flashcore/distributed_c.h"

namespace flashcore {
namespace {

constexpr std::int32_t kMaxRanks = 1 << 20;

Status convert_dtype(flashcore_dtype from, DType& to) {
  const bool is_float = from.code == FLASHCORE_FLOAT && from.lanes == 1;
  if (is_float && from.bits == 64) {
    to = DType::f64;
  } else if (is_float && from.bits == 32) {
    to = DType::f32;
  } else if (is_float && from.bits == 16) {
    to = DType::f16;
  } else if (from.code == FLASHCORE_BFLOAT && from.bits == 16) {
    to = DType::bf16;
  } else {
    return invalid_argument("dtype: has code %d and %d bits; wanted f64, f32, f16 or bf16",
                            from.code, from.bits);
  }
  return {};
}

Status convert_problem(const flashcore_distributed_problem* from, DistributedProblem& to) {
  if (from == nullptr) return invalid_argument("problem: is NULL");
  FLASHCORE_RETURN_IF_ERROR(check_struct("problem", from->struct_size, sizeof *from));
  const flashcore_distributed_problem& p = *from;
  if (p.ranks < 1 || p.ranks > kMaxRanks) {
    return invalid_argument("ranks is %d; wanted 1 to %d", p.ranks, kMaxRanks);
  }
  if (p.scheme < 0 || p.scheme > FLASHCORE_SCHEME_DECODE) {
    return invalid_argument("scheme is %d; wanted 0 to %d", p.scheme, FLASHCORE_SCHEME_DECODE);
  }
  if (p.sharding < 0 || p.sharding > FLASHCORE_SHARDING_CONTIGUOUS) {
    return invalid_argument("sharding is %d; wanted 0 or 1", p.sharding);
  }
  if (p.reproducibility != 0 && p.reproducibility != 1) {
    return invalid_argument("reproducibility is %d; wanted 0 or 1", p.reproducibility);
  }
  if (p.length < 0 || p.length > INT64_MAX / 4) {
    return invalid_argument("length is %lld; wanted 0 or more", static_cast<long long>(p.length));
  }
  FLASHCORE_RETURN_IF_ERROR(convert_dtype(p.dtype, to.dtype));
  to.batch = p.batch;
  to.q_heads = p.q_heads;
  to.kv_heads = p.kv_heads;
  to.head_dim = p.head_dim;
  to.v_dim = p.v_dim;
  to.causal = p.causal != 0;
  to.window_left = p.window_left;
  to.window_right = p.window_right;
  to.reproducibility = static_cast<Reproducibility>(p.reproducibility);
  to.sharding = static_cast<Sharding>(p.sharding);
  to.scheme = static_cast<Scheme>(p.scheme);
  to.ranks_per_node = p.ranks_per_node;
  to.head_ranks = p.head_ranks;
  to.q_rows = p.q_rows == nullptr ? distributed_rows(p.length, p.ranks, to.sharding)
                                  : std::vector<std::int64_t>(p.q_rows, p.q_rows + p.ranks);
  to.k_rows =
      p.k_rows == nullptr ? to.q_rows : std::vector<std::int64_t>(p.k_rows, p.k_rows + p.ranks);
  to.separate_backward = p.separate_backward != 0;
  to.by_heads = p.by_heads != 0;
  if (p.documents != nullptr) to.documents.assign(p.documents, p.documents + p.documents_count);
  return {};
}

Status write_text(const std::string& words, char* text, std::size_t capacity, std::size_t* needed) {
  if (needed != nullptr) *needed = words.size() + 1;
  if (text != nullptr && capacity > 0) std::snprintf(text, capacity, "%s", words.c_str());
  return {};
}

/// The text of a plan has no quotation marks.
std::string json_lines(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '\n' ? std::string("\\n") : std::string(1, c);
  return quoted + "\"";
}

Result<std::string> sent_json(const DistributedProblem& problem, std::int32_t rank) {
  std::string text = "[";
  for (const bool backward : {false, true}) {
    const auto sent = sent_bytes(problem, rank, backward);
    if (!sent.ok()) return sent.status();
    text += backward ? ", [" : "[";
    for (const SentBytes& one : *sent) {
      // std::to_string would add a digit table to the exports of the shared library.
      char bytes[24];
      std::snprintf(bytes, sizeof bytes, "%lld", static_cast<long long>(one.bytes));
      text += (&one == sent->data() ? "[\"" : ", [\"") + one.step + "\", " + bytes + "]";
    }
    text += "]";
  }
  return text + "]";
}

Status convert_options(const flashcore_distributed_options* from, DistributedOptions& to) {
  if (from == nullptr) return {};
  FLASHCORE_RETURN_IF_ERROR(check_struct("options", from->struct_size, sizeof *from));
  to = {static_cast<Scheme>(from->scheme),
        static_cast<Sharding>(from->sharding),
        from->ranks_per_node,
        from->head_ranks,
        {}};
  if (from->documents != nullptr) to.documents = {from->documents, from->documents_count};
  return {};
}

Status convert_comm(const flashcore_comm* from, Comm& to) {
  if (from == nullptr) return invalid_argument("comm: is NULL");
  FLASHCORE_RETURN_IF_ERROR(check_struct("comm", from->struct_size, sizeof *from));
  to = {from->context, from->rank, from->size, from->sendrecv, from->all_to_all, from->all_gather};
  return {};
}

}  // namespace
}  // namespace flashcore

using namespace flashcore;  // NOLINT: only C functions follow

std::int32_t flashcore_distributed_choose(const flashcore_distributed_problem* problem,
                                          std::int32_t* scheme, std::int32_t* head_ranks,
                                          char* reason, std::size_t capacity,
                                          flashcore_error* error) {
  return entry(error, [&]() -> Status {
    if (scheme == nullptr) return invalid_argument("scheme: is NULL");
    if (head_ranks == nullptr) return invalid_argument("head_ranks: is NULL");
    DistributedProblem converted;
    FLASHCORE_RETURN_IF_ERROR(convert_problem(problem, converted));
    const Result<SchemeChoice> choice = choose_scheme(converted);
    if (!choice.ok()) return choice.status();
    *scheme = static_cast<std::int32_t>(choice->scheme);
    *head_ranks = choice->head_ranks;
    return write_text(choice->reason, reason, capacity, nullptr);
  });
}

std::int32_t flashcore_distributed_plan(const flashcore_distributed_problem* problem,
                                        std::int32_t rank, char* json, std::size_t capacity,
                                        std::size_t* needed, flashcore_error* error) {
  return entry(error, [&]() -> Status {
    DistributedProblem converted;
    FLASHCORE_RETURN_IF_ERROR(convert_problem(problem, converted));
    const Result<DistributedPlan> plan =
        plan_distributed(converted, {{problem->link_bandwidth, problem->link_latency},
                                     {problem->net_bandwidth, problem->net_latency},
                                     problem->forward_flops,
                                     problem->backward_flops,
                                     problem->memory_bandwidth});
    if (!plan.ok()) return plan.status();
    std::string text = plan_json(*plan);
    text.back() = ',';
    text += " \"text\": " + json_lines(explain(*plan));
    if (rank >= 0) {
      const Result<std::string> sent = sent_json(converted, rank);
      if (!sent.ok()) return sent.status();
      text += ", \"sent\": " + *sent;
    }
    return write_text(text + "}", json, capacity, needed);
  });
}

std::int32_t flashcore_distributed_speeds(char* json, std::size_t capacity, std::size_t* needed,
                                          flashcore_error* error) {
  return entry(error, [&] { return write_text(speeds_json(), json, capacity, needed); });
}

std::int32_t flashcore_distributed_attention(const flashcore_comm* comm,
                                             const flashcore_params* params,
                                             const flashcore_distributed_options* options,
                                             flashcore_error* error) {
  return entry(error, [&]() -> Status {
    Comm engine;
    FLASHCORE_RETURN_IF_ERROR(convert_comm(comm, engine));
    const Result<CCall> call = convert(params);
    if (!call.ok()) return call.status();
    DistributedOptions how;
    FLASHCORE_RETURN_IF_ERROR(convert_options(options, how));
    return distributed_attention(engine, call->tensors, call->options, how, call->params.stream);
  });
}

std::int32_t flashcore_distributed_backward_workspace(const flashcore_distributed_problem* problem,
                                                      std::int32_t rank, flashcore_device device,
                                                      std::size_t* bytes, flashcore_error* error) {
  return entry(error, [&]() -> Status {
    if (bytes == nullptr) return invalid_argument("bytes: is NULL");
    DistributedProblem converted;
    FLASHCORE_RETURN_IF_ERROR(convert_problem(problem, converted));
    const Result<Device> on = device_of("device", device);
    if (!on.ok()) return on.status();
    const Result<std::size_t> needed = distributed_backward_workspace(converted, rank, *on);
    if (!needed.ok()) return needed.status();
    *bytes = *needed;
    return {};
  });
}

std::int32_t flashcore_distributed_backward(const flashcore_comm* comm,
                                            const flashcore_backward_params* params,
                                            const flashcore_distributed_options* options,
                                            flashcore_error* error) {
  return entry(error, [&]() -> Status {
    Comm engine;
    FLASHCORE_RETURN_IF_ERROR(convert_comm(comm, engine));
    const Result<CBackwardCall> made = convert_backward(params);
    if (!made.ok()) return made.status();
    if (made->global_lse) return invalid_argument("global_lse: is for calls of one rank; wanted 0");
    DistributedOptions how;
    FLASHCORE_RETURN_IF_ERROR(convert_options(options, how));
    const flashcore_params& p = made->call.params;
    const Tensors& t = made->call.tensors;
    return distributed_backward(engine, t, made->gradients, made->call.options, how,
                                {p.workspace, p.workspace_bytes, t.q.device, nullptr}, p.stream);
  });
}

std::int32_t flashcore_distributed_decode(const flashcore_comm* comm,
                                          const flashcore_params* params,
                                          const std::int32_t* lengths,
                                          const flashcore_decode_options* options,
                                          flashcore_error* error) {
  return entry(error, [&]() -> Status {
    Comm engine;
    FLASHCORE_RETURN_IF_ERROR(convert_comm(comm, engine));
    const Result<CCall> call = convert(params);
    if (!call.ok()) return call.status();
    if (lengths == nullptr) return invalid_argument("lengths: is NULL");
    DecodeOptions how;
    if (options != nullptr) {
      FLASHCORE_RETURN_IF_ERROR(check_struct("options", options->struct_size, sizeof *options));
      how = {options->interleave, options->by_heads != 0};
    }
    const auto batch =
        static_cast<std::size_t>(std::max<std::int64_t>(call->tensors.q.shape[0], 0));
    return distributed_decode(engine, call->tensors, std::span(lengths, batch), call->options, how,
                              call->params.stream);
  });
}
