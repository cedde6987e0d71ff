#include "check/inspect.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "check/stages.h"
#include "check/trace.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "command_error.h"
#include "data/problem.h"

namespace flashcore::tool {
namespace {

using verify::Stage;
using verify::StageReport;

/// Keys per tile in the text: those farthest from the oracle. The JSON has all.
constexpr std::size_t kShownKeys = 4;

std::string verdict(const StageReport& r) {
  if (!r.skipped.empty()) return yellow("skipped");
  return r.ok() ? green("correct") : red("WRONG");
}

/// Error over bound, if both are finite.
std::string share(double ratio) {
  return std::isfinite(ratio) ? formatted("{:.3g}", ratio) : "not finite";
}
std::string share(const StageReport& r) {
  const bool finite = std::isfinite(r.worst.got) && std::isfinite(r.worst.want);
  return share(finite || r.ok() ? r.worst_ratio : HUGE_VAL);
}

Json to_json(const StageReport& r) {
  Json json = {{"stage", verify::to_string(r.stage)}};
  if (!r.skipped.empty()) {
    json["skipped"] = r.skipped;
    return json;
  }
  json["passed"] = r.ok();
  json["elements"] = r.elements;
  json["wrong"] = r.wrong;
  json["unmeasured"] = r.unmeasured;
  json["worst_ratio"] = tool::to_json(r.worst_ratio);
  if (!r.ok()) json["reason"] = r.reason;
  if (!r.note.empty()) json["note"] = r.note;
  if (r.elements == 0) return json;
  const verify::StageElement& e = r.worst;
  Json worst = {{"batch", e.row.b}, {"head", e.row.h}, {"row", e.row.i}};
  if (e.split >= 0) worst["split"] = e.split;
  if (e.key >= 0) worst["key"] = e.key;
  if (e.column >= 0) worst["column"] = e.column;
  if (e.key < 0 && e.column < 0) worst["lse"] = true;
  worst["got"] = tool::to_json(e.got);
  worst["want"] = tool::to_json(e.want);
  worst["bound"] = tool::to_json(e.bound);
  worst["probe"] = r.probe;
  json["worst"] = worst;
  return json;
}

std::string details(const StageReport& r) {
  if (!r.skipped.empty()) return "";
  if (r.ok()) {
    return r.note.empty() ? "" : formatted("\n{}: {}\n", verify::to_string(r.stage), r.note);
  }
  std::string text =
      formatted("\n{} {}\n", red(formatted("{}:", verify::to_string(r.stage))), r.reason);
  text += formatted("  worst      {}: got {:.9g}, want {:.9g}, error {:.3g}, bound {:.3g}\n",
                    verify::to_string(r.worst), r.worst.got, r.worst.want,
                    r.worst.got - r.worst.want, r.worst.bound);
  text += formatted("  elements   {} of {} wrong; error/bound {}, at most {} among finite ones\n",
                    r.wrong, r.elements, share(r), share(r.worst_ratio));
  text += formatted("  probe      {}\n", r.probe);
  if (!r.note.empty()) text += formatted("  note       {}\n", r.note);
  return text;
}

void inspect_stages(const RunArgs& args, verify::CallRunner& runner, const HostCase& host,
                    Inspection& found) {
  Table table({"stage", "verdict", ">elements", ">wrong", ">error/bound", "worst at"});
  std::string text;
  found.json["stages"] = Json::array();
  std::vector<Stage> stages = verify::stages_of(host.tensors);
  if (args.stage == "dequant") stages = {Stage::dequant};  // also to report that there is none
  for (const Stage stage : stages) {
    if (args.stage != "all" && args.stage != verify::to_string(stage)) continue;
    const StageReport r = value_or_throw(verify::check_stage(stage, runner, host));
    if (!r.skipped.empty() && args.stage != "all") {
      throw CommandError(formatted("--stage {}: {}", args.stage, r.skipped));
    }
    const bool measured = r.skipped.empty() && r.elements > 0;
    table.add({verify::to_string(stage), verdict(r), std::to_string(r.elements),
               std::to_string(r.wrong), measured ? share(r) : "-",
               measured ? verify::to_string(r.worst) : r.skipped});
    text += details(r);
    if (r.unmeasured > 0) {
      text += formatted("{}: {} values are too small to measure\n", verify::to_string(stage),
                        r.unmeasured);
    }
    found.passed = found.passed && r.ok();
    found.json["stages"].push_back(to_json(r));
    if (!r.ok() && !found.json.contains("first_wrong")) {
      found.json["first_wrong"] = verify::to_string(stage);
    }
  }
  found.text += table.text() + text;
}

reference::RowId row_of(const std::string& text) {
  reference::RowId row{};
  int used = 0;
  if (std::sscanf(text.c_str(), "%d,%d,%d%n", &row.b, &row.h, &row.i, &used) != 3 ||
      static_cast<std::size_t>(used) != text.size()) {
    throw CommandError(
        formatted("--trace is \"{}\"; wanted batch,head,row, e.g. --trace 0,3,511", text));
  }
  return row;
}

Json to_json(const verify::Pair& pair) {
  return {{"got", tool::to_json(pair.got)}, {"want", tool::to_json(pair.want)}};
}

Json to_json(const std::vector<double>& values) {
  Json json = Json::array();
  for (const double value : values) json.push_back(tool::to_json(value));
  return json;
}

Json to_json(const verify::TracedTile& tile) {
  Json json = {{"split", tile.split}, {"begin", tile.begin}, {"end", tile.end}};
  json["max"] = to_json(tile.max);
  json["sum"] = to_json(tile.sum);
  json["lse"] = to_json(tile.lse);
  json["out"] = to_json(tile.out);
  json["want_out"] = to_json(tile.want_out);
  json["worst_ratio"] = tool::to_json(tile.worst_ratio());
  json["keys"] = Json::array();
  for (const verify::TracedKey& key : tile.keys) {
    json["keys"].push_back({{"key", key.key},
                            {"score", to_json(key.score)},
                            {"probability", to_json(key.probability)}});
  }
  return json;
}

std::string pair_text(const verify::Pair& pair) {
  return formatted("{:.6g} | {:.6g}", pair.got, pair.want);
}

/// The keys whose scores are farthest from the oracle's, in order of their index.
std::vector<verify::TracedKey> farthest(std::vector<verify::TracedKey> keys) {
  const auto distance = [](const verify::TracedKey& key) {
    if (key.score.got == key.score.want) return 0.0;
    const double error = std::fabs(key.score.got - key.score.want);
    return std::isfinite(error) ? error : HUGE_VAL;
  };
  std::stable_sort(keys.begin(), keys.end(),
                   [&](const auto& a, const auto& b) { return distance(a) > distance(b); });
  keys.resize(std::min(keys.size(), kShownKeys));
  std::sort(keys.begin(), keys.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
  return keys;
}

std::string trace_text(const verify::Trace& trace) {
  std::string text = formatted(
      "trace      batch {}, head {}, row {}: after each tile of {} keys, kernel | oracle\n"
      "           measured: lse, O, P; derived: score, max, sum; without sinks\n\n",
      trace.row.b, trace.row.h, trace.row.i, trace.plan.tile_k);
  Table tiles({"split", "keys", "max", "sum", "lse", "O at its worst column", ">error/bound", ""});
  Table keys({"split", ">key", "score", "P"});
  for (const verify::TracedTile& tile : trace.tiles) {
    const std::size_t c = tile.worst_column();
    const double ratio = tile.worst_ratio();
    tiles.add({std::to_string(tile.split), formatted("{}..{}", tile.begin, tile.end - 1),
               pair_text(tile.max), pair_text(tile.sum), pair_text(tile.lse),
               formatted("[{}] {}", c, pair_text({tile.out[c], tile.want_out[c]})), share(ratio),
               ratio <= 1 ? "" : red("WRONG")});
    for (const verify::TracedKey& key : farthest(tile.keys)) {
      keys.add({std::to_string(tile.split), std::to_string(key.key), pair_text(key.score),
                pair_text(key.probability)});
    }
  }
  return text + tiles.text() +
         formatted(
             "\nthe {} keys of each tile with the largest score errors (--json has all keys)\n\n",
             kShownKeys) +
         keys.text();
}

}  // namespace

Inspection inspect(const RunArgs& args, const HostCase& host, const KernelInfo* kernel,
                   const Target& target) {
  if (!args.out.empty() || !args.lse_out.empty()) {
    throw CommandError(
        "--stage and --trace run probes and write no result; remove --out and --lse-out");
  }
  if (host.tensors.block_table.given()) {
    throw CommandError(
        "--stage and --trace replace K and V, which needs a layout without pages; remove "
        "--page-size "
        "and --block-table: the same kernels run without them");
  }
  verify::CallRunner runner(*target.backend, target.device, target.plan_for,
                            kernel == nullptr ? nullptr : kernel->id);
  const Status known = runner.keep_kernel_of(host);  // all probes use the kernel of the call
  if (!known.ok()) throw CommandError(known);
  const Plan plan = value_or_throw(runner.plan(host));
  Inspection found;
  found.json = {{"passed", true}, {"device", describe(target)}};
  if (!host.name.empty()) found.json["case"] = host.name;
  found.json["plan"] = tool::to_json(plan);
  const std::string plan_text = explain(plan);
  found.text = plan_text.substr(0, plan_text.find('\n') + 1);  // the problem
  if (!host.name.empty()) found.text += formatted("case       {}\n", host.name);
  found.text += formatted("device     {}\nkernel     {}\n", describe(target), plan.kernel->id);
  if (!args.stage.empty()) {
    found.text += "\n";
    inspect_stages(args, runner, host, found);
  }
  if (!args.trace.empty()) {
    const verify::Trace trace = value_or_throw(verify::trace_row(runner, host, row_of(args.trace)));
    found.passed = found.passed && trace.ok();
    Json json = {{"batch", trace.row.b},
                 {"head", trace.row.h},
                 {"row", trace.row.i},
                 {"tile_k", trace.plan.tile_k},
                 {"passed", trace.ok()}};
    json["tiles"] = Json::array();
    for (const verify::TracedTile& tile : trace.tiles) json["tiles"].push_back(to_json(tile));
    found.json["trace"] = json;
    found.text += (args.stage.empty() ? "" : "\n") + trace_text(trace);
  }
  found.json["passed"] = found.passed;
  return found;
}

}  // namespace flashcore::tool
