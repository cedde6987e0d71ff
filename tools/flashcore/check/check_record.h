// The outcome of a problem as it goes from a worker process to the one that takes over.
#pragma once

#include <cstdint>
#include <string>

#include "check/check.h"
#include "cli/worker_link.h"

namespace flashcore::tool {

using Outcome = verify::CheckRunner::Outcome;

struct CheckRecord {
  Outcome outcome;
  std::string hung;  ///< why there is no outcome
  bool passed() const { return hung.empty() && outcome.passed(); }
  std::string failure() const { return hung.empty() ? outcome.failure() : hung; }
};

/// "random/17", and back: the index where the key is one of this suite.
std::string key_of(const std::string& suite, std::uint64_t index);
std::optional<std::uint64_t> index_in(const std::string& suite, const std::string& key);

/// The parts that totals, coverage and tables of cases are made of.
Json to_json(const CheckRecord& record);
CheckRecord check_record_of(const Json& json);

}  // namespace flashcore::tool
