// The C ABI: converts params (c_convert.cc), calls the C++ API, reports through *error.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "api/c_convert.h"
#include "api/c_entry.h"
#include "core/error.h"
#include "flashcore/attention.h"
#include "flashcore/block_mask.h"
#include "flashcore/flashcore.h"
#include "flashcore/quant.h"

namespace flashcore {
namespace {

static_assert(FLASHCORE_OK == static_cast<int>(StatusCode::ok) &&
              FLASHCORE_INVALID_ARGUMENT == static_cast<int>(StatusCode::invalid_argument) &&
              FLASHCORE_UNSUPPORTED == static_cast<int>(StatusCode::unsupported) &&
              FLASHCORE_OUT_OF_MEMORY == static_cast<int>(StatusCode::out_of_memory) &&
              FLASHCORE_CUDA_ERROR == static_cast<int>(StatusCode::cuda) &&
              FLASHCORE_INTERNAL == static_cast<int>(StatusCode::internal) &&
              FLASHCORE_CANCELLED == static_cast<int>(StatusCode::cancelled));
static_assert(FLASHCORE_WORKSPACE_HEADER_BYTES == kWorkspaceHeaderBytes);

Result<Plan> plan_of(const CCall& call) {
  const Result<Problem> problem = make_problem(call.tensors, call.options);
  if (!problem.ok()) return problem.status();
  Result<DeviceInfo> device = device_info(problem->device);
  if (!device.ok()) return device.status();
  DeviceInfo info = *device;
  const std::int32_t threads = call.params.threads;
  if (threads < 0) return invalid_argument("threads is %d; wanted 0 or more", threads);
  if (threads > 0) info.threads = threads;
  return make_plan(*problem, info);
}

/// Converts and plans a call, then runs the body of an entry point with both.
template <typename Body>
std::int32_t planned(const flashcore_params* params, flashcore_error* error, Body body) noexcept {
  return entry(error, [&]() -> Status {
    const Result<CCall> call = convert(params);
    if (!call.ok()) return call.status();
    const Result<Plan> plan = plan_of(*call);
    if (!plan.ok()) return plan.status();
    return body(*call, *plan);
  });
}

Status run_merge(const flashcore_merge_params& p) {
  if (p.parts == 0 || p.parts > INT32_MAX) {
    return invalid_argument("parts is %zu; wanted 1 to %d", p.parts, INT32_MAX);
  }
  if (p.outs == nullptr) return invalid_argument("outs: is NULL");
  if (p.lses == nullptr) return invalid_argument("lses: is NULL");
  if (p.out == nullptr) return invalid_argument("out: is NULL");
  PartialResult few[kMaxMergeParts];
  std::vector<PartialResult> many;
  const bool is_few = p.parts <= kMaxMergeParts;
  for (std::size_t i = 0; i < p.parts; ++i) {
    // One after another, so that a wrong number of parts meets a wrong tensor before all memory is
    // used up.
    PartialResult& part = is_few ? few[i] : many.emplace_back();
    char name[24];
    std::snprintf(name, sizeof name, "outs[%d]", static_cast<int>(i));
    FLASHCORE_RETURN_IF_ERROR(convert(name, &p.outs[i], TypeRule::several, part.out));
    std::snprintf(name, sizeof name, "lses[%d]", static_cast<int>(i));
    FLASHCORE_RETURN_IF_ERROR(convert(name, &p.lses[i], TypeRule::wide, part.lse));
  }
  TensorView out, lse, sinks;
  FLASHCORE_RETURN_IF_ERROR(convert("out", p.out, TypeRule::several, out));
  FLASHCORE_RETURN_IF_ERROR(convert("lse", p.lse, TypeRule::wide, lse));
  FLASHCORE_RETURN_IF_ERROR(convert("sinks", p.sinks, TypeRule::f32, sinks));
  return merge(is_few ? std::span(few, p.parts) : std::span(many), out, lse, sinks, p.stream,
               p.cancel);
}

}  // namespace
}  // namespace flashcore

using namespace flashcore;  // NOLINT: only C functions follow

void flashcore_params_init(flashcore_params* params, std::size_t struct_size) {
  if (params == nullptr) return;
  // Stores the caller's size even if the version is unknown. Later calls reject it.
  std::memset(params, 0, std::min(struct_size, sizeof *params));
  if (struct_size >= sizeof params->struct_size) params->struct_size = struct_size;
    // Only these types have defaults other than 0.
#define FLASHCORE_INIT_flag(name, initial)
#define FLASHCORE_INIT_choice(name, initial)
#define FLASHCORE_INIT_text(name, initial)
#define FLASHCORE_INIT_optional_f64(name, initial)
#define FLASHCORE_INIT_f64(name, initial) FLASHCORE_INIT_window(name, initial)
#define FLASHCORE_INIT_i32(name, initial) FLASHCORE_INIT_window(name, initial)
#define FLASHCORE_INIT_i64(name, initial) FLASHCORE_INIT_window(name, initial)
#define FLASHCORE_INIT_window(name, initial)                                   \
  if (offsetof(flashcore_params, name) + sizeof params->name <= struct_size) { \
    params->name = initial;                                                    \
  }
#define FLASHCORE_OPTION(name, type, initial, least, wanted, role, word, doc) \
  FLASHCORE_INIT_##type(name, initial)
#include "api/options.def"
}

std::int32_t flashcore_plan(const flashcore_params* params, flashcore_plan_info* info,
                            flashcore_error* error) {
  return entry(error, [&]() -> Status {
    if (info == nullptr) return invalid_argument("info: is NULL");
    FLASHCORE_RETURN_IF_ERROR(check_struct("info", info->struct_size, sizeof *info));
    const Result<CCall> call = convert(params);
    if (!call.ok()) return call.status();
    const Result<Plan> plan = plan_of(*call);
    if (!plan.ok()) return plan.status();
    *info = {sizeof *info,          plan->kernel->id, plan->kernel->family_name(),
             plan->workspace_bytes, plan->num_tiles,  plan->tile_q,
             plan->tile_k,          plan->splits,     uses_header(*plan) ? 1 : 0};
    return {};
  });
}

std::int32_t flashcore_explain(const flashcore_params* params, char* text, std::size_t capacity,
                               std::size_t* needed, flashcore_error* error) {
  return planned(params, error, [&](const CCall& call, const Plan& plan) -> Status {
    const std::string words = explain(plan, call.tensors);
    if (needed != nullptr) *needed = words.size() + 1;
    if (text != nullptr && capacity > 0) std::snprintf(text, capacity, "%s", words.c_str());
    return {};
  });
}

std::int32_t flashcore_attention(const flashcore_params* params, flashcore_error* error) {
  return planned(params, error, [](const CCall& call, const Plan& plan) {
    const flashcore_params& p = call.params;
    return run(plan, call.tensors,
               {p.workspace, p.workspace_bytes, plan.problem.device, p.workspace_header}, p.stream,
               p.cancel);
  });
}

std::int32_t flashcore_workspace_init(void* workspace, std::size_t workspace_bytes,
                                      flashcore_device device, void* stream,
                                      flashcore_error* error) {
  return entry(error, [&]() -> Status {
    const Result<Device> where = device_of("workspace", device);
    if (!where.ok()) return where.status();
    return workspace_init({workspace, workspace_bytes, *where}, stream);
  });
}

std::int32_t flashcore_workspace_status(void* workspace, std::size_t workspace_bytes,
                                        flashcore_device device, void* stream,
                                        flashcore_error* error) {
  return entry(error, [&]() -> Status {
    const Result<Device> where = device_of("workspace", device);
    if (!where.ok()) return where.status();
    return workspace_status({workspace, workspace_bytes, *where}, stream);
  });
}

std::int32_t flashcore_capture_id(flashcore_device device, void* stream, std::uint64_t* id,
                                  std::int32_t* graph_ended, flashcore_error* error) {
  return entry(error, [&]() -> Status {
    if (id == nullptr) return invalid_argument("id: is NULL");
    const Result<Device> where = device_of("stream", device);
    if (!where.ok()) return where.status();
    const Result<std::uint64_t> found = capture_id(*where, stream, graph_ended);
    if (!found.ok()) return found.status();
    *id = *found;
    return {};
  });
}

std::int32_t flashcore_merge(const flashcore_merge_params* params, flashcore_error* error) {
  return entry(error, [&]() -> Status {
    flashcore_merge_params p{};
    FLASHCORE_RETURN_IF_ERROR(copy_params(params, p));
    return run_merge(p);
  });
}

std::int32_t flashcore_append(const flashcore_append_params* params, flashcore_error* error) {
  return entry(error, [&]() -> Status {
    flashcore_append_params p{};
    FLASHCORE_RETURN_IF_ERROR(copy_params(params, p));
    AppendTensors t;
    FLASHCORE_RETURN_IF_ERROR(convert(p, t));
    return append(t, {p.workspace, p.workspace_bytes, t.k.device}, p.stream, p.cancel);
  });
}

std::int32_t flashcore_quantize(const flashcore_quant_params* params, flashcore_error* error) {
  return entry(error, [&]() -> Status {
    flashcore_quant_params p{};
    FLASHCORE_RETURN_IF_ERROR(copy_params(params, p));
    QuantTensors t;
    FLASHCORE_RETURN_IF_ERROR(convert(p, t));
    const QuantOptions options{p.block_rows, p.given_scale != 0, p.rotate != 0};
    return quantize(t, options, {p.workspace, p.workspace_bytes, t.from.device}, p.stream,
                    p.cancel);
  });
}

std::int32_t flashcore_dequantize(const flashcore_quant_params* params, flashcore_error* error) {
  return entry(error, [&]() -> Status {
    flashcore_quant_params p{};
    FLASHCORE_RETURN_IF_ERROR(copy_params(params, p));
    QuantTensors t;
    FLASHCORE_RETURN_IF_ERROR(convert(p, t));
    return dequantize(t, {p.block_rows, true, p.rotate != 0}, p.stream, p.cancel);
  });
}

std::int32_t flashcore_cuda_device_count(flashcore_error* error) {
  std::int32_t count = 0;
  entry(error, [&]() -> Status {
    const CudaAvailability available = cuda_availability();
    count = available.device_count;
    if (count == 0) return unsupported("%s", available.reason.c_str());
    return {};
  });
  return count;
}

const char* flashcore_status_name(std::int32_t code) {
  return to_string(static_cast<StatusCode>(code));
}

const char* flashcore_version(void) { return version(); }

const char* flashcore_source_fingerprint(const char* family) {
  return source_fingerprint(family == nullptr ? "" : family);
}
