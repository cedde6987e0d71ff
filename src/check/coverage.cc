#include "check/coverage.h"

#include <algorithm>

#include "core/sm90_traits.h"
#include "plan/model/model.h"
#include "plan/planner.h"

namespace flashcore::verify {
namespace {

/// All names of features(), from two specs that use every option between them.
std::vector<std::string> all_features() {
  CaseSpec s;
  s.q_heads = 2;
  s.v_dim = s.head_dim + 1;
  s.options.causal = true;
  s.options.window_left = s.options.window_right = 0;
  s.options.scale = 1.0;
  s.options.softcap = 1.0;
  s.options.partial = s.options.checked = true;
  s.options.num_splits = 2;
  s.options.reproducibility = Reproducibility::batch_invariant;
  s.bias.given = s.mask.given = true;
  s.sinks = s.lse = s.out_f32 = true;
  s.q_varlen = s.kv_varlen = s.used_k = s.q_start = s.k_start = true;
  s.shared_kv = s.non_finite = true;
  s.page_size = 16;
  s.shared_pages = true;
  s.q_layout = MemoryLayout::rows_first;
  s.k_layout = MemoryLayout::padded;
  s.v_layout = MemoryLayout::misaligned;
  s.out_layout = MemoryLayout::strided_columns;
  s.q_storage = s.k_storage = s.v_storage = DType::e4m3;
  s.q_scale = ScaleKind::per_tensor;
  s.k_scale = ScaleKind::per_head;
  s.v_scale = ScaleKind::per_block;
  s.alibi = 1;
  std::vector<std::string> names = features(s);
  s.alibi = 2;
  s.mask_block_q = 16;
  for (const std::string& name : features(s)) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

/// Pairs of options that exclude each other.
constexpr std::pair<const char*, const char*> kExclusive[] = {
    {"alibi", "alibi_per_batch"},     {"mask", "block_mask"},
    {"partial", "out_f32"},            // a partial result is f32 anyway
    {"splits", "batch_invariant"},     // the mode fixes the splits
    {"cu_seqlens_k", "broadcast_kv"},  // varlen keys have no batch stride
    {"cu_seqlens_k", "pages"},         // and no pages
    {"cu_seqlens_k", "shared_pages"}, {"broadcast_kv", "pages"},
    {"broadcast_kv", "shared_pages"},
};

std::vector<std::int64_t> key_tiles(const KernelInfo& kernel) {
  if (kernel.device != DeviceType::cpu) return {kernel.tile_k};
  std::vector<std::int64_t> tiles;
  const bool backward = kernel.op == Operation::bwd;
  for (const CpuTuningRow& row : backward ? cpu_backward_tuning() : cpu_tuning(kernel.isa)) {
    tiles.push_back(row.tile_k);
  }
  return tiles;
}

std::string edge_name(const KernelInfo& kernel, const char* what, std::int64_t tile, int edge) {
  return std::string(kernel.id) + " " + what + " " + std::to_string(tile) +
         (edge < 0   ? "n-1"
          : edge > 0 ? "n+1"
                     : "n");
}

/// Distance (-1, 0 or 1) of `length` from a positive multiple of the tile; 2 if it is larger.
int edge_of(std::int64_t length, std::int64_t tile) {
  for (const int edge : {-1, 0, 1}) {
    const std::int64_t multiple = length - edge;
    if (multiple > 0 && multiple % tile == 0) return edge;
  }
  return 2;
}

struct NamedFact {
  const char* name;
  bool WorkFacts::*fact;
};
constexpr NamedFact kWorkFacts[] = {
    {"three tiles in a CTA", &WorkFacts::three_tiles},
    {"tiles without keys between tiles with keys", &WorkFacts::keyless_between},
    {"three tiles without keys after one with keys", &WorkFacts::three_keyless},
    {"a warpgroup without keys beside one with keys", &WorkFacts::idle_warpgroup},
};

/// Work facts are those of forward kernels. idle_warpgroup needs a tile of at least two warpgroups.
bool can_be(const NamedFact& fact, const KernelInfo& kernel) {
  return kernel.op == Operation::fwd && is_persistent(kernel) &&
         (fact.fact != &WorkFacts::idle_warpgroup || kernel.tile_q > core::kQTileRows);
}

std::string fact_name(const KernelInfo& kernel, const NamedFact& fact) {
  return std::string(kernel.id) + " " + fact.name;
}

/// Counts the possible names that are in `met`, and lists the others.
class Counting {
 public:
  explicit Counting(const std::set<std::string>& met) : met_(met) {}

  void count(const std::string& name) {
    ++result_.possible;
    if (met_.contains(name)) {
      ++result_.covered;
    } else {
      result_.missing.push_back(name);
    }
  }
  Covered result() { return std::move(result_); }

 private:
  const std::set<std::string>& met_;
  Covered result_;
};

}  // namespace

Coverage::Coverage(std::vector<const KernelInfo*> kernels) : kernels_(std::move(kernels)) {
  for (const KernelInfo* kernel : kernels_) problems_[kernel] = 0;
}

void Coverage::add(const CaseSpec& spec, const Plan& plan, const WorkFacts& facts) {
  ++problems_[plan.kernel];
  std::vector<std::string> names = features(spec);
  std::erase(names, "splits");
  if (plan.splits > 1) names.emplace_back("splits");
  std::sort(names.begin(), names.end());
  for (std::size_t i = 0; i < names.size(); ++i) {
    options_.insert(names[i]);
    for (std::size_t j = i + 1; j < names.size(); ++j) pairs_.insert({names[i], names[j]});
  }
  // A CPU tile of the forward contains the rows of a whole GQA group.
  const bool cpu = plan.kernel->device == DeviceType::cpu && plan.kernel->op == Operation::fwd;
  const std::int64_t group = spec.q_heads / std::max<std::int64_t>(spec.kv_heads, 1);
  const std::int64_t rows = cpu ? spec.q_len * group : spec.q_len;
  const auto note = [&](const char* what, std::int64_t length, std::int64_t tile) {
    const int edge = edge_of(length, tile);
    if (edge <= 1) edges_.insert(edge_name(*plan.kernel, what, tile, edge));
  };
  note("rows", rows, plan.tile_q);
  // used_k replaces kv_len by per-sequence lengths that are not in the spec.
  if (!spec.used_k) note("keys", spec.kv_len, plan.tile_k);
  for (const NamedFact& fact : kWorkFacts) {
    if (facts.*fact.fact) lists_.insert(fact_name(*plan.kernel, fact));
  }
}

std::vector<std::pair<const KernelInfo*, std::int64_t>> Coverage::per_kernel() const {
  std::vector<std::pair<const KernelInfo*, std::int64_t>> counts;
  for (const KernelInfo* kernel : kernels_) counts.emplace_back(kernel, problems_.at(kernel));
  return counts;
}

std::int64_t Coverage::fewest_per_kernel() const {
  std::int64_t fewest = kernels_.empty() ? 0 : problems_.at(kernels_.front());
  for (const KernelInfo* kernel : kernels_) fewest = std::min(fewest, problems_.at(kernel));
  return fewest;
}

bool Coverage::possible(const std::string& a, const std::string& b) const {
  const bool narrow_kernel =
      std::any_of(kernels_.begin(), kernels_.end(),
                  [](const KernelInfo* kernel) { return kernel->dtype != DType::f32; });
  if (!narrow_kernel && (a == "out_f32" || b == "out_f32")) return false;
  const auto have = [&](Features feature) {
    return std::any_of(kernels_.begin(), kernels_.end(),
                       [&](const KernelInfo* kernel) { return any(kernel->features & feature); });
  };
  const auto supported = [&](const std::string& name) {
    if (name == "splits") return have(Features::num_splits);
    if (name == "block_mask") {  // gradients take boolean masks
      return std::any_of(kernels_.begin(), kernels_.end(), [](const KernelInfo* kernel) {
        return kernel->op == Operation::fwd && any(kernel->features & Features::mask);
      });
    }
    if (name == "pages" || name == "shared_pages") return have(Features::paged);
    if (name.find("8bit_") != 0 && name.find("scale_per_") != 0) return true;
    return std::any_of(kernels_.begin(), kernels_.end(), [&](const KernelInfo* kernel) {
      return takes_8_bits(*kernel) && (name != "8bit_q" || kernel->dtype != DType::f32);
    });
  };
  if (!supported(a) || !supported(b)) return false;
  return std::none_of(std::begin(kExclusive), std::end(kExclusive), [&](const auto& pair) {
    return (a == pair.first && b == pair.second) || (a == pair.second && b == pair.first);
  });
}

Covered Coverage::options() const {
  Counting counting(options_);
  for (const std::string& name : all_features()) {
    if (possible(name, name)) counting.count(name);
  }
  return counting.result();
}

Covered Coverage::option_pairs() const {
  Covered result;
  std::vector<std::string> names = all_features();
  std::sort(names.begin(), names.end());
  for (std::size_t i = 0; i < names.size(); ++i) {
    for (std::size_t j = i + 1; j < names.size(); ++j) {
      if (!possible(names[i], names[j])) continue;
      ++result.possible;
      if (pairs_.contains({names[i], names[j]})) {
        ++result.covered;
      } else {
        result.missing.push_back(names[i] + "+" + names[j]);
      }
    }
  }
  return result;
}

Covered Coverage::tile_edges() const {
  Counting counting(edges_);
  for (const KernelInfo* kernel : kernels_) {
    for (const int edge : {-1, 0, 1}) {
      counting.count(edge_name(*kernel, "rows", kernel->tile_q, edge));
      for (const std::int64_t tile : key_tiles(*kernel)) {
        counting.count(edge_name(*kernel, "keys", tile, edge));
      }
    }
  }
  return counting.result();
}

Covered Coverage::work_lists() const {
  Counting counting(lists_);
  for (const KernelInfo* kernel : kernels_) {
    for (const NamedFact& fact : kWorkFacts) {
      if (can_be(fact, *kernel)) counting.count(fact_name(*kernel, fact));
    }
  }
  return counting.result();
}

}  // namespace flashcore::verify
