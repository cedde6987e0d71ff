// Timing calls on a device: calibration, samples, median and spread.
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

/// Times `call`. A sample takes `min_calls` calls or as many as make it long enough to be measured.
/// Ends early, with fewer samples, where `stop` says so.
Result<Timing> time_calls(const Backend& backend, Device device,
                          const std::function<Status(int call, Stream stream)>& call, int min_calls,
                          int samples, const Stop& stop);

/// Seconds that checking and timing a problem may take on a GPU, where it usually takes a few.
inline double usual_limit_s(int samples) { return 60 + 0.5 * samples; }

/// Median and spread of the samples there are.
void summarise(Timing& timing);

/// The larger of what arithmetic and memory need on the device, in microseconds; 0 where its rates
/// are not known. 16-bit problems are held against a GPU's matrix units, used or not.
double floor_us(const Problem& problem, const DeviceInfo& device);

}  // namespace flashcore::tool
