#include "check/check_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "check/check_record.h"
#include "cli/json_output.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "command_error.h"
#include "data/problem.h"

namespace flashcore::tool {
namespace {

constexpr std::size_t kFullReports = 5;
constexpr double kDefaultLimitS = 20;  // per problem on a GPU; the oracle takes most of it

// Small problems run on one thread each, so that --jobs fills the machine. Every eighth runs on
// several threads, to check work that is split between threads.
constexpr std::uint64_t kSeveralThreadsEvery = 8;
constexpr int kSeveralThreads = 4;

std::string problem_text(const CheckProblem& problem) {
  const std::string blocks = problem.blocks > 0 ? formatted(" blocks {}", problem.blocks) : "";
  return verify::to_string(problem.spec) + blocks;
}

Outcome no_memory() {
  Outcome outcome;
  outcome.status = {StatusCode::out_of_memory, "not enough host memory for this problem"};
  return outcome;
}

/// Reports the failures that no earlier worker of this run has reported.
void show(const std::vector<Failure>& failures,
          const std::function<void(const Failure&)>& on_failure) {
  WorkerLink& link = WorkerLink::here();
  for (const Failure& failure : failures) {
    const std::string key = key_of(failure.suite, failure.index);
    if (link.was_shown(key)) continue;
    on_failure(failure);
    link.shown(key);
  }
}

}  // namespace

/// State of one thread: a runner per device and thread count, created on first use.
class CheckEngine::Worker {
 public:
  Worker(const CheckEngine& engine, const CheckSuite& suite) : engine_(engine), suite_(suite) {}

  Outcome check(const CheckProblem& problem, std::uint64_t index) {
    try {
      const Target& target = engine_.targets_[problem.target];
      DeviceInfo plan_for = target.plan_for;
      const bool fixed = engine_.args_.device.threads > 0;
      if (target.device.type == DeviceType::cpu && !fixed && !suite_.large) {
        plan_for.threads = index % kSeveralThreadsEvery == 0 ? kSeveralThreads : 1;
      }
      auto& runner = runners_[{problem.target, plan_for.threads}];
      if (runner == nullptr) {
        runner = std::make_unique<verify::CheckRunner>(*target.backend, target.device, plan_for);
      }
      runner->plan_for(with_blocks(plan_for, problem.blocks));
      if (engine_.args_.op == "backward") return runner->check_backward(problem.spec);
      return runner->check(problem.spec, suite_.oracle_work, suite_.large ? engine_.jobs_ : 1);
    } catch (const std::bad_alloc&) {
      return no_memory();
    }
  }

 private:
  const CheckEngine& engine_;
  const CheckSuite& suite_;
  std::map<std::pair<std::size_t, int>, std::unique_ptr<verify::CheckRunner>> runners_;
};

CheckEngine::CheckEngine(const CheckArgs& args, const std::vector<Target>& targets,
                         verify::Coverage& coverage, const Stop& stop)
    : args_(args), targets_(targets), coverage_(coverage), stop_(stop), jobs_(args.jobs) {
  if (jobs_ == 0) jobs_ = value_or_throw(device_info({DeviceType::cpu, 0})).threads;
}

CheckEngine::Range CheckEngine::range_of(const CheckSuite& suite) const {
  if (!args_.index) return {0, suite.count};
  if (suite.name != "random" && *args_.index >= suite.count) {
    throw CommandError(formatted("--index is {}; suite {} has problems 0 to {} here", *args_.index,
                                 suite.name, static_cast<std::int64_t>(suite.count) - 1));
  }
  return {*args_.index, *args_.index + 1};
}

bool CheckEngine::enough() const {
  return args_.max_failures > 0 && totals_.failures >= args_.max_failures;
}

Failure* CheckEngine::note(const CheckSuite& suite, std::uint64_t index,
                           const CheckProblem& problem, const CheckRecord& record) {
  const Outcome& outcome = record.outcome;
  const std::string kernel =
      outcome.plan.kernel
          ? outcome.plan.kernel->id
          : kernel_of(problem.spec, with_blocks(targets_[problem.target].plan_for, problem.blocks));
  KernelTally& tally = totals_.kernels[kernel];
  ++totals_.problems;
  ++tally.problems;
  if (outcome.status.ok()) {
    coverage_.add(problem.spec, outcome.plan, outcome.facts);
    const double ratio = outcome.comparison.worst_ratio;
    if (ratio > tally.worst_ratio) {
      tally.worst_ratio = ratio;
      tally.worst_index = index;
    }
  }
  if (suite.observe) suite.observe(index, problem, outcome);
  if (record.passed()) return nullptr;
  ++totals_.failures;
  ++tally.failures;
  if (!totals_.first_failure ||
      (totals_.first_failure->first == suite.name && index < totals_.first_failure->second)) {
    totals_.first_failure = {suite.name, index};
  }
  if (totals_.reports.size() == kFullReports) return nullptr;
  Failure failure{.suite = suite.name,
                  .index = index,
                  .kernel = kernel,
                  .problem = problem_text(problem),
                  .reason = record.failure(),
                  .replay = suite.replay(index, problem),
                  .comparison = {},
                  .report = {},
                  .hung = !record.hung.empty()};
  if (outcome.status.ok()) {
    failure.comparison = to_json(outcome.comparison).dump();
    failure.report = verify::report(outcome.comparison);
    if (outcome.comparison.ok) failure.report += formatted("  {}\n", failure.reason);
  }
  return &totals_.reports.emplace_back(std::move(failure));
}

void CheckEngine::tell_begin(const CheckSuite& suite, std::uint64_t index,
                             const CheckProblem& problem) const {
  WorkerLink& link = WorkerLink::here();
  if (!link.has_supervisor()) return;
  const Target& target = targets_[problem.target];
  link.begin({key_of(suite.name, index),
              kernel_of(problem.spec, with_blocks(target.plan_for, problem.blocks)),
              problem_text(problem), suite.replay(index, problem),
              task_limit_s(args_.control.deadline_s, target.device, kDefaultLimitS)});
}

std::set<std::uint64_t> CheckEngine::note_recorded(const CheckSuite& suite) {
  std::set<std::uint64_t> done;
  for (const auto& [key, json] : WorkerLink::here().records()) {
    const std::optional<std::uint64_t> index = index_in(suite.name, key);
    if (!index) continue;
    done.insert(*index);
    Failure* failure = note(suite, *index, suite.problem(*index), check_record_of(json));
    if (failure == nullptr || failure->hung) continue;
    failure->comparison = json.value("comparison", "");
    failure->report = json.value("report", "");
  }
  return done;
}

bool CheckEngine::has_records(const CheckSuite& suite) const {
  const auto& records = WorkerLink::here().records();
  return std::any_of(records.begin(), records.end(), [&](const auto& record) {
    return index_in(suite.name, record.first).has_value();
  });
}

void CheckEngine::check(const CheckSuite& suite,
                        const std::function<void(const Failure&)>& on_failure) {
  WorkerLink& link = WorkerLink::here();
  const Range range = range_of(suite);
  const auto count = static_cast<std::int64_t>(range.end - range.begin);
  const int workers = suite.large ? 1 : static_cast<int>(std::min<std::int64_t>(jobs_, count));
  totals_.planned += count;
  const std::int64_t done_before = totals_.problems;
  std::size_t reported = totals_.reports.size();
  std::set<std::uint64_t> done = note_recorded(suite);

  std::atomic<std::uint64_t> next{range.begin};
  std::mutex mutex;  // guards totals_, coverage_, the data of observe(), running
  std::condition_variable finished;
  int running = workers;
  const auto stops = [&] {
    const std::lock_guard lock(mutex);
    return enough() || stop_.now();
  };
  const auto check_one = [&](Worker& worker, std::uint64_t index, const std::string& hung) {
    const CheckProblem problem = suite.problem(index);
    tell_begin(suite, index, problem);
    CheckRecord record{worker.check(problem, index), {}};
    if (!hung.empty()) record = check_record_of({{"hung", hung}});
    const std::lock_guard lock(mutex);
    const Failure* failure = note(suite, index, problem, record);
    if (!link.has_supervisor()) return;
    Json json = to_json(record);
    if (failure != nullptr) {
      json["comparison"] = failure->comparison;
      json["report"] = failure->report;
    }
    link.done(key_of(suite.name, index), std::move(json));
  };
  // Repeats, one at a time, the problems that were running when an earlier worker ended, to find
  // the one that does not end.
  const auto check_suspects = [&](Worker& worker) {
    for (std::size_t i = 0; i < link.suspects().size(); ++i) {
      const std::optional<std::uint64_t> index = index_in(suite.name, link.suspects()[i]);
      if (!index || stops()) continue;
      const bool last = i + 1 == link.suspects().size();
      done.insert(*index);
      check_one(worker, *index, last ? link.unrepeated() : "");
    }
  };
  std::once_flag suspects_checked;
  const auto work = [&] {
    Worker worker(*this, suite);
    std::call_once(suspects_checked, check_suspects, worker);
    while (!stops()) {
      const std::uint64_t index = next.fetch_add(1);
      if (index >= range.end) break;
      if (!done.contains(index)) check_one(worker, index, "");
    }
    const std::lock_guard lock(mutex);
    --running;
    finished.notify_one();
  };

  Progress progress(suite.name + " problems", count, args_.quiet);
  const double begun_s = stop_.elapsed_s();
  std::vector<std::thread> threads;  // from here on totals_ needs the lock
  for (int i = 0; i < workers; ++i) threads.emplace_back(work);
  for (bool ended = false; !ended;) {
    std::unique_lock lock(mutex);
    ended = finished.wait_for(lock, std::chrono::milliseconds(100), [&] { return running == 0; });
    const std::vector<Failure> fresh(
        totals_.reports.begin() + static_cast<std::ptrdiff_t>(reported), totals_.reports.end());
    reported = totals_.reports.size();
    const std::int64_t finished_count = totals_.problems - done_before, failures = totals_.failures;
    lock.unlock();
    if (!fresh.empty()) progress.clear();
    show(fresh, on_failure);
    if (!ended) progress.update(finished_count, failures, stop_.elapsed_s() - begun_s);
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace flashcore::tool
