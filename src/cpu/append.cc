#include "cpu/append.h"

#include <cstring>

#include "core/cancel.h"
#include "cpu/columns.h"

namespace flashcore::cpu {
namespace {

/// The first invalid length or page id.
core::ErrorSlot first_length_error(const core::AppendParams& p) noexcept {
  for (std::int32_t b = 0; b < p.batch; ++b) {
    const core::AppendRange range = core::append_range(p, b);
    if (range.error.code != 0) return range.error;
    if (p.pages.table == nullptr || range.count == 0) continue;
    const std::int32_t last = p.pages.page_index(range.used + range.count - 1);
    for (std::int32_t slot = p.pages.page_index(range.used); slot <= last; ++slot) {
      const core::ErrorSlot found = core::page_error(p.pages, b, slot);
      if (found.code != 0) return found;
    }
  }
  return {};
}

/// An invalid scale, or a NaN that the format cannot represent.
core::ErrorSlot quantize_error(const core::AppendTensor& t, const core::AppendRow& row, bool of_v,
                               const std::int32_t* cancel) noexcept {
  if (!t.quantizes) return {};
  const core::ErrorSlot found = core::append_scale_error(t, row, of_v);
  if (found.code != 0 || core::has_nan(t.code)) return found;
  const std::int64_t from = core::row_offset(t.from_strides, row.from, row.head);
  bool has_nan = false;
  for_each_column(t.columns, cancel, [&](std::int32_t c) {
    const float x = core::load_element<float>(t.from, t.wide, from + c * t.from_strides.column);
    has_nan |= x != x;
  });
  return has_nan ? core::append_nan_error(row, of_v) : core::ErrorSlot{};
}

void quantize_row(const core::AppendTensor& t, const core::AppendRow& row,
                  const std::int32_t* cancel) noexcept {
  const float factor = core::append_factor(t, row);
  const std::int64_t from = core::row_offset(t.from_strides, row.from, row.head);
  std::uint8_t* to =
      static_cast<std::uint8_t*>(t.to) + core::row_offset(t.to_strides, row.to, row.head);
  for_each_column(t.columns, cancel, [&](std::int32_t c) {
    const float x = core::load_element<float>(t.from, t.wide, from + c * t.from_strides.column);
    to[c * t.to_strides.column] = core::encode(t.code, x * factor).bits;
  });
}

void copy_row(const core::AppendTensor& t, const core::AppendRow& row,
              const std::int32_t* cancel) noexcept {
  const auto size = static_cast<std::size_t>(t.bytes);
  const char* from =
      static_cast<const char*>(t.from) +
      core::row_offset(t.from_strides, row.from, row.head) * static_cast<std::int64_t>(size);
  char* to = static_cast<char*>(t.to) +
             core::row_offset(t.to_strides, row.to, row.head) * static_cast<std::int64_t>(size);
  if (t.from_strides.column == 1 && t.to_strides.column == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(t.columns) * size);
    return;
  }
  const auto bytes = static_cast<std::int64_t>(size);
  for_each_column(t.columns, cancel, [&](std::int32_t c) {
    std::memcpy(to + c * t.to_strides.column * bytes, from + c * t.from_strides.column * bytes,
                size);
  });
}

void write_row(const core::AppendTensor& t, const core::AppendRow& row,
               const std::int32_t* cancel) noexcept {
  t.quantizes ? quantize_row(t, row, cancel) : copy_row(t, row, cancel);
}

}  // namespace

core::ErrorSlot append(const core::AppendParams& params, const std::int32_t* cancel) noexcept {
  core::ErrorSlot found = first_length_error(params);
  if (found.code != 0) return found;
  const std::int64_t rows = core::append_rows(params);
  const auto each_row = [&](auto visit) {
    for (std::int64_t index = 0; index < rows && !core::is_set(cancel); ++index) {
      const core::AppendRow row = core::append_row(params, index);
      if (!row.skipped) visit(row);  // a varlen row may belong to no sequence
    }
  };
  each_row([&](const core::AppendRow& row) {
    if (found.code == 0) found = quantize_error(params.k, row, false, cancel);
    if (found.code == 0) found = quantize_error(params.v, row, true, cancel);
  });
  if (found.code != 0) return found;
  each_row([&](const core::AppendRow& row) {
    write_row(params.k, row, cancel);
    write_row(params.v, row, cancel);
  });
  return {};
}

}  // namespace flashcore::cpu
