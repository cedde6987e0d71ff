// Errors of merge(), through the C++ API and the C ABI.
#include <gtest/gtest.h>

#include <functional>

#include "support/draw.h"
#include "support/to_c.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

/// Two f32 partial results of shape [2, 3, 4, 5], with out, lse and sinks.
struct MergeCall {
  explicit MergeCall(bool packed = false) {
    Random random(2);
    const Shape out_shape = packed ? Shape{8, 3, 5} : Shape{2, 3, 4, 5};
    const Shape lse_shape = packed ? Shape{3, 8} : Shape{2, 3, 4};
    for (int i = 0; i < 2; ++i) {
      part_out[i] = draw_normal(random, DType::f32, out_shape);
      part_lse[i] = draw_normal(random, DType::f32, lse_shape);
      parts.push_back({part_out[i].view(), part_lse[i].view()});
    }
    out_tensor = Tensor(DType::f32, out_shape);
    lse_tensor = Tensor(DType::f32, lse_shape);
    out_tensor.fill_bits(verify::poison(DType::f32));
    lse_tensor.fill_bits(verify::poison(DType::f32));
    sinks_tensor = draw_normal(random, DType::f32, {3});
    out = out_tensor.view();
    lse = lse_tensor.view();
    sinks = sinks_tensor.view();
  }

  Tensor part_out[2], part_lse[2], out_tensor, lse_tensor, sinks_tensor;
  std::vector<PartialResult> parts;
  TensorView out, lse, sinks;
};

Status merge_cpp(const MergeCall& call) {
  return merge(call.parts, call.out, call.lse, call.sinks);
}

Status merge_c(const MergeCall& call) {
  std::vector<std::unique_ptr<CTensor>> owned;
  std::vector<flashcore_tensor> outs, lses;
  for (const PartialResult& part : call.parts) {
    owned.push_back(std::make_unique<CTensor>(part.out));
    outs.push_back(owned.back()->tensor);
    owned.push_back(std::make_unique<CTensor>(part.lse));
    lses.push_back(owned.back()->tensor);
  }
  const CTensor out(call.out), lse(call.lse), sinks(call.sinks);
  const flashcore_merge_params params = {sizeof params,
                                         outs.data(),
                                         lses.data(),
                                         outs.size(),
                                         call.out.given() ? &out.tensor : nullptr,
                                         call.lse.given() ? &lse.tensor : nullptr,
                                         call.sinks.given() ? &sinks.tensor : nullptr,
                                         nullptr,
                                         nullptr};
  flashcore_error error{};
  const std::int32_t code = flashcore_merge(&params, &error);
  return Status(static_cast<StatusCode>(code), error.message);
}

struct Row {
  const char* name;
  std::function<void(MergeCall&)> corrupt;
  std::vector<const char*> words;
};

const Row kRows[] = {
    {"a wrong part among many",
     [](MergeCall& c) {
       c.parts.resize(70, c.parts[0]);
       c.parts[69].out.shape[3] = 4;
     },
     {"parts[69].out", "4", "5"}},
    {"out overlaps a part among many",
     [](MergeCall& c) {
       c.parts.resize(70, c.parts[0]);
       c.out.data = c.parts[1].out.data;
     },
     {"out", "parts[1].out"}},
    {"out not given", [](MergeCall& c) { c.out = {}; }, {"out"}},
    {"out of rank 2", [](MergeCall& c) { c.out.rank = 2; }, {"out", "rank is 2", "4", "3"}},
    {"out of integers", [](MergeCall& c) { c.out.dtype = DType::i32; }, {"out", "i32"}},
    {"narrow parts", [](MergeCall& c) { c.parts[0].out.dtype = DType::f16; }, {"parts[0]", "f16"}},
    {"parts of two types",
     [](MergeCall& c) { c.parts[1].out.dtype = DType::f64; },
     {"parts[1].out", "f64", "f32"}},
    {"lse of another type", [](MergeCall& c) { c.lse.dtype = DType::f64; }, {"lse", "f64", "f32"}},
    {"a part's rank", [](MergeCall& c) { c.parts[1].out.rank = 3; }, {"parts[1].out", "rank is 3"}},
    {"a part's extent",
     [](MergeCall& c) { c.parts[1].out.shape[2] = 3; },
     {"parts[1].out", "3", "4"}},
    {"a part's lse extent",
     [](MergeCall& c) { c.parts[0].lse.shape[1] = 2; },
     {"parts[0].lse", "2", "3"}},
    {"a part's lse rank", [](MergeCall& c) { c.parts[0].lse.rank = 2; }, {"parts[0].lse", "2"}},
    {"lse extent", [](MergeCall& c) { c.lse.shape[0] = 1; }, {"lse", "1", "2"}},
    {"sinks length", [](MergeCall& c) { c.sinks.shape[0] = 2; }, {"sinks", "2", "3"}},
    {"sinks type", [](MergeCall& c) { c.sinks.dtype = DType::f16; }, {"sinks", "f16", "f32"}},
    {"null part", [](MergeCall& c) { c.parts[1].out.data = nullptr; }, {"parts[1].out", "null"}},
    {"null part lse",
     [](MergeCall& c) { c.parts[1].lse.data = nullptr; },
     {"parts[1].lse", "null"}},
    {"null out", [](MergeCall& c) { c.out.data = nullptr; }, {"out", "null"}},
    {"null lse", [](MergeCall& c) { c.lse.data = nullptr; }, {"lse", "null"}},
    {"null sinks", [](MergeCall& c) { c.sinks.data = nullptr; }, {"sinks", "null"}},
    {"misaligned out",
     [](MergeCall& c) { c.out.data = static_cast<char*>(c.out.data) + 2; },
     {"out", "aligned"}},
    {"negative stride",
     [](MergeCall& c) { c.parts[0].out.strides[0] = -60; },
     {"parts[0].out", "-60"}},
    {"negative extent", [](MergeCall& c) { c.out.shape[1] = -1; }, {"out", "-1"}},
    {"another device",
     [](MergeCall& c) {
       c.parts[1].lse.device = {DeviceType::cuda, 0};
     },
     {"parts[1].lse", "cuda"}},
    {"out overlaps itself", [](MergeCall& c) { c.out.strides[1] = 0; }, {"out", "overlap"}},
    {"lse overlaps itself", [](MergeCall& c) { c.lse.strides[2] = 0; }, {"lse", "overlap"}},
    {"out shares memory with a part",
     [](MergeCall& c) { c.out.data = c.parts[1].out.data; },
     {"out", "parts[1].out"}},
    {"lse shares memory with the lse of a part",
     [](MergeCall& c) { c.lse.data = c.parts[0].lse.data; },
     {"lse", "parts[0].lse"}},
    {"sinks share memory with out",
     [](MergeCall& c) { c.sinks.data = c.out.data; },
     {"out", "sinks"}},
    {"lse shares memory with out", [](MergeCall& c) { c.lse.data = c.out.data; }, {"lse", "out"}},
};

TEST(BadMerge, FailsAndWritesNothing) {
  for (const Row& row : kRows) {
    SCOPED_TRACE(row.name);
    for (const bool through_c : {false, true}) {
      MergeCall call;
      row.corrupt(call);
      const Status status = through_c ? merge_c(call) : merge_cpp(call);
      EXPECT_EQ(status.code(), StatusCode::invalid_argument) << status.message();
      if (!through_c || status.message().rfind("merge:", 0) == 0) {
        for (const char* word : row.words) {
          EXPECT_NE(status.message().find(word), std::string::npos)
              << "no \"" << word << "\" in: " << status.message();
        }
      }
      for (const Tensor* t : {&call.out_tensor, &call.lse_tensor}) {
        for (const std::uint64_t bits : t->bits()) ASSERT_EQ(bits, verify::poison(DType::f32));
      }
    }
  }
}

TEST(BadMerge, NoParts) {
  MergeCall call;
  const Status status = merge({}, call.out, call.lse, call.sinks);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find("0 parts"), std::string::npos) << status.message();
}

TEST(BadMerge, TheUnchangedCallIsValid) {
  for (const bool packed : {false, true}) {
    MergeCall cpp(packed), c(packed);
    ASSERT_TRUE(merge_cpp(cpp).ok());
    ASSERT_TRUE(merge_c(c).ok());
    FLASHCORE_EXPECT_SAME_BITS(cpp.out_tensor, c.out_tensor);
    FLASHCORE_EXPECT_SAME_BITS(cpp.lse_tensor, c.lse_tensor);
  }
}

TEST(BadMerge, EmptyTensorsAreValid) {
  for (int axis = 0; axis < 4; ++axis) {
    MergeCall call;
    call.sinks = {};
    for (TensorView* t : {&call.out, &call.parts[0].out, &call.parts[1].out}) t->shape[axis] = 0;
    if (axis < 3) {
      for (TensorView* t : {&call.lse, &call.parts[0].lse, &call.parts[1].lse}) t->shape[axis] = 0;
    } else {
      call.lse = {};  // out without columns is empty, its LSE is not
    }
    EXPECT_TRUE(merge_cpp(call).ok()) << axis << ": " << merge_cpp(call).message();
    EXPECT_TRUE(merge_c(call).ok()) << axis;
  }
}

TEST(BadMerge, NullStructsThroughC) {
  flashcore_error error{};
  EXPECT_EQ(flashcore_merge(nullptr, &error), FLASHCORE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("params"), std::string::npos);
  const MergeCall call;
  const CTensor part_out(call.parts[0].out), part_lse(call.parts[0].lse), out(call.out);
  const flashcore_merge_params good = {sizeof good, &part_out.tensor, &part_lse.tensor,
                                       1,           &out.tensor,      nullptr,
                                       nullptr,     nullptr,          nullptr};
  ASSERT_EQ(flashcore_merge(&good, nullptr), FLASHCORE_OK);
  const auto refused = [&](auto change, const char* word) {
    flashcore_merge_params params = good;
    change(params);
    EXPECT_EQ(flashcore_merge(&params, &error), FLASHCORE_INVALID_ARGUMENT);
    EXPECT_EQ(error.code, FLASHCORE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.message).find(word), std::string::npos) << error.message;
  };
  refused([](flashcore_merge_params& p) { p.struct_size -= 16; }, "struct_size");
  refused([](flashcore_merge_params& p) { p.struct_size += 8; }, "struct_size");
  refused([](flashcore_merge_params& p) { p.outs = nullptr; }, "outs");
  refused([](flashcore_merge_params& p) { p.lses = nullptr; }, "lses");
  refused([](flashcore_merge_params& p) { p.out = nullptr; }, "out");
  refused([](flashcore_merge_params& p) { p.parts = 0; }, "parts is 0");
  refused([](flashcore_merge_params& p) { p.parts = std::size_t{1} << 31; }, "parts is 2147483648");
}

}  // namespace
}  // namespace flashcore::test
