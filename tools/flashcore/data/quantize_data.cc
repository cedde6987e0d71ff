#include "data/quantize_data.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cli/parallel.h"
#include "command_error.h"
#include "core/rotation.h"
#include "data/cases.h"
#include "data/npy.h"
#include "data/problem.h"
#include "reference/oracle.h"
#include "verify/inputs/case_memory.h"
#include "verify/inputs/random.h"

namespace flashcore::tool {
namespace {

/// [batch, heads, rows, columns] of a tensor of any rank.
struct Extents {
  std::int64_t batch, heads, rows, columns;

  explicit Extents(const TensorView& t) {
    std::int64_t four[4] = {1, 1, 1, 1};
    std::copy_n(t.shape, t.rank, four + 4 - t.rank);
    batch = four[0], heads = four[1], rows = four[2], columns = four[3];
  }
  std::int64_t all_rows() const { return batch * heads * rows; }
};

/// Rows that a thread processes at a time.
constexpr std::int64_t kRowsPerChunk = 256;

std::int64_t chunks_of(std::int64_t rows) { return (rows + kRowsPerChunk - 1) / kRowsPerChunk; }

/// Calls body(row) for the rows of a chunk.
template <typename Body>
void for_each_row(std::int64_t chunk, std::int64_t rows, Body body) {
  const std::int64_t end = std::min((chunk + 1) * kRowsPerChunk, rows);
  for (std::int64_t row = chunk * kRowsPerChunk; row < end; ++row) body(row);
}

/// The value of an 8-bit code and its neighbours in the format, infinite beyond the ends. A value
/// is the nearest to a number if neither neighbour is nearer.
struct FormatValue {
  double value, below, above;
};
std::vector<FormatValue> format_values(DType dtype) {
  std::vector<double> finite;
  const auto value_of = [&](int code) {
    const auto byte = static_cast<std::uint8_t>(code);
    return reference::element(&byte, dtype, 0);
  };
  for (int code = 0; code < 256; ++code) {
    if (std::isfinite(value_of(code))) finite.push_back(value_of(code));
  }
  std::sort(finite.begin(), finite.end());
  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<FormatValue> values;
  for (int code = 0; code < 256; ++code) {
    const double value = value_of(code);
    const auto below = std::lower_bound(finite.begin(), finite.end(), value);
    const auto above = std::upper_bound(finite.begin(), finite.end(), value);
    values.push_back({value, below == finite.begin() ? -kNone : below[-1],
                      above == finite.end() ? kNone : *above});
  }
  return values;
}

/// Converts elements of a wide tensor; 16-bit ones by a table.
class WideValues {
 public:
  explicit WideValues(DType dtype) : dtype_(dtype) {
    if (size_of(dtype) != 2) return;
    for (int bits = 0; bits < 1 << 16; ++bits) {
      const auto element = static_cast<std::uint16_t>(bits);
      table_.push_back(reference::element(&element, dtype, 0));
    }
  }
  double operator()(const void* data, std::int64_t i) const {
    return table_.empty() ? reference::element(data, dtype_, i)
                          : table_[static_cast<const std::uint16_t*>(data)[i]];
  }

 private:
  DType dtype_;
  std::vector<double> table_;
};

/// The values of a row before the division by its scale, and a bound on the error of f32.
struct ExpectedRow {
  std::vector<double> values;
  double absolute_error = 0;
};
void compute_expected(const std::vector<double>& x, bool rotate, ExpectedRow& expected) {
  expected.values = x;
  expected.absolute_error = 0;
  if (!rotate) return;
  const auto columns = static_cast<std::int32_t>(x.size());
  const double order = core::rotation_order(columns), norm = 1 / std::sqrt(order);
  double sum = 0;
  for (std::int32_t c = 0; c < columns; ++c) {
    double& y = expected.values[static_cast<std::size_t>(c)];
    y *= static_cast<double>(core::with_rotation_sign(1.f, c));
    sum += std::fabs(y);
  }
  core::add_butterflies(expected.values.data(), columns);
  for (double& y : expected.values) y *= norm;
  // One rounding for each addition on the path of an element, and those of the factor.
  expected.absolute_error = (std::log2(order) + 3) * 0x1p-24 * sum * norm;
}

}  // namespace

TensorView QuantizeData::place(DType dtype, const std::int64_t* shape, int rank) {
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
  t.data = reinterpret_cast<void*>(size_);
  const std::size_t end = size_ + static_cast<std::size_t>(stride * size_of(dtype));
  size_ = (end + kAlignment - 1) / kAlignment * kAlignment;
  return t;
}

TensorView QuantizeData::at(TensorView t, void* base, Device device) {
  t.data = static_cast<std::byte*>(base) + reinterpret_cast<std::uintptr_t>(t.data);
  t.device = device;
  return t;
}

void QuantizeData::place_outputs(const QuantizeArgs& args) {
  const Extents extents(wide);
  const bool blocks = args.per == "block";
  const std::int64_t counts[] = {
      extents.batch, extents.heads,
      blocks ? (extents.rows + args.block_rows - 1) / args.block_rows : 1};
  const std::int64_t one[] = {1};
  const int rank = args.per == "tensor" ? 1 : blocks ? 3 : 2;
  const std::int64_t* shape = rank == 1 ? one : counts;
  quantized = place(dtype_named(args.dtype), wide.shape, wide.rank);
  scale = place(DType::f32, shape, rank);
  saturated = place(DType::i32, shape, rank);
  dequantized = place(wide.dtype, wide.shape, wide.rank);
  bytes_.reset(new std::byte[size_]);  // not initialized: it may be large
}

void QuantizeData::draw_input(const QuantizeArgs& args) {
  const TensorView to = here(wide);
  const Extents extents(wide);
  in_parallel(chunks_of(extents.all_rows()), args.device.threads, [&](std::int64_t chunk) {
    for_each_row(chunk, extents.all_rows(), [&](std::int64_t row) {
      verify::Random random(args.seed, static_cast<std::uint64_t>(row));
      for (std::int64_t c = 0; c < extents.columns; ++c) {
        verify::store(to.data, to.dtype, row * extents.columns + c, random.normal());
      }
    });
  });
}

QuantizeData::QuantizeData(const QuantizeArgs& args) {
  if (args.in.empty() == args.shape.empty()) {
    throw CommandError("give one of --in FILE (.npy) and --shape batch,heads,length,dim");
  }
  if (args.in.empty()) {
    ProblemArgs sizes;
    sizes.shape = args.shape;
    const verify::CaseSpec s = spec_of(sizes);
    const std::int64_t shape[] = {s.batch, s.kv_heads, s.kv_len, s.head_dim};
    wide = place(dtype_named(args.from_dtype), shape, 4);
    place_outputs(args);
    draw_input(args);
    return;
  }
  const std::vector<std::byte> file = read_file(args.in);
  const NpyArray array = value_or_throw(parse_npy(file));
  wide = place(array.dtype, array.shape, array.rank);
  place_outputs(args);
  const auto size = static_cast<std::size_t>(size_of(array.dtype));
  TensorView from = wide;
  std::copy_n(array.strides, array.rank, from.strides);
  std::size_t n = 0;
  verify::for_each_element(from, [&](std::int64_t i) {
    std::memcpy(bytes() + n++ * size, array.data.data() + static_cast<std::size_t>(i) * size, size);
  });
}

QuantizeErrors check_quantized(const QuantizeArgs& args, const QuantizeData& data) {
  const Extents extents(data.wide);
  const std::int64_t rows = extents.all_rows(), columns = extents.columns;
  const std::vector<FormatValue> decode = format_values(data.quantized.dtype);
  const WideValues value_of(data.wide.dtype);
  const void* const wide = data.here(data.wide).data;
  const void* const dequantized = data.here(data.dequantized).data;
  const auto* values = static_cast<const std::uint8_t*>(data.here(data.quantized).data);
  const auto* scales = static_cast<const float*>(data.here(data.scale).data);
  const auto scale_index = [&](std::int64_t row) {
    if (args.per == "tensor") return std::int64_t{0};
    const std::int64_t head = row / extents.rows;
    if (args.per == "head") return head;
    return head * data.scale.shape[2] + row % extents.rows / args.block_rows;
  };
  struct Chunk {  // summed in order, so that the result does not depend on the threads
    double error2 = 0, want2 = 0;
    std::int64_t not_nearest = 0;
  };
  std::vector<Chunk> chunks(static_cast<std::size_t>(chunks_of(rows)));
  in_parallel(chunks_of(rows), args.device.threads, [&](std::int64_t index) {
    Chunk& chunk = chunks[static_cast<std::size_t>(index)];
    std::vector<double> x(static_cast<std::size_t>(columns));
    ExpectedRow expected;
    for_each_row(index, rows, [&](std::int64_t row) {
      for (std::int64_t c = 0; c < columns; ++c) {
        const double value = value_of(wide, row * columns + c);
        x[static_cast<std::size_t>(c)] = value;
        if (!std::isfinite(value)) continue;
        const double error = value_of(dequantized, row * columns + c) - value;
        // A rotation spreads one non-finite element over its row.
        if (args.rotate && std::isnan(error)) continue;
        chunk.error2 += error * error;
        chunk.want2 += value * value;
      }
      compute_expected(x, args.rotate, expected);
      const auto scale = static_cast<double>(scales[scale_index(row)]);
      for (std::int64_t c = 0; c < columns; ++c) {
        const double want = expected.values[static_cast<std::size_t>(c)] / scale;
        if (!std::isfinite(want)) continue;
        const FormatValue& got = decode[values[row * columns + c]];
        const double nearest = std::min(std::fabs(want - got.below), std::fabs(got.above - want));
        const double rounding = 4 * 0x1p-24 * std::fabs(want) + expected.absolute_error / scale;
        if (!(std::fabs(got.value - want) <= nearest + rounding)) ++chunk.not_nearest;
      }
    });
  });
  QuantizeErrors found;
  double error2 = 0, want2 = 0;
  for (const Chunk& chunk : chunks) {
    error2 += chunk.error2;
    want2 += chunk.want2;
    found.not_nearest += chunk.not_nearest;
  }
  found.relative_error = want2 > 0 ? std::sqrt(error2 / want2) : 0;
  const auto* saturated = static_cast<const std::int32_t*>(data.here(data.saturated).data);
  verify::for_each_element(data.saturated,
                           [&](std::int64_t i) { found.saturated += saturated[i]; });
  return found;
}

}  // namespace flashcore::tool
