#include "check_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "command_error.h"
#include "terminal.h"
#include "text.h"

namespace flashcore::tool {
namespace {

constexpr std::size_t kFullReports = 5;

// Small problems run on one thread each, so that --jobs fills the machine; every eighth runs on
// several, since work shared between threads must be right too.
constexpr std::uint64_t kSeveralThreadsEvery = 8;
constexpr int kSeveralThreads = 4;

Outcome no_memory() {
  Outcome outcome;
  outcome.status = {StatusCode::out_of_memory, "not enough host memory for this problem"};
  return outcome;
}

}  // namespace

/// One thread's memory: a bench per device and number of threads, made when first needed.
class CheckEngine::Worker {
 public:
  Worker(const CheckEngine& engine, const CheckSuite& suite) : engine_(engine), suite_(suite) {}

  Outcome check(const CheckItem& item, std::uint64_t index) {
    try {
      const Target& target = engine_.targets_[item.target];
      DeviceInfo plan_for = target.plan_for;
      const bool fixed = engine_.args_.device.threads > 0;
      if (target.device.type == DeviceType::cpu && !fixed && !suite_.large) {
        plan_for.threads = index % kSeveralThreadsEvery == 0 ? kSeveralThreads : 1;
      }
      auto& bench = benches_[{item.target, plan_for.threads}];
      if (bench == nullptr) {
        bench = std::make_unique<verify::CheckBench>(*target.backend, target.device, plan_for);
      }
      bench->plan_for(with_blocks(plan_for, item.blocks));
      return bench->check(item.spec, suite_.oracle_work, suite_.large ? engine_.jobs_ : 1);
    } catch (const std::bad_alloc&) {
      return no_memory();
    }
  }

 private:
  const CheckEngine& engine_;
  const CheckSuite& suite_;
  std::map<std::pair<std::size_t, int>, std::unique_ptr<verify::CheckBench>> benches_;
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

void CheckEngine::note(const CheckSuite& suite, std::uint64_t index, const CheckItem& item,
                       const Outcome& outcome) {
  const char* kernel = item.spec.options.kernel;
  if (kernel == nullptr) kernel = outcome.plan.kernel ? outcome.plan.kernel->id : "(no plan)";
  KernelTally& tally = totals_.kernels[kernel];
  ++totals_.problems;
  ++tally.problems;
  if (outcome.status.ok()) {
    coverage_.add(item.spec, outcome.plan, outcome.facts);
    const double ratio = outcome.comparison.worst_ratio;
    if (ratio > tally.worst_ratio) {
      tally.worst_ratio = ratio;
      tally.worst_index = index;
    }
  }
  if (suite.observe) suite.observe(index, item, outcome);
  if (outcome.passed()) return;
  ++totals_.failures;
  ++tally.failures;
  if (!totals_.first_failure ||
      (totals_.first_failure->first == suite.name && index < totals_.first_failure->second)) {
    totals_.first_failure = {suite.name, index};
  }
  if (totals_.reports.size() == kFullReports) return;
  const std::string blocks = item.blocks > 0 ? formatted(" blocks {}", item.blocks) : "";
  totals_.reports.push_back({suite.name, index, kernel, verify::to_string(item.spec) + blocks,
                             outcome.failure(), suite.replay(index, item), outcome.comparison,
                             outcome.status.ok()});
}

void CheckEngine::check(const CheckSuite& suite,
                        const std::function<void(const Failure&)>& on_failure) {
  const Range range = range_of(suite);
  const auto count = static_cast<std::int64_t>(range.end - range.begin);
  const int workers = suite.large ? 1 : static_cast<int>(std::min<std::int64_t>(jobs_, count));
  totals_.planned += count;
  std::atomic<std::uint64_t> next{range.begin};
  std::mutex mutex;  // guards totals_, coverage_, what observe() touches, running
  std::condition_variable finished;
  int running = workers;
  const auto work = [&] {
    Worker worker(*this, suite);
    for (;;) {
      {
        const std::lock_guard lock(mutex);
        if (enough() || stop_.now()) break;
      }
      const std::uint64_t index = next.fetch_add(1);
      if (index >= range.end) break;
      const CheckItem item = suite.item(index);
      const Outcome outcome = worker.check(item, index);
      const std::lock_guard lock(mutex);
      note(suite, index, item, outcome);
    }
    const std::lock_guard lock(mutex);
    --running;
    finished.notify_one();
  };

  Progress progress(suite.name + " problems", count, args_.quiet);
  const std::int64_t done_before = totals_.problems;
  std::size_t reported = totals_.reports.size();
  const double begun_s = stop_.elapsed_s();
  std::vector<std::thread> threads;  // from here on totals_ needs the lock
  for (int i = 0; i < workers; ++i) threads.emplace_back(work);
  for (bool ended = false; !ended;) {
    std::unique_lock lock(mutex);
    ended = finished.wait_for(lock, std::chrono::milliseconds(100), [&] { return running == 0; });
    const std::vector<Failure> fresh(
        totals_.reports.begin() + static_cast<std::ptrdiff_t>(reported), totals_.reports.end());
    reported = totals_.reports.size();
    const std::int64_t done = totals_.problems - done_before, failures = totals_.failures;
    lock.unlock();
    if (!fresh.empty()) progress.clear();
    for (const Failure& failure : fresh) on_failure(failure);
    if (!ended) progress.update(done, failures, stop_.elapsed_s() - begun_s);
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace flashcore::tool
