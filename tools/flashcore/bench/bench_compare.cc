#include "bench/bench_compare.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/terminal.h"
#include "cli/text.h"
#include "command_error.h"
#include "data/npy.h"

namespace flashcore::tool {
namespace {

constexpr const char* kCaseFields[] = {"kind",     "name",     "dtype",  "batch",
                                       "q_heads",  "kv_heads", "q_len",  "kv_len",
                                       "head_dim", "causal",   "cold_l2"};

struct ResultRow {
  std::string key, kernel, name, shape, dtype;
  double us = 0, spread = 0;
};

std::vector<ResultRow> rows_of(const Json& result) {
  std::vector<ResultRow> rows;
  for (const Json& row : result.at("rows")) {
    ResultRow r;
    for (const char* field : kCaseFields) r.key += row.at(field).dump() + " ";
    r.key += std::to_string(row.value("page_size", 0));  // paged KV is another problem
    row.at("kernel").get_to(r.kernel);
    row.at("name").get_to(r.name);
    row.at("dtype").get_to(r.dtype);
    r.shape = formatted("({},{}/{},{}/{},{}){}", row.at("batch").dump(), row.at("q_heads").dump(),
                        row.at("kv_heads").dump(), row.at("q_len").dump(), row.at("kv_len").dump(),
                        row.at("head_dim").dump(), row.at("causal").get<bool>() ? " causal" : "");
    row.at("us").get_to(r.us);
    row.at("spread").get_to(r.spread);
    if (!(r.us > 0) || !std::isfinite(r.us) || !(r.spread >= 0)) {
      throw CommandError(
          formatted("row {} {}: us must be positive, and spread not negative", r.name, r.shape));
    }
    rows.push_back(std::move(r));
  }
  return rows;
}

/// The row of the same case and kernel. If both results have a single row for the case, the kernels
/// may differ.
const ResultRow* partner(const ResultRow& row, const std::vector<ResultRow>& own,
                         const std::vector<ResultRow>& others) {
  const ResultRow* found = nullptr;
  int same_case = 0;
  for (const ResultRow& other : others) {
    if (other.key != row.key) continue;
    if (other.kernel == row.kernel) return &other;
    ++same_case;
    found = &other;
  }
  const auto in_own =
      std::count_if(own.begin(), own.end(), [&](const ResultRow& r) { return r.key == row.key; });
  return same_case == 1 && in_own == 1 ? found : nullptr;
}

std::string full_name(const ResultRow& r) {
  return formatted("{} {} {} {}", r.name, r.dtype, r.shape, r.kernel);
}

std::string device_of(const Json& result) {
  return result.contains("device") && result["device"].is_string()
             ? result["device"].get<std::string>()
             : "";
}

}  // namespace

const char* to_string(Verdict verdict) {
  switch (verdict) {
    case Verdict::faster: return "faster";
    case Verdict::slower: return "slower";
    case Verdict::noise: break;
  }
  return "noise";
}

Verdict classify(double change, double old_spread, double new_spread) {
  // Relative to the smaller time: relative to the old one, a speedup is never above 100 %.
  const double difference = change < 0 ? 1 / (1 + change) - 1 : change;
  if (difference <= std::max({old_spread, new_spread, kSmallestChange})) {
    return Verdict::noise;
  }
  return change < 0 ? Verdict::faster : Verdict::slower;
}

BenchChanges compare_results(const Json& old_result, const Json& new_result) {
  BenchChanges changes;
  const std::vector<ResultRow> old_rows = rows_of(old_result), new_rows = rows_of(new_result);
  for (const ResultRow& now : new_rows) {
    const ResultRow* before = partner(now, new_rows, old_rows);
    if (before == nullptr) {
      changes.only_new.push_back(full_name(now));
      continue;
    }
    RowChange change{now.name,      now.shape,  now.dtype, before->kernel,
                     now.kernel,    before->us, now.us,    now.us / before->us - 1,
                     Verdict::noise};
    change.verdict = classify(change.change, before->spread, now.spread);
    changes.rows.push_back(std::move(change));
  }
  for (const ResultRow& before : old_rows) {
    if (partner(before, old_rows, new_rows) == nullptr) {
      changes.only_old.push_back(full_name(before));
    }
  }
  const std::string old_device = device_of(old_result), new_device = device_of(new_result);
  if (old_device != new_device) {
    changes.warning =
        formatted("the old result is from \"{}\", the new one from \"{}\"", old_device, new_device);
  }
  return changes;
}

Json to_json(const BenchChanges& changes) {
  Json rows = Json::array();
  for (const RowChange& r : changes.rows) {
    rows.push_back({{"name", r.name},
                    {"dtype", r.dtype},
                    {"shape", r.shape},
                    {"kernel", r.new_kernel},
                    {"old_kernel", r.old_kernel},
                    {"old_us", r.old_us},
                    {"new_us", r.new_us},
                    {"change", r.change},
                    {"verdict", to_string(r.verdict)}});
  }
  Json json = {{"rows", rows}, {"only_old", changes.only_old}, {"only_new", changes.only_new}};
  if (!changes.warning.empty()) json["warning"] = changes.warning;
  return json;
}

std::string to_text(const BenchChanges& changes) {
  Table table({"case", "dtype", "shape", ">old", ">new", ">change", "verdict", "kernel"});
  int counts[3] = {};
  for (const RowChange& r : changes.rows) {
    ++counts[static_cast<int>(r.verdict)];
    const std::string word = to_string(r.verdict);
    table.add({r.name, r.dtype, r.shape, duration(r.old_us), duration(r.new_us),
               formatted("{:+.1f} %", 100 * r.change),
               r.verdict == Verdict::faster   ? green(word)
               : r.verdict == Verdict::slower ? red(word)
                                              : word,
               r.old_kernel == r.new_kernel ? r.new_kernel : r.old_kernel + " -> " + r.new_kernel});
  }
  std::string text = table.text();
  text += formatted(
      "{} faster, {} slower, {} noise (a change counts if it exceeds both spreads and {:g} %)\n",
      counts[0], counts[1], counts[2], 100 * kSmallestChange);
  for (const std::string& name : changes.only_old) text += "only in the old result: " + name + "\n";
  for (const std::string& name : changes.only_new) text += "only in the new result: " + name + "\n";
  if (!changes.warning.empty()) text += yellow("warning: " + changes.warning) + "\n";
  return text;
}

Json load_result(const std::string& path) {
  const std::vector<std::byte> bytes = read_file(path);
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  try {
    Json result = Json::parse(text, text + bytes.size());
    rows_of(result);
    return result;
  } catch (const Json::exception& error) {
    throw CommandError(formatted("{}: not a benchmark result: {}", path, error.what()));
  } catch (const CommandError& error) {
    throw CommandError(formatted("{}: {}", path, error.what()));
  }
}

}  // namespace flashcore::tool
