#include "api/mask_rows.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "core/mask.h"

namespace flashcore {
namespace {

void show_key(MaskWords row, std::int64_t key) {
  row[static_cast<std::size_t>(key / 32)] |= 1u << (key % 32);
}

/// Sets the bits of keys [begin, end), cut to [0, kv_len).
void show_keys(MaskWords row, std::int64_t begin, std::int64_t end, std::int64_t kv_len) {
  begin = std::max<std::int64_t>(begin, 0);
  end = std::min(end, kv_len);
  while (begin < end && begin % 32 != 0) show_key(row, begin++);
  for (; begin + 32 <= end; begin += 32) row[static_cast<std::size_t>(begin / 32)] = ~0u;
  while (begin < end) show_key(row, begin++);
}

class DocumentRows : public MaskRows {
 public:
  explicit DocumentRows(const BlockMaskSpec& spec) : spec_(spec) {}

  void read(std::int64_t b, std::int64_t, std::int64_t i, MaskWords row) override {
    const std::int64_t position = i + spec_.kv_len - spec_.q_len;
    if (position < 0) return;
    find_runs(b);
    const std::int64_t document = mask_value(spec_.values, b, position);
    if (document < 0) return;
    for (const core::KeyRange& run : runs_[document]) {
      show_keys(row, run.begin, run.end, spec_.kv_len);
    }
  }

 private:
  /// Intervals of keys of each document of sequence b.
  void find_runs(std::int64_t b) {
    if (b == sequence_) return;
    sequence_ = b;
    runs_.clear();
    for (std::int64_t j = 0; j < spec_.kv_len; ++j) {
      const auto key = static_cast<std::int32_t>(j);
      std::vector<core::KeyRange>& runs = runs_[mask_value(spec_.values, b, j)];
      if (runs.empty() || runs.back().end != key) runs.push_back({key, key});
      runs.back().end = key + 1;
    }
  }

  const BlockMaskSpec& spec_;
  std::int64_t sequence_ = -1;
  std::unordered_map<std::int64_t, std::vector<core::KeyRange>> runs_;
};

class PrefixRows : public MaskRows {
 public:
  explicit PrefixRows(const BlockMaskSpec& spec) : spec_(spec) {}
  void read(std::int64_t b, std::int64_t, std::int64_t i, MaskWords row) override {
    const TensorView& prefix = spec_.values;
    const std::int64_t length = mask_value(prefix, 0, prefix.shape[0] > 1 ? b : 0);
    show_keys(row, 0, std::max(length, i + spec_.kv_len - spec_.q_len + 1), spec_.kv_len);
  }

 private:
  const BlockMaskSpec& spec_;
};

class WindowRows : public MaskRows {
 public:
  explicit WindowRows(const BlockMaskSpec& spec) : spec_(spec) {}
  void read(std::int64_t, std::int64_t, std::int64_t i, MaskWords row) override {
    const BlockMaskSpec& s = spec_;
    const std::int64_t position = i + s.kv_len - s.q_len;
    const bool is_global = position >= 0 && position < s.global_tokens;
    // Windows wider than the sequence could overflow.
    const std::int64_t left = std::min(s.window_left, kMostPositions);
    const std::int64_t right = std::min(s.window_right, kMostPositions);
    const std::int64_t begin = is_global || left < 0 ? 0 : position - left;
    const std::int64_t end = is_global || right < 0 ? s.kv_len : position + right + 1;
    show_keys(row, begin, end, s.kv_len);
    show_keys(row, 0, s.global_tokens, s.kv_len);
  }

 private:
  const BlockMaskSpec& spec_;
};

class TreeRows : public MaskRows {
 public:
  explicit TreeRows(const BlockMaskSpec& spec) : spec_(spec) {}
  void read(std::int64_t b, std::int64_t, std::int64_t i, MaskWords row) override {
    const std::int64_t past = spec_.kv_len - spec_.q_len;
    show_keys(row, 0, past, spec_.kv_len);
    for (std::int64_t token = i; token >= 0; token = mask_value(spec_.values, b, token)) {
      show_key(row, past + token);
    }
  }

 private:
  const BlockMaskSpec& spec_;
};

class DenseRows : public MaskRows {
 public:
  explicit DenseRows(const BlockMaskSpec& spec) : dense_(spec.values) {}
  void read(std::int64_t b, std::int64_t h, std::int64_t i, MaskWords row) override {
    const TensorView& t = dense_;
    const std::uint8_t* from = static_cast<const std::uint8_t*>(t.data) + b * t.strides[0] +
                               h * t.strides[1] + i * t.strides[2];
    for (std::int64_t j = 0; j < t.shape[3]; ++j) {
      if (from[j * t.strides[3]] != 0) show_key(row, j);
    }
  }

 private:
  const TensorView& dense_;
};

}  // namespace

std::int64_t mask_value(const TensorView& t, std::int64_t b, std::int64_t i) {
  const std::int64_t offset = t.rank == 2 ? (t.shape[0] > 1 ? b * t.strides[0] : 0) : 0;
  return static_cast<const std::int32_t*>(t.data)[offset + i * t.strides[t.rank - 1]];
}

std::unique_ptr<MaskRows> mask_rows(const BlockMaskSpec& spec) {
  switch (spec.pattern) {
    case MaskPattern::documents: return std::make_unique<DocumentRows>(spec);
    case MaskPattern::prefix_lm: return std::make_unique<PrefixRows>(spec);
    case MaskPattern::sliding_window: return std::make_unique<WindowRows>(spec);
    case MaskPattern::tree: return std::make_unique<TreeRows>(spec);
    case MaskPattern::dense: return std::make_unique<DenseRows>(spec);
    case MaskPattern::bsr: break;
  }
  return nullptr;
}

}  // namespace flashcore
