// flashcore quantize: a .npy file or random data to 8 bits and back, checked and timed.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cases.h"
#include "command_error.h"
#include "commands.h"
#include "device_memory.h"
#include "devices.h"
#include "flashcore/quant.h"
#include "json_output.h"
#include "npy.h"
#include "problem.h"
#include "reference/oracle.h"
#include "terminal.h"
#include "text.h"
#include "timing.h"
#include "verify/case_memory.h"
#include "verify/random.h"

namespace flashcore::tool {
namespace {

/// All tensors of the call in one block; until at() a view's data is its offset.
struct Block {
  std::vector<std::byte> bytes;
  TensorView wide, codes, scale, saturated, back;

  TensorView place(DType dtype, const std::int64_t* shape, int rank) {
    constexpr std::size_t kAlignment = 256;
    TensorView t;
    t.dtype = dtype;
    t.rank = rank;
    std::int64_t stride = 1;
    for (int i = rank - 1; i >= 0; --i) {
      t.shape[i] = shape[i];
      t.strides[i] = stride;
      stride *= shape[i];
    }
    t.data = reinterpret_cast<void*>(bytes.size());
    const std::size_t end = bytes.size() + static_cast<std::size_t>(stride * size_of(dtype));
    bytes.resize((end + kAlignment - 1) / kAlignment * kAlignment);
    return t;
  }
  static TensorView at(TensorView t, const void* base, Device device) {
    t.data =
        static_cast<std::byte*>(const_cast<void*>(base)) + reinterpret_cast<std::uintptr_t>(t.data);
    t.device = device;
    return t;
  }
  std::byte* host(const TensorView& t) {
    return bytes.data() + reinterpret_cast<std::uintptr_t>(t.data);
  }
};

void place_input(const QuantizeArgs& args, Block& block) {
  if (args.in.empty() == args.shape.empty()) {
    throw CommandError("give one of --in FILE (.npy) and --shape batch,heads,length,dim");
  }
  if (args.in.empty()) {
    ProblemArgs sizes;
    sizes.shape = args.shape;
    const verify::CaseSpec s = spec_of(sizes);
    const std::int64_t shape[] = {s.batch, s.kv_heads, s.kv_len, s.head_dim};
    block.wide = block.place(dtype_named(args.from_dtype), shape, 4);
    verify::Random random(args.seed);
    verify::for_each_element(block.wide, [&](std::int64_t i) {
      verify::store(block.host(block.wide), block.wide.dtype, i, random.normal());
    });
    return;
  }
  const std::vector<std::byte> file = read_file(args.in);
  const NpyArray array = value_or_throw(parse_npy(file));
  block.wide = block.place(array.dtype, array.shape, array.rank);
  const auto size = static_cast<std::size_t>(size_of(array.dtype));
  TensorView from = block.wide;
  std::copy_n(array.strides, array.rank, from.strides);
  std::size_t n = 0;
  verify::for_each_element(from, [&](std::int64_t i) {
    std::memcpy(block.host(block.wide) + n++ * size,
                array.data.data() + static_cast<std::size_t>(i) * size, size);
  });
}

void place_outputs(const QuantizeArgs& args, Block& block) {
  const TensorView& w = block.wide;
  std::int64_t four[4] = {1, 1, 1, 1};
  std::copy_n(w.shape, w.rank, four + 4 - w.rank);
  const bool blocks = args.per == "block";
  const std::int64_t slots[] = {four[0], four[1],
                                blocks ? (four[2] + args.block_rows - 1) / args.block_rows : 1};
  const std::int64_t one[] = {1};
  const int rank = args.per == "tensor" ? 1 : blocks ? 3 : 2;
  const std::int64_t* shape = rank == 1 ? one : slots;
  block.codes = block.place(dtype_named(args.dtype), w.shape, w.rank);
  block.scale = block.place(DType::f32, shape, rank);
  block.saturated = block.place(DType::i32, shape, rank);
  block.back = block.place(w.dtype, w.shape, w.rank);
}

struct Found {
  double relative_error = 0;  ///< of the values that came back
  std::int64_t saturated = 0, not_nearest = 0;
};

/// The finite values of a format, ascending.
std::vector<double> values_of(DType dtype) {
  std::vector<double> values;
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<std::uint8_t>(code);
    const double value = reference::element(&byte, dtype, 0);
    if (std::isfinite(value)) values.push_back(value);
  }
  std::sort(values.begin(), values.end());
  return values;
}

/// Is every code the nearest one? By the definition, in f64.
Found judge(const QuantizeArgs& args, Block& block) {
  Found found;
  const std::vector<double> values = values_of(block.codes.dtype);
  std::int64_t four[4] = {1, 1, 1, 1};
  std::copy_n(block.wide.shape, block.wide.rank, four + 4 - block.wide.rank);
  const std::int64_t per_head = four[2] * four[3];
  double error2 = 0, want2 = 0;
  for (std::int64_t i = 0; i < four[0] * four[1] * per_head; ++i) {
    std::int64_t slot = args.per == "tensor" ? 0 : i / per_head;
    if (args.per == "block") {
      slot = slot * block.scale.shape[2] + i % per_head / four[3] / args.block_rows;
    }
    const double scale = reference::element(block.host(block.scale), DType::f32, slot);
    const double x = reference::element(block.host(block.wide), block.wide.dtype, i);
    const double got = reference::element(block.host(block.codes), block.codes.dtype, i);
    const double back = reference::element(block.host(block.back), block.wide.dtype, i);
    if (!std::isfinite(x)) continue;
    const double want = x / scale;
    const auto above = std::lower_bound(values.begin(), values.end(), want);
    double nearest = std::fabs(want - (above == values.end() ? values.back() : *above));
    if (above != values.begin()) nearest = std::min(nearest, std::fabs(want - above[-1]));
    if (!(std::fabs(got - want) <= nearest + 4 * 0x1p-24 * std::fabs(want))) ++found.not_nearest;
    error2 += (back - x) * (back - x);
    want2 += x * x;
  }
  found.relative_error = want2 > 0 ? std::sqrt(error2 / want2) : 0;
  verify::for_each_element(block.saturated, [&](std::int64_t i) {
    found.saturated +=
        static_cast<const std::int32_t*>(static_cast<const void*>(block.host(block.saturated)))[i];
  });
  return found;
}

}  // namespace

int run_quantize(const QuantizeArgs& args) {
  const Stop stop(0);
  const Target target = find_target(args.device);
  const Backend& backend = *target.backend;
  Block block;
  place_input(args, block);
  place_outputs(args, block);
  const auto require = [](const Status& status) {
    if (!status.ok()) throw CommandError(status);
  };
  const DeviceMemory memory(backend, target.device, block.bytes.size());
  require(
      backend.upload(memory.data(), block.bytes.data(), block.bytes.size(), target.device.index));
  const auto view = [&](const TensorView& t) { return Block::at(t, memory.data(), target.device); };
  const QuantTensors to{view(block.wide), view(block.codes), view(block.scale),
                        view(block.saturated)};
  const QuantTensors from{view(block.codes), view(block.back), view(block.scale), {}};
  const QuantOptions options{args.block_rows, false}, given{args.block_rows, true};
  require(quantize(to, options));
  require(dequantize(from, options));
  require(
      backend.download(block.bytes.data(), memory.data(), block.bytes.size(), target.device.index));
  const Found found = judge(args, block);
  const bool passed = found.not_nearest == 0;
  if (!args.out.empty()) {
    write_file(args.out, to_npy(Block::at(block.codes, block.bytes.data(), {})));
  }
  if (!args.scale_out.empty()) {
    write_file(args.scale_out, to_npy(Block::at(block.scale, block.bytes.data(), {})));
  }
  Json json = {{"passed", passed},
               {"device", describe(target)},
               {"from", to_string(block.wide.dtype)},
               {"to", to_string(block.codes.dtype)},
               {"relative_error", found.relative_error},
               {"saturated", found.saturated},
               {"not_nearest", found.not_nearest}};
  std::string text = formatted(
      "device     {}\nvalues     {} to {}, a scale per {}\nerror      relative {:.3g}, {} "
      "saturated\n"
      "check      {}\n",
      describe(target), to_string(block.wide.dtype), to_string(block.codes.dtype), args.per,
      found.relative_error, found.saturated,
      passed ? green("passed, every code is the nearest")
             : red(formatted("FAILED, {} codes are not the nearest", found.not_nearest)));
  if (passed && args.samples > 0) {
    double elements = 1;
    for (int i = 0; i < block.wide.rank; ++i) elements *= static_cast<double>(block.wide.shape[i]);
    const double bytes = elements * static_cast<double>(size_of(block.wide.dtype) + 1);
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
    const double again = elements * static_cast<double>(size_of(block.wide.dtype));
    timed("quantize, scales found", bytes + again,
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
