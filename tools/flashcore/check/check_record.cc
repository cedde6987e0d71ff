#include "check/check_record.h"

#include <limits>

#include "cli/json_output.h"
#include "cli/text.h"

namespace flashcore::tool {
namespace {

/// A number as to_json(double) writes it.
double number_of(const Json& json) {
  if (json.is_number()) return json.get<double>();
  const std::string word = json.get<std::string>();
  if (word == "nan") return std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  return word == "inf" ? infinity : -infinity;
}

const KernelInfo* kernel_named(const std::string& id) {
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.id == id) return &kernel;
  }
  return nullptr;
}

}  // namespace

std::string key_of(const std::string& suite, std::uint64_t index) {
  return formatted("{}/{}", suite, index);
}

std::optional<std::uint64_t> index_in(const std::string& suite, const std::string& key) {
  const std::size_t slash = key.rfind('/');
  if (key.substr(0, slash) != suite) return {};
  return std::stoull(key.substr(slash + 1));
}

Json to_json(const CheckRecord& record) {
  if (!record.hung.empty()) return {{"hung", record.hung}};
  const Outcome& o = record.outcome;
  Json json;
  if (o.plan.kernel != nullptr) {
    json["kernel"] = o.plan.kernel->id;
    json["plan"] = {o.plan.splits, o.plan.tile_q, o.plan.tile_k};
    json["facts"] = {o.facts.three_tiles, o.facts.keyless_between, o.facts.three_keyless,
                     o.facts.idle_warpgroup};
  }
  if (!o.status.ok()) {
    json["code"] = static_cast<int>(o.status.code());
    json["message"] = o.status.message();
    return json;
  }
  const verify::Comparison& c = o.comparison;
  json["ratio"] = to_json(c.worst_ratio);
  json["max_error"] = to_json(c.max_error);
  if (o.passed()) return json;
  json["stray_writes"] = o.stray_writes;
  json["wrong"] = !c.ok;
  json["reason"] = c.reason;
  json["non_finite"] = c.non_finite;
  json["unwritten"] = c.unwritten;
  return json;
}

CheckRecord check_record_of(const Json& json) {
  CheckRecord record;
  record.hung = json.value("hung", "");
  Outcome& o = record.outcome;
  if (json.contains("plan")) {
    o.plan.kernel = kernel_named(json["kernel"]);
    o.plan.splits = json["plan"][0];
    o.plan.tile_q = json["plan"][1];
    o.plan.tile_k = json["plan"][2];
    o.facts = {json["facts"][0], json["facts"][1], json["facts"][2], json["facts"][3]};
  }
  if (json.contains("code")) {
    o.status = {static_cast<StatusCode>(json["code"].get<int>()), json["message"]};
  } else if (!record.hung.empty()) {
    o.status = {StatusCode::internal, record.hung};  // nothing was compared
  } else {
    verify::Comparison& c = o.comparison;
    c.worst_ratio = number_of(json["ratio"]);
    c.max_error = number_of(json["max_error"]);
    o.stray_writes = json.value("stray_writes", false);
    c.ok = !json.value("wrong", false);
    c.reason = json.value("reason", "");
    c.non_finite = json.value("non_finite", c.non_finite);
    c.unwritten = json.value("unwritten", c.unwritten);
  }
  return record;
}

}  // namespace flashcore::tool
