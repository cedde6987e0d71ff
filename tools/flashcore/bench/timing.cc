#include "bench/timing.h"

#include <algorithm>
#include <cmath>

namespace flashcore::tool {
namespace {

constexpr int kMaxCalls = 1000;
constexpr int kSamplesPerBatch = 10;  // between two checks of `stop`

/// Long enough to hide the resolution of clocks and, on a CPU, scheduler ticks.
double wanted_sample_us(DeviceType type) { return type == DeviceType::cpu ? 5000 : 1000; }

double quantile(const std::vector<double>& sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

}  // namespace

void summarise(Timing& timing) {
  if (timing.samples.empty()) return;
  std::vector<double> sorted = timing.samples;
  std::sort(sorted.begin(), sorted.end());
  timing.median = quantile(sorted, 0.5);
  if (timing.median > 0) {
    timing.spread = (quantile(sorted, 0.75) - quantile(sorted, 0.25)) / timing.median;
  }
}

Result<Timing> time_calls(const Backend& backend, Device device,
                          const std::function<Status(int call, Stream stream)>& call, int min_calls,
                          int samples, const Stop& stop) {
  Timing timing;
  const Result<std::vector<double>> trial = backend.time(call, min_calls, 2, device.index);
  if (!trial.ok()) return trial.status();
  const double once = std::max(*std::min_element(trial->begin(), trial->end()), 1e-3);
  const double wanted = std::ceil(wanted_sample_us(device.type) / once);
  timing.calls =
      std::max(min_calls, static_cast<int>(std::min(wanted, static_cast<double>(kMaxCalls))));
  while (static_cast<int>(timing.samples.size()) < samples && !stop.now()) {
    const int batch = std::min(kSamplesPerBatch, samples - static_cast<int>(timing.samples.size()));
    const Result<std::vector<double>> more = backend.time(call, timing.calls, batch, device.index);
    if (!more.ok()) return more.status();
    timing.samples.insert(timing.samples.end(), more->begin(), more->end());
  }
  summarise(timing);
  return timing;
}

double roofline_us(const Problem& problem, const DeviceInfo& device) {
  if (device.f32_tflops <= 0 || device.memory_gbs <= 0) return 0;
  const bool narrow = problem.dtype == DType::f16 || problem.dtype == DType::bf16;
  double tflops = narrow && device.tensor16_tflops > 0 ? device.tensor16_tflops : device.f32_tflops;
  if (problem.dtype == DType::f64) tflops /= 2;
  const Cost needed = cost(problem);
  return std::max(needed.flops / (tflops * 1e6), needed.bytes / (device.memory_gbs * 1e3));
}

}  // namespace flashcore::tool
