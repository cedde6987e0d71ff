#include "verify/inputs/case.h"

#include <algorithm>
#include <cstdio>

#include "core/softcap.h"
#include "plan/planner.h"
#include "verify/inputs/case_sizes.h"
#include "verify/inputs/decimal.h"
#include "verify/inputs/random.h"

namespace flashcore::verify {
namespace {

// Streams of random numbers: pages, 8-bit types, kinds of sizes, masks, biases.
constexpr std::uint64_t kPages = 50, kStorage = 51, kSizes = 52, kTallMask = 53, kBlockMask = 54,
                        kAlignedBias = 55, kRepeatedBias = 56;

std::int64_t random_dim(Random& random, std::int64_t most) {
  static constexpr std::int64_t kUsual[] = {1,   2,   3,   4,   8,   16,  32,  40,
                                            48,  63,  64,  65,  72,  80,  96,  127,
                                            128, 129, 160, 192, 255, 256, 257, 576};
  for (int attempt = 0; attempt < 8; ++attempt) {
    const std::int64_t dim = random.pick(kUsual);
    if (dim <= most) return dim;
  }
  return random.between(1, most);
}

ScoreTensorSpec random_score_tensor(Random& random) {
  return {true, random.chance(0.5), random.chance(0.5), random.chance(0.7)};
}

MemoryLayout random_layout(Random& random) {
  if (random.chance(0.5)) return MemoryLayout::heads_first;
  return static_cast<MemoryLayout>(random.below(kMemoryLayouts));
}

void draw_options(Random& random, const KernelInfo& kernel, CaseSpec& s) {
  Options& o = s.options;
  o.causal = random.chance(0.4);
  const auto window = [&] {  // half of the windows hide whole KV tiles
    return random.between(0, random.chance(0.5) ? s.kv_len : std::min<std::int64_t>(s.kv_len, 16));
  };
  if (random.chance(0.25)) o.window_left = window();
  if (random.chance(0.15)) o.window_right = window();
  if (random.chance(0.2)) {
    static constexpr double kScales[] = {0.0, -0.125, 0.3, 1.0, -1.0};
    o.scale = random.pick(kScales);
  }
  if (random.chance(0.2)) {
    static constexpr double kCaps[] = {0.5, 5.0, 30.0, 50.0, 1000.0, 1e6, 1e30};
    o.softcap = random.pick(kCaps);
  }
  if (random.chance(0.2)) s.bias = random_score_tensor(random);
  s.bias_f32 = random.chance(0.5);
  s.bias_has_infinities = random.chance(0.3);
  if (random.chance(0.2)) s.mask = random_score_tensor(random);
  if (random.chance(0.2)) s.alibi = static_cast<int>(random.between(1, 2));
  s.sinks = random.chance(0.2);
  s.lse = random.chance(0.7);
  if (random.chance(0.1)) o.partial = s.lse = true;
  s.out_f32 = !o.partial && s.dtype != DType::f32 && random.chance(0.15);
  s.q_varlen = random.chance(0.2);
  s.kv_varlen = random.chance(0.2);
  s.used_k = random.chance(0.15);
  s.q_start = random.chance(0.2);
  s.k_start = random.chance(0.15);
  if (random.chance(0.3)) o.num_splits = static_cast<std::int32_t>(random.between(1, 5));
  if (o.num_splits <= 1 && random.chance(0.15)) {
    o.reproducibility = Reproducibility::batch_invariant;
  }
  o.checked = random.chance(0.1);
  o.kernel = kernel.id;
  s.q_layout = random_layout(random);
  s.k_layout = random_layout(random);
  s.v_layout = random_layout(random);
  s.out_layout = random_layout(random);
  s.shared_kv = !s.kv_varlen && random.chance(0.05);
  s.non_finite = random.chance(0.04);
}

/// Paged KV with any page size.
void draw_pages(Random random, CaseSpec& s) {
  if (s.kv_varlen || s.shared_kv || !random.chance(0.3)) return;
  static constexpr std::int64_t kUsual[] = {1, 2, 3, 7, 8, 16, 16, 17, 64, 100, 128, 255, 256};
  s.page_size = random.chance(0.7) ? random.pick(kUsual) : random.between(1, 256);
  s.shared_pages = random.chance(0.3);
  // Without used_k all pages are full. If that adds many keys, uses used_k.
  const std::int64_t full = (s.kv_len + s.page_size - 1) / s.page_size * s.page_size;
  if (random.chance(0.5) || full > s.kv_len + s.kv_len / 2) s.used_k = true;
  if (!s.used_k) s.kv_len = full;
}

/// A block mask instead of a boolean mask.
void draw_block_mask(Random random, CaseSpec& s) {
  if (!random.chance(s.mask.given ? 0.3 : 0.15)) return;
  static constexpr std::int64_t kQueries[] = {16, 32, 64, 128}, kKeys[] = {32, 64, 128, 256};
  s.mask = random_score_tensor(random);
  s.mask_block_q = random.pick(kQueries);
  s.mask_block_k = random.pick(kKeys);
}

/// A bias that sm90 kernels copy to shared memory: 16 bits, aligned rows, and no other option that
/// changes scores. Few of the biases of draw_options() are like that.
void draw_aligned_bias(Random random, const KernelInfo& kernel, CaseSpec& s) {
  const bool copies =
      traits_of(kernel).loads == Loads::tma && any(kernel.features & Features::bias);
  if (!copies || !random.chance(0.15)) return;
  s.bias = random_score_tensor(random);
  s.bias_f32 = false;
  s.mask = {};
  s.alibi = 0;
  s.options.softcap = 0;
  if (s.page_size == 0) s.kv_len = (s.kv_len + 7) / 8 * 8;
}

/// A bias of gradients that all of several batch entries share: its gradient is a sum over them.
void draw_repeated_bias(Random random, CaseSpec& s) {
  if (!random.chance(0.25)) return;
  s.bias = random_score_tensor(random);
  s.bias.per_batch = false;
  s.batch = std::max<std::int64_t>(s.batch, 2);
}

/// 8-bit K and V, sometimes 8-bit Q.
void draw_storage(Random random, const KernelInfo& kernel, CaseSpec& s) {
  if (!takes_8_bits(kernel) || (!needs_8_bits(kernel) && !random.chance(0.35))) return;
  static constexpr DType kTypes[] = {DType::e4m3, DType::e5m2, DType::int8, DType::u8};
  s.k_storage = random.pick(kTypes);
  s.v_storage = random.chance(0.7) ? s.k_storage : random.pick(kTypes);
  if (s.dtype != DType::f32 && random.chance(0.5)) {
    s.q_storage = random.chance(0.7) ? s.k_storage : random.pick(kTypes);
    // With 8-bit q only a bf16 output selects a bf16 kernel.
    if (s.dtype == DType::bf16) s.out_f32 = s.options.partial = false;
  }
  for (ScaleKind* kind : {&s.q_scale, &s.k_scale, &s.v_scale}) {
    *kind = static_cast<ScaleKind>(random.below(4));
  }
  if (s.q_storage == DType::none) s.q_scale = ScaleKind::none;
  static constexpr std::int64_t kBlocks[] = {1, 3, 16, 64, 100, 128};
  s.options.q_scale_block = random.pick(kBlocks);
  s.options.kv_scale_block = random.pick(kBlocks);
}

/// Makes all inputs e4m3, and scale blocks as large as an fp8 kernel needs.
void fit_to_fp8(const KernelInfo& kernel, CaseSpec& s) {
  if (s.q_storage == DType::none) s.q_scale = s.k_scale;
  s.q_storage = s.k_storage = s.v_storage = DType::e4m3;
  std::int64_t& block = s.options.kv_scale_block;
  if (s.k_scale == ScaleKind::per_block) {
    block = (block + kMinKeysPerScale - 1) / kMinKeysPerScale * kMinKeysPerScale;
  }
  if (s.v_scale == ScaleKind::per_block) {
    block = (block + kernel.tile_k - 1) / kernel.tile_k * kernel.tile_k;
  }
}

/// Layouts that TMA can read: contiguous 16-byte rows without broadcasts.
void fit_to_tma(const KernelInfo& kernel, CaseSpec& s) {
  const std::int64_t elements = needs_e4m3(kernel) ? 16 : 8;  // of 16 bytes
  const auto padded = [&](std::int64_t dim) { return (dim + elements - 1) / elements * elements; };
  s.head_dim = padded(s.head_dim);
  s.v_dim = padded(s.v_dim);
  s.shared_kv = false;
  for (MemoryLayout* a : {&s.q_layout, &s.k_layout, &s.v_layout, &s.out_layout}) {
    if (*a == MemoryLayout::misaligned) *a = MemoryLayout::rows_first;
    if (*a == MemoryLayout::strided_columns) *a = MemoryLayout::padded;
  }
}

}  // namespace

void fit_to_kernel(const KernelInfo& kernel, CaseSpec& s) {
  const auto lacks = [&](Features feature) { return !any(kernel.features & feature); };
  if (uses_tensor_cores(traits_of(kernel)) && s.options.softcap > core::kLargestShortCap)
    s.options.softcap = 50;
  if (lacks(Features::softcap)) s.options.softcap = 0;
  if (lacks(Features::alibi)) s.alibi = 0;
  if (needs_8_bits(kernel) && s.k_storage == DType::none) {
    s.k_storage = s.v_storage = DType::e4m3;
    s.k_scale = s.v_scale = ScaleKind::per_head;
  }
  if (lacks(Features::batch_invariant_scales) && s.v_scale == ScaleKind::per_block &&
      s.options.reproducibility == Reproducibility::batch_invariant) {
    s.v_scale = ScaleKind::per_head;
  }
  if (needs_e4m3(kernel)) {
    fit_to_fp8(kernel, s);
    if (kernel.dtype != DType::f16) s.out_f32 = s.options.partial = false;  // f16 kernels store f32
  }
  if (lacks(Features::bias)) s.bias = {};
  if (lacks(Features::mask)) s.mask = {};
  if (!s.mask.given || kernel.op == Operation::bwd) s.mask_block_q = s.mask_block_k = 0;
  if (lacks(Features::paged)) {
    s.page_size = 0;
    s.shared_pages = false;
  }
  if (lacks(Features::num_splits)) s.options.num_splits = std::min(s.options.num_splits, 1);
  if (lacks(Features::f32_out)) s.out_f32 = false;
  if (lacks(Features::partial)) s.options.partial = false;
  if (lacks(Features::any_stride)) fit_to_tma(kernel, s);
}

double work_of(const CaseSpec& s) {
  return static_cast<double>(s.batch * s.q_heads) * static_cast<double>(s.q_len * s.kv_len) *
         static_cast<double>(s.head_dim + s.v_dim);
}

CaseSpec random_case(const KernelInfo& kernel, std::uint64_t seed, std::uint64_t index,
                     const CaseLimits& limits) {
  std::uint64_t stream = index;  // every kernel gets different problems
  for (const char* c = kernel.id; *c != '\0'; ++c) {
    stream = mix(stream ^ static_cast<unsigned char>(*c));
  }
  Random random(seed, stream);
  CaseSpec s;
  s.seed = random.bits();
  s.dtype = kernel.dtype;
  // Often the head dim of the kernel itself, so that every size class gets its largest dims.
  s.head_dim = random.chance(0.3) ? kernel.head_dim : random_dim(random, kernel.head_dim);
  s.v_dim = random.chance(0.6) ? std::min<std::int64_t>(s.head_dim, kernel.v_dim)
                               : random_dim(random, kernel.v_dim);
  const SizeKind kind = draw_size_kind(Random(s.seed, kSizes), kernel);
  draw_sizes(kind, random, kernel, limits.target_work, s);
  draw_options(random, kernel, s);
  if (kind == SizeKind::tall) draw_tall_mask(Random(s.seed, kTallMask), s);
  draw_pages(Random(s.seed, kPages), s);
  draw_storage(Random(s.seed, kStorage), kernel, s);
  draw_block_mask(Random(s.seed, kBlockMask), s);
  draw_aligned_bias(Random(s.seed, kAlignedBias), kernel, s);
  if (kind != SizeKind::boundary) {
    if (kernel.op == Operation::bwd) draw_repeated_bias(Random(s.seed, kRepeatedBias), s);
    drop_large_score_tensors(s);
  }

  static constexpr double kSigmas[] = {0.01, 1.0, 1.0, 10.0};
  s.sigma = random.pick(kSigmas);
  if (limits.sigma) s.sigma = *limits.sigma;
  if (limits.splits) {
    s.options.num_splits = *limits.splits;
    if (*limits.splits > 1) s.options.reproducibility = Reproducibility::deterministic;
  }
  fit_to_kernel(kernel, s);
  if (kernel.op == Operation::bwd) s.lse = true;
  return s;
}

std::vector<std::string> features(const CaseSpec& s) {
  std::vector<std::string> names;
  const auto add = [&](bool used, const char* name) {
    if (used) names.emplace_back(name);
  };
  const Options& o = s.options;
#define FLASHCORE_COVER_flag(name) add(o.name, #name);
#define FLASHCORE_COVER_window(name) add(o.name >= 0, #name);
#define FLASHCORE_COVER_f64(name) add(o.name != 0, #name);
#define FLASHCORE_COVER_optional_f64(name) add(o.name.has_value(), #name);
#define FLASHCORE_COVER_i64(name)
#define FLASHCORE_COVER_i32(name)
#define FLASHCORE_COVER_choice(name)
#define FLASHCORE_COVER_text(name)
#define FLASHCORE_OPTION(name, type, initial, least, wanted, role, word, doc) \
  FLASHCORE_COVER_##type(name)
#include "api/options.def"
  add(s.alibi == 1, "alibi");
  add(s.alibi == 2, "alibi_per_batch");
  add(s.bias.given, "bias");
  add(s.mask.given && s.mask_block_q == 0, "mask");
  add(s.mask_block_q > 0, "block_mask");
  add(s.sinks, "sinks");
  add(s.lse, "lse");
  add(o.num_splits > 1, "splits");
  add(s.q_varlen, "cu_seqlens_q");
  add(s.kv_varlen, "cu_seqlens_k");
  add(s.used_k, "seqused_k");
  add(s.page_size > 0, "pages");
  add(s.shared_pages, "shared_pages");
  add(s.q_start, "q_start");
  add(s.k_start, "k_start");
  add(s.q_heads > s.kv_heads, "gqa");
  add(s.v_dim != s.head_dim, "v_dim");
  add(s.out_f32, "out_f32");
  add(o.reproducibility == Reproducibility::batch_invariant, "batch_invariant");
  const auto has_layout = [&](MemoryLayout a) {
    return s.q_layout == a || s.k_layout == a || s.v_layout == a || s.out_layout == a;
  };
  add(has_layout(MemoryLayout::rows_first), "rows_first");
  add(has_layout(MemoryLayout::padded), "padded");
  add(has_layout(MemoryLayout::misaligned), "misaligned");
  add(has_layout(MemoryLayout::strided_columns), "strided_dim");
  add(s.shared_kv, "broadcast_kv");
  add(s.non_finite, "non_finite");
  add(s.k_storage != DType::none, "8bit_kv");
  add(s.q_storage != DType::none, "8bit_q");
  const auto scaled = [&](ScaleKind kind) {
    return s.q_scale == kind || s.k_scale == kind || s.v_scale == kind;
  };
  add(scaled(ScaleKind::per_tensor), "scale_per_tensor");
  add(scaled(ScaleKind::per_head), "scale_per_head");
  add(scaled(ScaleKind::per_block), "scale_per_block");
  return names;
}

std::string to_string(const CaseSpec& s) {
  std::string text = flashcore::to_string(s.dtype);
  if (s.k_storage != DType::none) {
    const DType q = s.q_storage == DType::none ? s.dtype : s.q_storage;
    text += std::string(" (q ") + flashcore::to_string(q) + ", k " +
            flashcore::to_string(s.k_storage) + ", v " + flashcore::to_string(s.v_storage) + ")";
  }
  text += " b" + decimal(s.batch) + " h" + decimal(s.q_heads) + "/" + decimal(s.kv_heads) + " q" +
          decimal(s.q_len) + " k" + decimal(s.kv_len) + " d" + decimal(s.head_dim) + "/" +
          decimal(s.v_dim) + " sigma ";
  char sigma[32];
  std::snprintf(sigma, sizeof sigma, "%g", s.sigma);
  text += sigma;
  if (s.page_size > 0) text += " page " + decimal(s.page_size);
  for (const std::string& name : features(s)) text += " " + name;
  return text;
}

}  // namespace flashcore::verify
