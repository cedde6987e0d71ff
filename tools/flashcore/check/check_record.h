// The outcome of a problem as JSON, for a worker process that takes over from another.
#pragma once

#include <cstdint>
#include <string>

#include "check/check.h"
#include "cli/worker_link.h"

namespace flashcore::tool {

using Outcome = verify::CheckRunner::Outcome;

struct CheckRecord {
  Outcome outcome;
  std::string hung;  ///< why there is no outcome; empty: there is one
  bool passed() const { return hung.empty() && outcome.passed(); }
  std::string failure() const { return hung.empty() ? outcome.failure() : hung; }
};

/// The key "random/17", and its index if it belongs to the suite.
std::string key_of(const std::string& suite, std::uint64_t index);
std::optional<std::uint64_t> index_in(const std::string& suite, const std::string& key);

/// Converts the fields that totals, coverage and tables of cases use.
Json to_json(const CheckRecord& record);
CheckRecord check_record_of(const Json& json);

}  // namespace flashcore::tool
