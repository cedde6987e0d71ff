#include "check/supervise.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <optional>

#include "cli/child_process.h"
#include "cli/signals.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "cli/worker_link.h"
#include "command_error.h"
#include "flashcore/plan.h"

namespace flashcore::tool {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPollMs = 100;            // between two checks of the clock and of signals
constexpr int kExitLimitMs = 10000;     // for a worker that has reported its exit code
constexpr double kInterruptLimitS = 3;  // for a worker to print the results so far
constexpr double kStartLimitS = 120;    // for a new worker to begin after another one ended

double seconds_since(Clock::time_point then) {
  return std::chrono::duration<double>(Clock::now() - then).count();
}

bool builds_cuda() {
  return std::any_of(kernels().begin(), kernels().end(), [](const KernelInfo& kernel) {
    return kernel.compiled && kernel.device == DeviceType::cuda;
  });
}

class Supervisor {
 public:
  Supervisor(int argc, char** argv) : arguments_(argv, argv + argc) {}

  int run() {
    for (;;) {
      start();
      const Event event = watch();
      if (event == Event::exited) return exit_code();
      child_.end(event == Event::died ? kExitLimitMs : 0);
      read_messages();  // the last ones
      close(report_fd_);
      if (noted_signal() != 0) {
        if (finishing_) return 128 + noted_signal();
        finishing_ = takes_over_ = true;  // the next worker runs nothing and prints the results
        suspects_.clear();
        for (const auto& [key, running] : in_flight_) {
          say(text_of(running.task,
                      formatted("had not ended after {:.1f} s", seconds_since(running.since))));
        }
        continue;
      }
      if (in_flight_.empty()) {
        say(formatted("{}; the run cannot continue", no_task_reason_));
        return hung_ > 0 ? kFailed : kCouldNotRun;
      }
      find_suspects();
    }
  }

 private:
  enum class Event { exited, overdue, died, interrupted };
  struct Running {
    Json task;
    Clock::time_point since;
    bool overdue() const {
      const double limit = task["limit_s"];
      return limit > 0 && seconds_since(since) > limit;
    }
  };

  void start() {
    int report[2];
    const int resume = memfd_create("flashcore-resume", MFD_CLOEXEC);
    const std::string text = resume_text();
    if (resume < 0 || pipe2(report, O_CLOEXEC) != 0 ||
        !write_all(resume, text.data(), text.size()) || lseek(resume, 0, SEEK_SET) != 0) {
      throw CommandError("cannot create a pipe to a worker process; use --deadline 0");
    }
    const bool started = child_.start({.arguments = arguments_,
                                       .environment = {formatted("{}=1", kWorkerVariable)},
                                       .files = {{report[1], kReportFd}, {resume, kResumeFd}}});
    close(report[1]);
    close(resume);
    if (!started) throw CommandError("cannot start a worker process; use --deadline 0");
    report_fd_ = report[0];
    fcntl(report_fd_, F_SETFL, O_NONBLOCK);
    in_flight_.clear();
    exit_code_.reset();
    partial_line_.clear();
    has_message_ = false;
    started_ = Clock::now();
  }

  /// State for the next worker (see WorkerLink::open).
  std::string resume_text() const {
    const Json head = {
        {"takes_over", takes_over_},          {"suspects", suspects_},
        {"unrepeated", unrepeated_},          {"shown", shown_},
        {"elapsed_s", seconds_since(begun_)}, {"signal", finishing_ ? noted_signal() : 0}};
    return head.dump() + "\n" + records_;
  }

  Event watch() {
    std::optional<Clock::time_point> interrupted;
    for (;;) {
      const bool open = read_messages();
      if (exit_code_) return Event::exited;
      if (!open) return Event::died;
      if (noted_signal() != 0 && !interrupted) {
        interrupted = Clock::now();
        if (!finishing_) child_.send(noted_signal());
      }
      if (interrupted && seconds_since(*interrupted) > kInterruptLimitS * (finishing_ ? 5 : 1)) {
        return Event::interrupted;
      }
      for (const auto& [key, running] : in_flight_) {
        if (running.overdue()) return Event::overdue;
      }
      if (takes_over_ && !has_message_ && seconds_since(started_) > kStartLimitS) {
        no_task_reason_ = formatted("a new process did not begin within {:g} s", kStartLimitS);
        return Event::overdue;
      }
      pollfd waiting{report_fd_, POLLIN, 0};
      poll(&waiting, 1, kPollMs);
    }
  }

  /// Reads all pending messages. Returns false at the end of the pipe.
  bool read_messages() {
    char buffer[65536];
    for (;;) {
      const ssize_t n = read(report_fd_, buffer, sizeof buffer);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return true;
      if (n == 0) return false;
      partial_line_.append(buffer, static_cast<std::size_t>(n));
      std::size_t at = 0;
      for (std::size_t end; (end = partial_line_.find('\n', at)) != std::string::npos;) {
        handle(partial_line_.substr(at, end - at));
        at = end + 1;
      }
      partial_line_.erase(0, at);
    }
  }

  void handle(const std::string& line) {
    has_message_ = true;
    const Json message = Json::parse(line);
    if (message.contains("begin")) {
      in_flight_[message["begin"]] = {message, Clock::now()};
    } else if (message.contains("done")) {
      const std::string key = message["done"];
      in_flight_.erase(key);
      std::erase(suspects_, key);
      if (suspects_.empty()) unrepeated_.clear();
      records_ += line + "\n";
    } else if (message.contains("shown")) {
      shown_.push_back(message["shown"]);
    } else if (message.contains("exit")) {
      exit_code_ = message["exit"].get<int>();
    }
  }

  /// The worker ended while these tasks were running, because of one of them. A single task is the
  /// cause. Of several, the next worker runs each one alone, the one that ran longest last.
  void find_suspects() {
    takes_over_ = true;
    std::vector<std::pair<Clock::time_point, std::string>> begun;
    for (const auto& [key, running] : in_flight_) begun.emplace_back(running.since, key);
    std::sort(begun.rbegin(), begun.rend());
    const Json& oldest = in_flight_[begun.back().second].task;
    const bool overdue = child_.was_killed();
    const std::string limit = formatted("{:g} s", oldest["limit_s"].get<double>());
    if (begun.size() == 1) {
      record_hang(oldest, overdue
                              ? formatted("it did not end within {}; its process was killed", limit)
                              : formatted("its process ended {}", child_.how_it_ended()));
      return;
    }
    const std::size_t others = begun.size() - 1;
    unrepeated_ = formatted(
        "{} while {} other problem{} ran; it ended when run alone",
        overdue ? "it did not end within " + limit : "its process ended " + child_.how_it_ended(),
        others, others == 1 ? "" : "s");
    suspects_.clear();
    for (const auto& [since, key] : begun) suspects_.push_back(key);
    say(formatted("{} problems were running when one did not end; each one runs again alone",
                  begun.size()));
  }

  void record_hang(const Json& task, const std::string& reason) {
    ++hung_;
    const std::string key = task["begin"];
    std::erase(suspects_, key);
    unrepeated_.clear();
    Json record = task;
    record["done"] = key;
    record["hung"] = reason;
    records_ += record.dump() + "\n";
    say(text_of(task, reason));
  }

  static std::string text_of(const Json& task, const std::string& reason) {
    const auto text = [&](const char* name) { return task[name].get<std::string>(); };
    return formatted("{}: kernel {}: {}\n  {}\n  replay     {}", text("begin"), text("kernel"),
                     reason, text("problem"), text("replay"));
  }

  int exit_code() {
    child_.end(kExitLimitMs);
    close(report_fd_);
    // The hang still counts if a later worker could not run.
    return *exit_code_ == kCouldNotRun && hung_ > 0 ? kFailed : *exit_code_;
  }

  std::vector<std::string> arguments_;
  ChildProcess child_;
  int report_fd_ = -1;
  Clock::time_point begun_ = Clock::now(), started_;
  std::map<std::string, Running> in_flight_;
  std::string records_;  ///< one line each
  std::vector<std::string> suspects_, shown_;
  std::string unrepeated_, partial_line_;
  std::string no_task_reason_ = "a worker process ended before it began a problem";
  std::optional<int> exit_code_;
  bool takes_over_ = false, finishing_ = false, has_message_ = false;
  int hung_ = 0;
};

}  // namespace

bool needs_supervisor(const Command& command) {
  const auto needed = [](const std::optional<double>& deadline_s, const std::string& device) {
    return deadline_s ? *deadline_s > 0 : device != "cpu" && builds_cuda();
  };
  if (const auto* check = std::get_if<CheckArgs>(&command)) {
    return needed(check->control.deadline_s, check->device.device);
  }
  if (const auto* bench = std::get_if<BenchArgs>(&command)) {
    return bench->results.empty() && needed(bench->control.deadline_s, bench->device.device);
  }
  if (const auto* run = std::get_if<RunArgs>(&command)) {
    return needed(run->control.deadline_s, run->device.device);
  }
  return false;  // verify has its own child, the other commands run no attention
}

int supervise(int argc, char** argv) { return Supervisor(argc, argv).run(); }

}  // namespace flashcore::tool
