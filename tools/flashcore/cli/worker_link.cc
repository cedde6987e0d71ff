#include "cli/worker_link.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "cli/child_process.h"
#include "cli/signals.h"
#include "command_error.h"

namespace flashcore::tool {
namespace {

std::string line_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

double task_limit_s(const std::optional<double>& deadline_s, Device device, double default_s) {
  if (deadline_s) return *deadline_s;
  return device.type == DeviceType::cuda ? default_s : 0;
}

WorkerLink& WorkerLink::here() {
  static WorkerLink link;
  return link;
}

void WorkerLink::open() {
  if (std::getenv(kWorkerVariable) == nullptr) return;
  unsetenv(kWorkerVariable);
  open_ = true;
  end_with_parent();
  signal(SIGTTOU, SIG_IGN);  // a background process group may write to the terminal
  struct stat file {};
  if (fstat(kResumeFd, &file) != 0)
    throw CommandError("FLASHCORE_WORKER is set, but no supervisor started this process");
  std::string text(static_cast<std::size_t>(file.st_size), '\0');
  if (!read_all(kResumeFd, text.data(), text.size())) {
    throw CommandError("cannot read the supervisor's file");
  }
  close(kResumeFd);
  std::size_t at = text.find('\n');
  const Json head = Json::parse(text.substr(0, at));
  takes_over_ = head["takes_over"];
  suspects_ = head["suspects"].get<std::vector<std::string>>();
  unrepeated_ = head["unrepeated"];
  shown_ = head["shown"].get<std::set<std::string>>();
  count_earlier_time(head["elapsed_s"]);
  if (const int number = head["signal"]; number != 0) note_signal(number);
  while (++at < text.size()) {
    const std::size_t end = text.find('\n', at);
    Json record = Json::parse(text.substr(at, end - at));
    std::string key = record["done"];
    records_.emplace_back(std::move(key), std::move(record));
    at = end;
  }
}

const Json* WorkerLink::record(const std::string& key) const {
  const auto found = std::find_if(records_.begin(), records_.end(),
                                  [&](const auto& record) { return record.first == key; });
  return found == records_.end() ? nullptr : &found->second;
}

void WorkerLink::done(const std::string& key, Json record) {
  record["done"] = key;
  tell(record);
}

void WorkerLink::shown(const std::string& key) {
  tell({{"shown", key}});
  const std::lock_guard lock(mutex_);
  shown_.insert(key);
}

Json WorkerLink::to_json(const Task& task) {
  return {{"begin", task.key},
          {"kernel", task.kernel},
          {"problem", task.problem},
          {"replay", task.replay},
          {"limit_s", task.limit_s}};
}

void WorkerLink::tell(const Json& message) {
  if (!open_) return;
  const std::string line = line_of(message);
  const std::lock_guard lock(mutex_);
  write_all(kReportFd, line.data(), line.size());
}

}  // namespace flashcore::tool
