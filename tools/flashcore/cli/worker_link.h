// The connection of a worker process to its supervisor (supervise.h). A worker sends these
// messages, one line of JSON each:
//   {"begin": KEY, "kernel": ..., "problem": ..., "replay": ..., "limit_s": ...}
//   {"done": KEY, ...}      a record, from which a later worker can count the task again
//   {"shown": KEY}          the failure of this task has been printed
//   {"exit": CODE}
// A worker that takes over receives all records and skips the tasks that they belong to.
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

/// A unit of work that might never end.
struct Task {
  std::string key;  ///< unique within the command
  std::string kernel, problem, replay;
  double limit_s = 0;  ///< 0: no limit
};

/// Time limit of a task: --deadline if given, else `default_s` on a GPU and none on a CPU, whose
/// kernels always end.
double task_limit_s(const std::optional<double>& deadline_s, Device device, double default_s);

class WorkerLink {
 public:
  /// The link of this process. Without a supervisor it sends nothing and has no records.
  static WorkerLink& here();

  /// Connects to the supervisor, if there is one. Call once, first.
  void open();
  bool has_supervisor() const { return open_; }

  void begin(const Task& task) { tell(to_json(task)); }
  void done(const std::string& key, Json record);
  void shown(const std::string& key);
  void exits(int code) { tell({{"exit", code}}); }

  /// True if an earlier worker of this run was killed or crashed.
  bool takes_over() const { return takes_over_; }
  /// Records of all tasks that are done, by key, in the order of completion.
  const std::vector<std::pair<std::string, Json>>& records() const { return records_; }
  /// The record of a task; null if it is not done.
  const Json* record(const std::string& key) const;
  bool was_shown(const std::string& key) const { return shown_.contains(key); }
  /// Tasks that were running when the last worker ended. Run these first, one at a time.
  const std::vector<std::string>& suspects() const { return suspects_; }
  /// If every suspect ends when run alone, the last one counts as failed, for this reason. Empty if
  /// the task that does not end is already known.
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

/// Environment variable and descriptors of a worker.
inline constexpr const char* kWorkerVariable = "FLASHCORE_WORKER";
inline constexpr int kReportFd = 3, kResumeFd = 4;

}  // namespace flashcore::tool
