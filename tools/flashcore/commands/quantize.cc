// flashcore quantize: quantizes .npy files or random data to 8 bits and back, checks and times it.
#include "bench/timing.h"
#include "cli/json_output.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "command_error.h"
#include "commands.h"
#include "data/devices.h"
#include "data/npy.h"
#include "data/quantize_data.h"
#include "device_memory.h"
#include "flashcore/quant.h"

namespace flashcore::tool {

int run_quantize(const QuantizeArgs& args) {
  const Stop stop(0);
  const Target target = find_target(args.device);
  const Backend& backend = *target.backend;
  const QuantizeData data(args);
  const auto require = [](const Status& status) {
    if (!status.ok()) throw CommandError(status);
  };
  const DeviceMemory memory(backend, target.device, data.size());
  require(backend.upload(memory.data(), data.bytes(), data.input_bytes(), target.device.index));
  const auto view = [&](const TensorView& t) {
    return QuantizeData::at(t, memory.data(), target.device);
  };
  const QuantTensors to{view(data.wide), view(data.quantized), view(data.scale),
                        view(data.saturated)};
  const QuantTensors from{view(data.quantized), view(data.dequantized), view(data.scale), {}};
  const QuantOptions options{args.block_rows, false, args.rotate};
  const QuantOptions given{args.block_rows, true, args.rotate};
  require(quantize(to, options));
  require(dequantize(from, options));
  require(backend.download(data.bytes() + data.input_bytes(), memory.data() + data.input_bytes(),
                           data.size() - data.input_bytes(), target.device.index));
  const QuantizeErrors found = check_quantized(args, data);
  const bool passed = found.not_nearest == 0;
  if (!args.out.empty()) {
    write_file(args.out, to_npy(data.here(data.quantized)));
  }
  if (!args.scale_out.empty()) {
    write_file(args.scale_out, to_npy(data.here(data.scale)));
  }
  Json json = {{"passed", passed},
               {"device", describe(target)},
               {"from", to_string(data.wide.dtype)},
               {"to", to_string(data.quantized.dtype)},
               {"rotate", args.rotate},
               {"relative_error", found.relative_error},
               {"saturated", found.saturated},
               {"not_nearest", found.not_nearest}};
  std::string text = formatted(
      "device     {}\nvalues     {} to {}, one scale per {}{}\nerror      relative {:.3g}, {} "
      "saturated\n"
      "check      {}\n",
      describe(target), to_string(data.wide.dtype), to_string(data.quantized.dtype), args.per,
      args.rotate ? ", rows rotated" : "", found.relative_error, found.saturated,
      passed ? green("passed, every value is the nearest")
             : red(formatted("FAILED, {} values are not the nearest", found.not_nearest)));
  if (passed && args.samples > 0) {
    double elements = 1;
    for (int i = 0; i < data.wide.rank; ++i) elements *= static_cast<double>(data.wide.shape[i]);
    const double bytes = elements * static_cast<double>(size_of(data.wide.dtype) + 1);
    const auto timed = [&](const char* name, double moved,
                           const std::function<Status(Stream)>& call) {
      const Timing t = value_or_throw(time_calls(
          backend, target.device, [&](int, Stream stream) { return call(stream); }, 1, args.samples,
          stop));
      const double rate = moved / t.median / 1e3;
      text += formatted("time       {:<28} {} (spread {:.1f} %), {:.4g} GB/s read and written\n",
                        name, duration(t.median), 100 * t.spread, rate);
      json["times"].push_back({{"what", name}, {"us", t.median}, {"gbs", rate}});
    };
    const double again = elements * static_cast<double>(size_of(data.wide.dtype));
    timed("quantize, scales computed", bytes + again,
          [&](Stream s) { return quantize(to, options, {}, s); });
    timed("quantize, scales given", bytes, [&](Stream s) { return quantize(to, given, {}, s); });
    timed("dequantize", bytes, [&](Stream s) { return dequantize(from, options, s); });
  }
  if (args.json) {
    print_json(json);
  } else {
    print_out("{}", text);
  }
  return passed ? kOk : kFailed;
}

}  // namespace flashcore::tool
