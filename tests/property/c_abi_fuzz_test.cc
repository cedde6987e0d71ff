// The C ABI under random and damaged calls: it never crashes, a refused call changes no memory, and
// an accepted call gives the right result. Seeds are fixed, so the case number in a failure message
// reproduces it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "property/fuzz_call.h"
#include "reference/oracle.h"
#include "support/call.h"
#include "support/fuzz_cases.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

constexpr std::uint64_t kSeed = 0xf1a5;
constexpr std::size_t kWorkspaceBytes = 2 << 20;

/// True if the values are small enough for f32 arithmetic. Damaged calls may read bits as another
/// type.
bool is_moderate(const Tensors& t, const Options& o) {
  if (o.scale.has_value() && std::fabs(*o.scale) > 10) return false;
  if (o.softcap != 0 && (o.softcap < 0.01 || o.softcap > 1e4)) return false;
  for (const TensorView* view : {&t.q, &t.k, &t.v, &t.bias, &t.alibi_slopes, &t.sinks}) {
    bool moderate = true;
    verify::for_each_element(*view, [&](std::int64_t at) {
      const double x = reference::element(view->data, view->dtype, at);
      moderate = moderate && std::fabs(x) <= 100;
    });
    if (!moderate) return false;
  }
  return true;
}

/// The library accepts a call without output elements and does not check its lengths. The oracle
/// trusts the lengths, so such a call is not compared.
bool has_elements(const TensorView& t) {
  std::int64_t count = 1;
  for (int i = 0; i < t.rank; ++i) count *= t.shape[i];
  return count > 0;
}

/// True if the arena differs from `before` only in elements of the outputs.
bool only_outputs_changed(Arena& arena, std::vector<std::byte> before, const Tensors& t) {
  for (const TensorView* view : {&t.out, &t.lse}) {
    if (!view->given()) continue;
    const auto size = static_cast<std::size_t>(size_of(view->dtype));
    const auto first = static_cast<std::size_t>(static_cast<std::byte*>(view->data) - arena.data());
    verify::for_each_element(*view, [&](std::int64_t at) {
      const std::size_t byte = first + static_cast<std::size_t>(at) * size;
      std::memcpy(before.data() + byte, arena.data() + byte, size);
    });
  }
  return arena == before;
}

std::string compare_with_oracle(const Tensors& tensors, const Options& options,
                                const char* kernel) {
  const Result<Problem> problem = make_problem(tensors, options);
  if (!problem.ok()) return "the C++ API refuses the call: " + problem.status().message();
  const reference::Oracle oracle =
      reference::compute(*problem, tensors, reference::all_rows(*problem, tensors), false, 1);
  const verify::Comparison c = verify::compare(
      oracle, *problem, tensors,
      verify::arithmetic_of(problem->out.dtype, find_kernel(kernel)->probability_dtype));
  return c.ok ? "" : verify::report(c);
}

TEST(CAbiFuzz, Attention) {
  Arena arena;
  FuzzCall call;
  WorkspaceMemory workspace(kWorkspaceBytes);
  flashcore_error error{};
  std::map<std::int32_t, int> outcomes;
  int compared = 0, not_called = 0;
  char text[256];
  FuzzCases fuzz(45000, 0.5, kSeed);
  while (fuzz.next()) {
    const int n = fuzz.number();
    verify::Random random(fuzz.seed(), static_cast<std::uint64_t>(n));
    draw_call(random, arena, call);
    call.params.workspace = workspace.get().data;
    call.params.workspace_bytes = kWorkspaceBytes;
    for (std::int64_t i = random.chance(0.25) ? 0 : random.between(1, 3); i > 0; --i) {
      damage(random, arena, call);
    }
    const std::vector<std::byte> before = arena.copy();
    flashcore_plan_info info{};
    info.struct_size = sizeof info;
    const std::int32_t planned = flashcore_plan(&call.params, &info, &error);
    ASSERT_EQ(error.code, planned) << "case " << n;
    if (n % 16 == 0) {
      const std::int32_t explained =
          flashcore_explain(&call.params, text, sizeof text, nullptr, nullptr);
      ASSERT_EQ(explained, planned) << "case " << n;
    }
    if (!call.fits(arena)) {
      ++not_called;
      continue;
    }
    const std::int32_t code = flashcore_attention(&call.params, &error);
    ++outcomes[code];
    ASSERT_EQ(error.code, code);
    ASSERT_NE(std::memchr(error.message, 0, sizeof error.message), nullptr);
    ASSERT_EQ(std::strlen(error.message) == 0, code == FLASHCORE_OK) << "case " << n;
    ASSERT_TRUE(planned == FLASHCORE_OK || planned == code) << "case " << n;
    if (code != FLASHCORE_OK) {
      ASSERT_TRUE(arena == before) << "case " << n << " was refused but wrote: " << error.message;
      continue;
    }
    if (n % 4 != 0) continue;
    const Tensors tensors = tensors_of(call);
    const Options options = options_of(call);
    ASSERT_TRUE(only_outputs_changed(arena, before, tensors)) << "case " << n;
    if (!has_elements(tensors.out) || !is_moderate(tensors, options)) continue;
    ASSERT_EQ(compare_with_oracle(tensors, options, info.kernel), "") << "case " << n;
    ++compared;
  }
  const int cases = fuzz.done();
  EXPECT_GT(outcomes[FLASHCORE_OK], cases / 5);
  EXPECT_GT(outcomes[FLASHCORE_INVALID_ARGUMENT], cases / 10);
  EXPECT_GT(outcomes[FLASHCORE_UNSUPPORTED], cases / 200);
  EXPECT_EQ(outcomes.size(), 3u) << "unexpected status code";
  EXPECT_GT(compared, cases / 20);
  EXPECT_LT(not_called, cases / 4);
  RecordProperty("accepted", outcomes[FLASHCORE_OK]);
  RecordProperty("compared", compared);
}

/// Computes the merge by its definition in f64. Returns an empty text if the result of the library
/// is within rounding of it.
std::string compare_merge(const FuzzMerge& merge) {
  const auto at = [](const flashcore_tensor& t, std::initializer_list<std::int64_t> index) {
    std::int64_t offset = 0, compact = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
      offset += index.begin()[i] * (t.strides != nullptr ? t.strides[i] : compact);
      compact *= t.shape[i];
    }
    const DType dtype = t.dtype.code == FLASHCORE_BFLOAT ? DType::bf16
                        : t.dtype.bits == 64             ? DType::f64
                        : t.dtype.bits == 32             ? DType::f32
                                                         : DType::f16;
    return reference::element(static_cast<std::byte*>(t.data) + t.byte_offset, dtype, offset);
  };
  const flashcore_tensor& out = *merge.params.out;
  const bool varlen = out.ndim == 3;
  const std::int64_t batch = varlen ? 1 : out.shape[0], heads = out.shape[1];
  const std::int64_t rows = out.shape[varlen ? 0 : 2], dim = out.shape[out.ndim - 1];
  const double unit = out.dtype.code == FLASHCORE_BFLOAT ? 0x1p-8
                      : out.dtype.bits == 16             ? 0x1p-11
                                                         : 0x1p-23;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < rows; ++i) {
        const auto lse_of = [&](const flashcore_tensor& t) {
          return varlen ? at(t, {h, i}) : at(t, {b, h, i});
        };
        double total = 0;
        if (merge.params.sinks != nullptr) total += std::exp(at(*merge.params.sinks, {h}));
        for (std::size_t p = 0; p < merge.params.parts; ++p)
          total += std::exp(lse_of(merge.params.lses[p]));
        for (std::int64_t c = 0; c < dim; ++c) {
          double want = 0, size = 0;
          const auto out_of = [&](const flashcore_tensor& t) {
            return varlen ? at(t, {i, h, c}) : at(t, {b, h, i, c});
          };
          for (std::size_t p = 0; p < merge.params.parts; ++p) {
            const double term =
                std::exp(lse_of(merge.params.lses[p])) / total * out_of(merge.params.outs[p]);
            want += term;
            size += std::fabs(term);
          }
          const double error = std::fabs(out_of(out) - want);
          if (!(error <= unit * std::fabs(want) + 32 * 0x1p-23 * size + 0x1p-24)) {
            return "out is " + std::to_string(out_of(out)) + ", expected " + std::to_string(want);
          }
        }
        if (merge.params.lse != nullptr &&
            !(std::fabs(lse_of(*merge.params.lse) - std::log(total)) < 1e-5)) {
          return "lse differs";
        }
      }
    }
  }
  return {};
}

TEST(CAbiFuzz, Merge) {
  Arena arena;
  FuzzMerge merge;
  flashcore_error error{};
  std::map<std::int32_t, int> outcomes;
  FuzzCases fuzz(10000, 0.15, kSeed + 1);
  while (fuzz.next()) {
    const int n = fuzz.number();
    verify::Random random(fuzz.seed(), static_cast<std::uint64_t>(n));
    draw_merge(random, arena, merge);
    const bool valid = random.chance(0.25);
    for (std::int64_t i = valid ? 0 : random.between(1, 3); i > 0; --i) damage(random, merge);
    merge.gather();
    if (!merge.fits(arena)) continue;
    const std::vector<std::byte> before = arena.copy();
    const std::int32_t code = flashcore_merge(&merge.params, &error);
    ++outcomes[code];
    ASSERT_EQ(error.code, code);
    if (code != FLASHCORE_OK) {
      ASSERT_TRUE(arena == before) << "case " << n << " was refused but wrote: " << error.message;
    } else if (valid) {
      ASSERT_EQ(compare_merge(merge), "") << "case " << n;
    }
  }
  const int cases = fuzz.done();
  EXPECT_GT(outcomes[FLASHCORE_OK], cases / 5);
  EXPECT_GT(outcomes[FLASHCORE_INVALID_ARGUMENT], cases / 10);
  EXPECT_EQ(outcomes.size(), 3u);  // the third is unsupported: dtypes and devices
}

TEST(CAbiFuzz, Append) {
  Arena arena;
  FuzzAppend append;
  WorkspaceMemory workspace(kWorkspaceHeaderBytes);
  flashcore_error error{};
  std::map<std::int32_t, int> outcomes;
  int wrote = 0;
  FuzzCases fuzz(15000, 0.2, kSeed + 3);
  while (fuzz.next()) {
    const int n = fuzz.number();
    verify::Random random(fuzz.seed(), static_cast<std::uint64_t>(n));
    draw_append(random, arena, append);
    const bool valid = random.chance(0.25);
    for (std::int64_t i = valid ? 0 : random.between(1, 3); i > 0; --i) {
      damage(random, arena, append);
    }
    if (random.chance(0.5)) {
      append.params.workspace = workspace.get().data;
      append.params.workspace_bytes = kWorkspaceHeaderBytes;
    }
    if (!append.fits(arena)) continue;
    const std::vector<std::byte> before = arena.copy();
    const std::int32_t code = flashcore_append(&append.params, &error);
    ++outcomes[code];
    ASSERT_EQ(error.code, code);
    if (valid) {
      ASSERT_EQ(code, FLASHCORE_OK) << "case " << n << ": " << error.message;
    }
    if (code != FLASHCORE_OK) {
      ASSERT_TRUE(arena == before) << "case " << n << " was refused but wrote: " << error.message;
      static_cast<void>(workspace_status(workspace.get()));
      continue;
    }
    wrote += arena == before ? 0 : 1;
    // All changed bytes are in the cache.
    std::vector<std::byte> expected = before;
    for (const flashcore_tensor* t : {append.params.k, append.params.v}) {
      TensorView cache = view(static_cast<std::byte*>(t->data) + t->byte_offset,
                              t->dtype.bits == 64   ? DType::f64
                              : t->dtype.bits == 32 ? DType::f32
                                                    : DType::f16,
                              {t->shape[0], t->shape[1], t->shape[2], t->shape[3]});
      if (t->strides != nullptr) std::copy_n(t->strides, 4, cache.strides);
      const auto size = static_cast<std::size_t>(size_of(cache.dtype));
      verify::for_each_element(cache, [&](std::int64_t at) {
        const auto first = static_cast<std::byte*>(cache.data) - arena.data();
        const std::size_t byte =
            static_cast<std::size_t>(first) + static_cast<std::size_t>(at) * size;
        std::memcpy(expected.data() + byte, arena.data() + byte, size);
      });
    }
    ASSERT_TRUE(arena == expected) << "case " << n << " wrote outside the cache";
  }
  const int cases = fuzz.done();
  EXPECT_GT(outcomes[FLASHCORE_OK], cases / 5);
  EXPECT_GT(wrote, cases / 6);
  EXPECT_GT(outcomes[FLASHCORE_INVALID_ARGUMENT], cases / 10);
  EXPECT_EQ(outcomes.size(), 3u);  // the third is unsupported: dtypes, devices and pages
}

TEST(CAbiFuzz, SmallFunctions) {
  WorkspaceMemory workspace(kWorkspaceHeaderBytes);
  flashcore_error error{};
  alignas(8) unsigned char bytes[sizeof(flashcore_params)];
  for (FuzzCases fuzz(5000, 0.05, kSeed + 2); fuzz.next();) {
    verify::Random random(fuzz.seed(), static_cast<std::uint64_t>(fuzz.number()));
    const auto any = [&] {
      return random.chance(0.5) ? static_cast<std::int32_t>(random.bits())
                                : static_cast<std::int32_t>(random.below(16));
    };
    ASSERT_NE(flashcore_status_name(any()), nullptr);
    flashcore_params_init(reinterpret_cast<flashcore_params*>(bytes),
                          static_cast<std::size_t>(random.below(sizeof bytes + 1)));
    const flashcore_device device = {any(), any()};
    const auto size = static_cast<std::size_t>(random.below(kWorkspaceHeaderBytes + 1));
    void* data = random.chance(0.2)
                     ? nullptr
                     : static_cast<char*>(workspace.get().data) + 8 * random.below(2);
    const std::int32_t init = flashcore_workspace_init(data, size, device, nullptr, &error);
    ASSERT_TRUE(init == FLASHCORE_OK || std::strlen(error.message) > 0);
    const std::int32_t status = flashcore_workspace_status(data, size, device, nullptr, &error);
    ASSERT_EQ(init == FLASHCORE_OK, status == FLASHCORE_OK) << error.message;
  }
}

}  // namespace
}  // namespace flashcore::test
