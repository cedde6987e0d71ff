// What a worker process tells its supervisor (supervise.h), and what it learns of the workers
// before it. A line of JSON each:
//   {"begin": KEY, "kernel": ..., "problem": ..., "replay": ..., "limit_s": ...}
//   {"done": KEY, ...}      a record: whatever the command needs to count this task again
//   {"shown": KEY}          its failure has been printed
//   {"exit": CODE}
// A worker that takes over gets all records, and passes over the tasks they belong to.
#pragma once

#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "flashcore/types.h"

namespace flashcore::tool {

using Json = nlohmann::ordered_json;

/// A piece of work that might never end.
struct Task {
  std::string key;  ///< unique in the command
  std::string kernel, problem, replay;
  double limit_s = 0;  ///< 0: as long as it takes
};

/// The time a task has: --deadline's, else `usual_s` on a GPU; a CPU's kernels end.
double task_limit_s(const std::optional<double>& deadline_s, Device device, double usual_s);

class WorkerLink {
 public:
  /// This process's. Without a supervisor nothing is told and nothing was done before.
  static WorkerLink& here();

  /// Opens what the supervisor left open. Called once, before anything else.
  void open();
  bool open_to_supervisor() const { return open_; }

  void begin(const Task& task) { tell(to_json(task)); }
  void done(const std::string& key, Json record);
  void shown(const std::string& key);
  void exits(int code) { tell({{"exit", code}}); }

  /// Whether an earlier worker of this run was ended.
  bool takes_over() const { return takes_over_; }
  /// Of all tasks that are done, with their keys, in the order they were done.
  const std::vector<std::pair<std::string, Json>>& records() const { return records_; }
  /// The record of a task; null where it is not done.
  const Json* record(const std::string& key) const;
  bool was_shown(const std::string& key) const { return shown_.contains(key); }
  /// Tasks that ran when the last worker was ended: to be run first, one at a time.
  const std::vector<std::string>& suspects() const { return suspects_; }
  /// If every suspect ends, the last of them failed, by this reason: it was overdue beside the
  /// others. Empty where one that does not end is known already.
  const std::string& unrepeated() const { return unrepeated_; }

  static Json to_json(const Task& task);

 private:
  void tell(const Json& message);

  std::mutex mutex_;
  bool open_ = false, takes_over_ = false;
  std::vector<std::pair<std::string, Json>> records_;
  std::set<std::string> shown_;
  std::vector<std::string> suspects_;
  std::string unrepeated_;
};

/// What the supervisor starts a worker with.
inline constexpr const char* kWorkerVariable = "FLASHCORE_WORKER";
inline constexpr int kReportFd = 3, kResumeFd = 4;

}  // namespace flashcore::tool
