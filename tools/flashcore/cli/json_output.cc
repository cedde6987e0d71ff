#include "cli/json_output.h"
#include "cli/text.h"

#include <cmath>
#include <fstream>
#include <string>

#include "plan/planner.h"

namespace flashcore::tool {
namespace {

Json to_json(const verify::ElementError& e) {
  return {{"tensor", e.column < 0 ? "lse" : "out"},
          {"batch", e.row.b},
          {"head", e.row.h},
          {"row", e.row.i},
          {"column", e.column},
          {"got", tool::to_json(e.got)},
          {"want", tool::to_json(e.want)},
          {"bound", tool::to_json(e.bound)}};
}

/// From the kernel module's text, "... Kernel Module  580.65.06  ...". Needs no CUDA.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  for (std::string word; file >> word;) {
    if (word.find('.') != std::string::npos &&
        word.find_first_not_of("0123456789.") == std::string::npos) {
      return word;
    }
  }
  return {};
}

const char* inputs_name(Inputs inputs) {
  switch (inputs) {
    case Inputs::native: break;
    case Inputs::kv8: return "kv8";
    case Inputs::fp8: return "fp8";
  }
  return "native";
}

}  // namespace

Json to_json(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

Json to_json(const DeviceInfo& d) {
  Json json = {{"type", to_string(d.device.type)}, {"index", d.device.index}, {"name", d.name}};
  if (d.device.type == DeviceType::cpu) {
    json["threads"] = d.threads;
    json["isa"] = to_string(d.isa);
  } else {
    json["compute_capability"] = d.compute_capability;
    json["sm_count"] = d.sm_count;
    json["smem_per_block_bytes"] = d.smem_per_block_bytes;
    json["smem_per_sm_bytes"] = d.smem_per_sm_bytes;
    json["l2_bytes"] = d.l2_bytes;
  }
  if (d.f32_tflops > 0) json["f32_tflops"] = d.f32_tflops;
  if (d.tensor16_tflops > 0) json["tensor16_tflops"] = d.tensor16_tflops;
  if (d.memory_gbs > 0) json["memory_gbs"] = d.memory_gbs;
  return json;
}

Json to_json(const KernelInfo& k) {
  Json json = {{"id", k.id},
               {"op", k.op == Operation::fwd ? "fwd" : "bwd"},
               {"family", k.family_name()},
               {"fingerprint", source_fingerprint(k.family_name())},
               {"device", to_string(k.device)},
               {"inputs", inputs_name(k.inputs)},
               {"dtype", to_string(k.dtype)},
               {"probability_dtype", to_string(k.probability_dtype)},
               {"max_dim", k.head_dim},
               {"max_v_dim", k.v_dim},
               {"tile_q", k.tile_q},
               {"features", feature_names(k.features)},
               {"compiled", k.compiled}};
  if (k.device == DeviceType::cpu) {
    json["isa"] = to_string(k.isa);
  } else {
    json["tile_k"] = k.tile_k;
    json["threads"] = k.threads;
    json["smem_bytes"] = k.smem_bytes;
    json["min_compute_capability"] = k.min_compute_capability;
  }
  return json;
}

Json to_json(const Plan& plan) {
  const Cost needed = cost(plan.problem);
  return {{"kernel", plan.kernel->id},
          {"compiled", plan.kernel->compiled},
          {"device", to_json(plan.device)},
          {"tile_q", plan.tile_q},
          {"heads_in_tile", plan.heads_in_tile},
          {"tile_k", plan.tile_k},
          {"splits", plan.splits},
          {"keys_per_split", plan.keys_per_split},
          {"cut_items", plan.tail_tiles},
          {"item_parts", plan.tail_splits},
          {"key_ranges", plan.key_ranges},
          {"work_items", plan.num_tiles},
          {"workspace_bytes", plan.workspace_bytes},
          {"flops", needed.flops},
          {"bytes", needed.bytes},
          {"visible_pairs", needed.visible_pairs}};
}

Json to_json(const verify::Comparison& c) {
  Json samples = Json::array();
  for (const verify::ElementError& e : c.samples) samples.push_back(to_json(e));
  return {{"ok", c.ok},
          {"reason", c.reason},
          {"elements", c.elements},
          {"over_bound", c.over_bound},
          {"unwritten", c.unwritten},
          {"non_finite", c.non_finite},
          {"sign_flips", c.sign_flips},
          {"max_error", to_json(c.max_error)},
          {"mean_error", to_json(c.mean_error)},
          {"relative_error", to_json(c.relative_error)},
          {"bias", to_json(c.bias)},
          {"max_lse_error", to_json(c.max_lse_error)},
          {"worst_ratio", to_json(c.worst_ratio)},
          {"worst_head_ratio", to_json(c.worst_head_ratio)},
          {"worst", to_json(c.worst)},
          {"samples", samples}};
}

Json versions() {
  Json json = {{"flashcore", version()}, {"compiler", __VERSION__}};
#if defined(FLASHCORE_NVCC_VERSION)
  json["cuda"] = FLASHCORE_NVCC_VERSION;
#endif
  const std::string driver = driver_version();
  if (!driver.empty()) json["driver"] = driver;
  return json;
}

void print_json(const Json& json) {
  print_out("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace flashcore::tool
