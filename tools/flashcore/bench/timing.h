// Times calls on a device: calibration, samples, median and spread.
#pragma once

#include <functional>
#include <vector>

#include "backend/backend.h"
#include "cli/signals.h"

namespace flashcore::tool {

struct Timing {
  std::vector<double> samples;  ///< microseconds per call
  int calls = 0;                ///< per sample
  double median = 0;
  double spread = 0;  ///< interquartile range over median
};

/// Times `call`. A sample has `min_calls` calls, or more if it would be too short to measure.
/// Returns fewer samples if `stop` ends it.
Result<Timing> time_calls(const Backend& backend, Device device,
                          const std::function<Status(int call, Stream stream)>& call, int min_calls,
                          int samples, const Stop& stop);

/// Default limit in seconds for checking and timing a problem on a GPU, which usually takes a few.
inline double default_limit_s(int samples) { return 60 + 0.5 * samples; }

/// Computes median and spread of the samples.
void summarise(Timing& timing);

/// Roofline bound in microseconds: the larger of arithmetic and memory time on the device; 0 if its
/// rates are unknown. For 16-bit problems on a GPU, the tensor cores count, used or not.
double roofline_us(const Problem& problem, const DeviceInfo& device);

}  // namespace flashcore::tool
