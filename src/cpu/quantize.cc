#include "cpu/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/cancel.h"
#include "core/element.h"
#include "core/error.h"
#include "cpu/columns.h"
#include "cpu/thread_pool.h"

namespace flashcore::cpu {
namespace {

using core::Element;
using core::QuantParams;
using core::QuantUnit;

constexpr std::int64_t kNoIndex = std::numeric_limits<std::int64_t>::max();

/// One call.
struct Task {
  const QuantParams& params;
  int threads;
  const std::int32_t* cancel;
};

/// Calls body(unit number, unit) for all units, in parallel.
template <typename Body>
void for_each_unit(const Task& task, Body& body) noexcept {
  struct Job {
    const QuantParams& params;
    Body& body;
  } job{task.params, body};
  parallel_for(
      task.threads, core::quant_units(task.params),
      [](void* context, std::int64_t index, int) {
        const Job& j = *static_cast<const Job*>(context);
        j.body(static_cast<std::size_t>(index), core::quant_unit(j.params, index));
      },
      &job, task.cancel);
}

/// Calls visit(row of the unit, column, value, offset in to) for every element. The value is
/// load(offset in from). With a rotation, rotate(row, columns) transforms the loaded row first.
template <typename Load, typename Rotate, typename Visit>
void for_each_value(const Task& task, const QuantUnit& unit, Load load, Rotate rotate,
                    Visit visit) {
  const QuantParams& p = task.params;
  for (std::int32_t row = 0; row < unit.rows && !core::is_set(task.cancel); ++row) {
    const std::int32_t at = unit.first_row + row;
    const std::int64_t from = core::row_offset(p.from_strides, unit.b, unit.h, at);
    const std::int64_t to = core::row_offset(p.to_strides, unit.b, unit.h, at);
    const auto load_column = [&](std::int32_t c) { return load(from + c * p.from_strides.column); };
    if (!p.rotate) {
      for_each_column(p.columns, task.cancel, [&](std::int32_t c) {
        visit(row, c, load_column(c), to + c * p.to_strides.column);
      });
      continue;
    }
    float values[core::kMaxRotatedColumns];
    for (std::int32_t c = 0; c < p.columns; ++c) values[c] = load_column(c);
    rotate(values, p.columns);
    for (std::int32_t c = 0; c < p.columns; ++c) {
      visit(row, c, values[c], to + c * p.to_strides.column);
    }
  }
}

/// Calls visit(row of the unit, column, value, offset in to) for every value to encode.
template <Element kWide, typename Visit>
void for_each_wide(const Task& task, const QuantUnit& unit, Visit visit) {
  const void* const all = task.params.from;
  for_each_value(
      task, unit, [&](std::int64_t from) { return core::load_element<float>(all, kWide, from); },
      core::rotate_row, visit);
}

/// Calls body.operator()<wide>(), which makes the format a constant inside the loops.
template <typename Body>
void with_wide(Element wide, Body body) {
  switch (wide) {
    case Element::f32: return body.template operator()<Element::f32>();
    case Element::f16: return body.template operator()<Element::f16>();
    default: return body.template operator()<Element::bf16>();
  }
}
template <typename Body>
void with_code(Element code, Body body) {
  switch (code) {
    case Element::e4m3: return body.template operator()<Element::e4m3>();
    case Element::e5m2: return body.template operator()<Element::e5m2>();
    case Element::int8: return body.template operator()<Element::int8>();
    default: return body.template operator()<Element::u8>();
  }
}

/// Statistics of the values, per unit.
struct UnitStats {
  std::vector<float> largest;           // finite magnitude
  std::vector<std::int64_t> first_nan;  // element index, or kNoIndex
};

UnitStats compute_stats(const Task& task) {
  const QuantParams& p = task.params;
  const auto units = static_cast<std::size_t>(core::quant_units(p));
  UnitStats stats{std::vector<float>(units, 0.f), std::vector<std::int64_t>(units, kNoIndex)};
  with_wide(p.wide, [&]<Element kWide>() {
    const auto visit_unit = [&](std::size_t index, const QuantUnit& unit) {
      float largest = 0.f;
      std::int64_t first_nan = kNoIndex;
      for_each_wide<kWide>(
          task, unit, [&](std::int32_t row, std::int32_t c, float x, std::int64_t) {
            largest = core::larger_magnitude(largest, x);
            if (std::isnan(x))
              first_nan = std::min(first_nan, core::element_index(p, unit, row, c));
          });
      stats.largest[index] = largest;
      stats.first_nan[index] = first_nan;
    };
    for_each_unit(task, visit_unit);
  });
  return stats;
}

/// The coordinates of element i of the tensor, counted row by row.
struct Coordinates {
  std::int32_t b, h, row, column;
};
Coordinates coordinates_of(const QuantParams& p, std::int64_t i) {
  const auto at = [&](std::int64_t stride, std::int32_t extent) {
    return static_cast<std::int32_t>(i / stride % extent);
  };
  const std::int64_t row = p.columns, head = row * p.rows, batch = head * p.heads;
  return {at(batch, p.batch), at(head, p.heads), at(row, p.rows), at(1, p.columns)};
}

/// The error for element i, a NaN.
Status nan_error(const QuantParams& p, std::int64_t i) {
  const auto [b, h, row, column] = coordinates_of(p, i);
  return invalid_argument(
      "from[%d, %d, %d, %d] is NaN, which %s cannot represent; e4m3 and e5m2 can", b, h, row,
      column, p.code == Element::int8 ? "int8" : "byte");
}

/// The error for element i of the rotated tensor, a NaN. Names the element or row of `from` that
/// causes it.
Status rotated_nan_error(const QuantParams& p, std::int64_t i) {
  const auto [b, h, row, column] = coordinates_of(p, i);
  const std::int64_t from = core::row_offset(p.from_strides, b, h, row);
  const char* const code = p.code == Element::int8 ? "int8" : "byte";
  for (std::int32_t c = 0; c < p.columns; ++c) {
    const auto x = core::load_element<float>(p.from, p.wide, from + c * p.from_strides.column);
    if (std::isfinite(x)) continue;
    return invalid_argument(
        "from[%d, %d, %d, %d] is %g: it has no rotation that %s can represent; e4m3 and e5m2 have "
        "NaN",
        b, h, row, c, static_cast<double>(x), code);
  }
  return invalid_argument(
      "from[%d, %d, %d, :] is too large: the sums of its rotation overflow f32, which %s cannot "
      "represent; quantise it without rotation, or divide it first",
      b, h, row, code);
}

/// Calls visit(batch, head, block) for each scale.
template <typename Visit>
void for_each_slot(const QuantParams& p, Visit visit) {
  for (std::int32_t b = 0; b < p.slots_batch; ++b) {
    for (std::int32_t h = 0; h < p.slots_heads; ++h) {
      for (std::int32_t block = 0; block < p.slots_blocks; ++block) visit(b, h, block);
    }
  }
}

Status check_given_scales(const QuantParams& p) {
  Status status;
  for_each_slot(p, [&](std::int32_t b, std::int32_t h, std::int32_t block) {
    const float scale = p.scale[core::row_offset(p.scale_strides, b, h, block)];
    if (!status.ok() || (std::isfinite(scale) && scale > 0)) return;
    status = invalid_argument("scale[%d, %d, %d] is %g; wanted a positive, finite number", b, h,
                              block, static_cast<double>(scale));
  });
  return status;
}

/// Computes the scales from the units' largest values.
void write_scales(const QuantParams& p, const UnitStats& stats) {
  const std::int64_t units = core::quant_units(p);
  const auto slot_of_unit = [&](std::int64_t i) -> float& {
    return p.scale[core::slot_of(p, p.scale_strides, core::quant_unit(p, i))];
  };
  for_each_slot(p, [&](std::int32_t b, std::int32_t h, std::int32_t block) {
    p.scale[core::row_offset(p.scale_strides, b, h, block)] = 0.f;
  });
  for (std::int64_t i = 0; i < units; ++i) {
    slot_of_unit(i) = std::max(slot_of_unit(i), stats.largest[static_cast<std::size_t>(i)]);
  }
  for_each_slot(p, [&](std::int32_t b, std::int32_t h, std::int32_t block) {
    float& slot = p.scale[core::row_offset(p.scale_strides, b, h, block)];
    slot = core::scale_of_largest(p.code, slot);
  });
}

}  // namespace

Status quantize(const QuantParams& p, int threads, const std::int32_t* cancel) {
  const Task task{p, threads, cancel};
  const UnitStats stats = compute_stats(task);
  FLASHCORE_RETURN_IF_ERROR(check_cancel(cancel));  // stats of a cancelled call are incomplete
  if (!core::has_nan(p.code)) {
    std::int64_t first = kNoIndex;
    for (const std::int64_t index : stats.first_nan) first = std::min(first, index);
    if (first != kNoIndex) return p.rotate ? rotated_nan_error(p, first) : nan_error(p, first);
  }
  if (p.given_scale) {
    FLASHCORE_RETURN_IF_ERROR(check_given_scales(p));
  } else {
    write_scales(p, stats);
  }
  const auto units = static_cast<std::size_t>(core::quant_units(p));
  std::vector<std::int64_t> saturated(units, 0);
  auto* encoded = static_cast<std::uint8_t*>(p.to);
  const auto encode_all = [&]<Element kWide, Element kCode>() {
    const auto encode = [&](std::size_t index, const QuantUnit& unit) {
      const float inverse =
          core::inverse_step(kCode, p.scale[core::slot_of(p, p.scale_strides, unit)]);
      std::int64_t count = 0;
      for_each_wide<kWide>(task, unit, [&](std::int32_t, std::int32_t, float x, std::int64_t to) {
        const core::Code code = core::encode(kCode, x * inverse);
        encoded[to] = code.bits;
        count += code.saturated ? 1 : 0;
      });
      saturated[index] = count;
    };
    for_each_unit(task, encode);
  };
  with_wide(p.wide, [&]<Element kWide>() {
    with_code(p.code, [&]<Element kCode>() { encode_all.template operator()<kWide, kCode>(); });
  });
  FLASHCORE_RETURN_IF_ERROR(check_cancel(cancel));
  if (p.saturated == nullptr) return {};
  for_each_slot(p, [&](std::int32_t b, std::int32_t h, std::int32_t block) {
    p.saturated[core::row_offset(p.saturated_strides, b, h, block)] = 0;
  });
  for (std::size_t i = 0; i < units; ++i) {
    const QuantUnit unit = core::quant_unit(p, static_cast<std::int64_t>(i));
    std::int32_t& slot = p.saturated[core::slot_of(p, p.saturated_strides, unit)];
    constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
    slot = static_cast<std::int32_t>(std::min(slot + saturated[i], kMaxCount));
  }
  return {};
}

void dequantize(const QuantParams& p, int threads, const std::int32_t* cancel) noexcept {
  const Task task{p, threads, cancel};
  static constexpr core::DecodeTable kTables[] = {
      core::decode_table(Element::e4m3), core::decode_table(Element::e5m2),
      core::decode_table(Element::int8), core::decode_table(Element::u8)};
  const float* values = kTables[static_cast<int>(p.code) - static_cast<int>(Element::e4m3)].value;
  const auto* encoded = static_cast<const std::uint8_t*>(p.from);
  with_wide(p.wide, [&]<Element kWide>() {
    const auto decode = [&](std::size_t, const QuantUnit& unit) {
      const float scale = core::step_of(p.code, p.scale[core::slot_of(p, p.scale_strides, unit)]);
      for_each_value(
          task, unit, [&](std::int64_t from) { return values[encoded[from]]; },
          core::rotate_row_back,
          [&](std::int32_t, std::int32_t, float x, std::int64_t to) {
            core::store_element(p.to, kWide, to, x * scale);
          });
    };
    for_each_unit(task, decode);
  });
}

}  // namespace flashcore::cpu
