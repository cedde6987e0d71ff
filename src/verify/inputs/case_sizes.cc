#include "verify/inputs/case_sizes.h"

#include <algorithm>
#include <cmath>

#include "plan/model/model.h"
#include "plan/planner.h"

namespace flashcore::verify {
namespace {

constexpr double kUsualWork = 1 << 20;  // reference work of the shares below
constexpr std::int64_t kMostKeys = 20000;
constexpr std::int64_t kMostScoreElements = 1 << 21;

/// Frequency of each kind, its limit of elements of q and out (filling and comparing them dominates
/// the time), and the limit of keys per query of a large problem.
struct Share {
  double tall, large;
  double tall_elements, large_elements;
  double large_keys;
};
constexpr Share kPersistent{0.2, 0.01, 3 << 18, 1 << 23, 32};
constexpr Share kOther{0.04, 0.002, 1 << 17, 1 << 21, 8};

const Share& share_of(const KernelInfo& kernel) {
  return is_persistent(kernel) ? kPersistent : kOther;
}

std::int64_t key_tile(const KernelInfo& kernel, const CaseSpec& s) {
  if (kernel.device != DeviceType::cpu) return kernel.tile_k;
  if (kernel.op == Operation::bwd) return cpu_backward_tile_k(s.head_dim, s.v_dim);
  return cpu_tile_k(kernel.isa, s.head_dim, s.v_dim);
}

double log_uniform(Random& random, double low, double high) {
  return low * std::pow(high / low, random.uniform());
}

/// A small length, a multiple of the tile or one off, or any length up to `most`.
std::int64_t boundary_length(Random& random, std::int64_t tile, std::int64_t most) {
  most = std::max<std::int64_t>(most, 1);
  const double kind = random.uniform();
  std::int64_t length;
  if (kind < 0.15) {
    length = random.between(1, 4);
  } else if (kind < 0.75) {
    const std::int64_t multiples = std::max<std::int64_t>(most / tile, 1);
    length = tile * random.between(1, std::min<std::int64_t>(multiples, 4)) + random.between(-1, 1);
  } else {
    length = random.between(1, most);
  }
  return std::clamp<std::int64_t>(length, 1, most);
}

void draw_heads(Random& random, CaseSpec& s) {
  s.batch = random.chance(0.5) ? 1 : random.between(1, 4);
  s.kv_heads = random.chance(0.5) ? 1 : random.between(1, 3);
  static constexpr std::int64_t kGroups[] = {1, 1, 1, 2, 3, 4, 8};
  s.q_heads = s.kv_heads * random.pick(kGroups);
}

/// Log-uniform work around the target; q_len and kv_len share it, and one of them may be long.
void draw_boundary(Random& random, const KernelInfo& kernel, double target_work, CaseSpec& s) {
  const std::int64_t tile_k = key_tile(kernel, s);
  draw_heads(random, s);
  const double work = target_work * std::exp2(3.0 * random.uniform() - 1.2);
  const double pairs =
      std::max(1.0, work / static_cast<double>((s.head_dim + s.v_dim) * s.batch * s.q_heads));
  const bool decode = random.chance(0.15);
  const auto most_q = static_cast<std::int64_t>(decode ? 3 : std::sqrt(pairs) * 2);
  s.q_len = boundary_length(random, kernel.tile_q, most_q);
  const auto most_k = static_cast<std::int64_t>(pairs / static_cast<double>(s.q_len));
  s.kv_len = random.chance(0.4)
                 ? std::clamp<std::int64_t>(most_k, 1, kMostKeys)
                 : boundary_length(random, tile_k, std::min<std::int64_t>(most_k, kMostKeys));
  if (random.chance(0.4) && s.kv_len > tile_k) {  // end at a tile edge
    s.kv_len = s.kv_len / tile_k * tile_k + random.between(-1, 1);
  }
  if (random.chance(0.01)) s.kv_len = 0;
}

/// 4 to 9 query tiles, at most two KV tiles, and as many heads as the element limit allows.
void draw_tall(Random& random, const KernelInfo& kernel, double scale, CaseSpec& s) {
  draw_heads(random, s);
  s.q_len = kernel.tile_q * random.between(4, 9) + random.between(-1, 1);
  const std::int64_t most_k = std::min(2 * key_tile(kernel, s), s.q_len / 4);
  s.kv_len = random.chance(0.2) ? random.between(1, 2) : random.between(1, most_k);
  const double row_elements = static_cast<double>(s.head_dim + s.v_dim);
  const double rows = scale * share_of(kernel).tall_elements / row_elements;
  const auto too_many = [&] { return static_cast<double>(s.batch * s.q_heads * s.q_len) > rows; };
  if (too_many()) s.q_heads = s.kv_heads = 1;
  if (too_many()) s.batch = 1;
}

/// Many sequences or heads of any q_len, with few keys.
void draw_large(Random& random, const KernelInfo& kernel, double scale, CaseSpec& s) {
  constexpr double kLeastRows = 1e4, kMostRows = 1e5;
  const double row_elements = static_cast<double>(s.head_dim + s.v_dim);
  const double affordable = share_of(kernel).large_elements / row_elements;
  const double most_rows = std::clamp(affordable, 1.1 * kLeastRows, kMostRows);
  const double rows = scale * log_uniform(random, 1.01 * kLeastRows, most_rows);
  s.q_len = static_cast<std::int64_t>(log_uniform(random, 16, std::min(rows, 8192.0)));
  static constexpr std::int64_t kGroups[] = {1, 2, 4, 8};
  s.kv_heads = random.between(1, 4);
  s.q_heads = s.kv_heads * random.pick(kGroups);
  const std::int64_t sequences = static_cast<std::int64_t>(rows) / s.q_len + 1;
  if (s.q_heads > sequences) s.q_heads = s.kv_heads = 1;
  s.batch = (sequences + s.q_heads - 1) / s.q_heads;
  const double keys = share_of(kernel).large_keys * affordable / rows;
  s.kv_len = random.between(1, std::clamp<std::int64_t>(static_cast<std::int64_t>(keys), 1, 256));
}

}  // namespace

SizeKind draw_size_kind(Random random, const KernelInfo& kernel) {
  const Share& share = share_of(kernel);
  const double kind = random.uniform();
  if (kind < share.large) return SizeKind::large;
  return kind < share.large + share.tall ? SizeKind::tall : SizeKind::boundary;
}

void draw_sizes(SizeKind kind, Random& random, const KernelInfo& kernel, double target_work,
                CaseSpec& s) {
  const double scale = std::min(target_work / kUsualWork, 1.0);
  switch (kind) {
    case SizeKind::boundary: return draw_boundary(random, kernel, target_work, s);
    case SizeKind::tall: return draw_tall(random, kernel, scale, s);
    case SizeKind::large: return draw_large(random, kernel, scale, s);
  }
}

void draw_tall_mask(Random random, CaseSpec& s) {
  Options& o = s.options;
  const double kind = random.uniform();
  if (kind < 0.5) {
    o.causal = true;
    s.q_start = s.k_start = false;  // bottom-right alignment
  } else {
    o.causal = false;
    o.window_left = random.between(0, std::min<std::int64_t>(s.kv_len, 16));
    o.window_right = random.between(0, std::min<std::int64_t>(s.kv_len, 16));
    s.q_start = kind < 0.75;
  }
}

void drop_large_score_tensors(CaseSpec& s) {
  for (ScoreTensorSpec* tensor : {&s.bias, &s.mask}) {
    const double elements = static_cast<double>(tensor->per_batch ? s.batch : 1) *
                            static_cast<double>(tensor->per_head ? s.q_heads : 1) *
                            static_cast<double>(tensor->per_query ? s.q_len : 1) *
                            static_cast<double>(s.kv_len);
    if (elements > kMostScoreElements) *tensor = {};
  }
}

}  // namespace flashcore::verify
