// The C ABI: struct sizes, descriptors, status codes, the error buffer.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "support/draw.h"
#include "support/to_c.h"

namespace flashcore::test {
namespace {

/// A small valid call with its memory.
class CApi : public testing::Test {
 protected:
  CApi()
      : inputs_(make_inputs()),
        output_(make_output(inputs_)),
        call_(tensors_of(inputs_, output_.out, output_.lse), inputs_.options),
        workspace_(4 << 20) {
    call_.params.workspace = workspace_.get().data;
    call_.params.workspace_bytes = workspace_.get().bytes;
  }
  static Inputs make_inputs() {
    Random random(5);
    Inputs inputs = draw_inputs(random, *find_kernel("fwd_generic_f32"),
                                {.batch = 2, .q_heads = 2, .q_len = 3, .kv_len = 5});
    inputs.options.kernel = nullptr;
    return inputs;
  }
  std::int32_t attention() { return flashcore_attention(&call_.params, &error_); }
  bool message_has(const char* word) const {
    return std::string(error_.message).find(word) != std::string::npos;
  }
  void expect_refused(std::int32_t code, const char* word) {
    EXPECT_EQ(attention(), code) << error_.message;
    EXPECT_EQ(error_.code, code);
    EXPECT_TRUE(message_has(word)) << "no \"" << word << "\" in: " << error_.message;
  }
  CTensor& q() { return call_.tensors[0]; }

  Inputs inputs_;
  Output output_;
  CCall call_;
  WorkspaceMemory workspace_;
  flashcore_error error_{};
};

TEST_F(CApi, ReturnsTheResultOfTheCppApi) {
  ASSERT_EQ(attention(), FLASHCORE_OK) << error_.message;
  EXPECT_EQ(error_.code, FLASHCORE_OK);
  EXPECT_STREQ(error_.message, "");
  const Output want = attend(inputs_);
  FLASHCORE_EXPECT_SAME(output_, want);
}

TEST_F(CApi, ErrorMayBeNull) {
  EXPECT_EQ(flashcore_attention(&call_.params, nullptr), FLASHCORE_OK);
  call_.params.window_left = -7;
  EXPECT_EQ(flashcore_attention(&call_.params, nullptr), FLASHCORE_INVALID_ARGUMENT);
  EXPECT_EQ(flashcore_attention(nullptr, nullptr), FLASHCORE_INVALID_ARGUMENT);
  EXPECT_EQ(flashcore_plan(nullptr, nullptr, nullptr), FLASHCORE_INVALID_ARGUMENT);
  EXPECT_EQ(flashcore_explain(nullptr, nullptr, 0, nullptr, nullptr), FLASHCORE_INVALID_ARGUMENT);
  EXPECT_GE(flashcore_cuda_device_count(nullptr), 0);
}

TEST_F(CApi, RejectsStructSizesOfOtherVersions) {
  for (const std::size_t size : {std::size_t{0}, offsetof(flashcore_params, cancel) - 8,
                                 sizeof(flashcore_params) + 8, std::size_t(-1)}) {
    call_.params.struct_size = size;
    expect_refused(FLASHCORE_INVALID_ARGUMENT, "struct_size");
    EXPECT_TRUE(message_has(std::to_string(size).c_str()));
    EXPECT_TRUE(message_has(std::to_string(sizeof(flashcore_params)).c_str()));
    EXPECT_TRUE(message_has(flashcore_version()));
  }
  call_.params.struct_size = sizeof(flashcore_params);
  flashcore_plan_info info{};
  info.struct_size = sizeof info - 4;
  EXPECT_EQ(flashcore_plan(&call_.params, &info, &error_), FLASHCORE_INVALID_ARGUMENT);
  EXPECT_TRUE(message_has("info: struct_size"));
}

TEST_F(CApi, AcceptsStructsWithoutACancelFlag) {
  constexpr std::size_t kOlder = offsetof(flashcore_params, cancel);
  // Exact size: a sanitizer detects reads past it.
  const auto bytes = std::make_unique<unsigned char[]>(kOlder);
  auto* older = reinterpret_cast<flashcore_params*>(bytes.get());
  flashcore_params_init(older, kOlder);
  EXPECT_EQ(older->struct_size, kOlder);
  EXPECT_EQ(older->window_left, -1);
  call_.params.struct_size = kOlder;
  std::memcpy(bytes.get(), &call_.params, kOlder);
  ASSERT_EQ(flashcore_attention(older, &error_), FLASHCORE_OK) << error_.message;
  FLASHCORE_EXPECT_SAME(output_, attend(inputs_));
  // The memory after an older struct is not read.
  const std::int32_t set = 1;
  call_.params.cancel = &set;
  EXPECT_EQ(attention(), FLASHCORE_OK) << error_.message;
}

TEST_F(CApi, ASetFlagCancels) {
  const Output before = make_output(inputs_);
  const std::int32_t set = 1;
  call_.params.cancel = &set;
  expect_refused(FLASHCORE_CANCELLED, "cancel");
  FLASHCORE_EXPECT_SAME(output_, before);
  const std::int32_t clear = 0;
  call_.params.cancel = &clear;
  EXPECT_EQ(attention(), FLASHCORE_OK) << error_.message;
  EXPECT_STREQ(flashcore_status_name(FLASHCORE_CANCELLED), "cancelled");
}

TEST_F(CApi, InitSetsDefaultsWithinTheCallersStruct) {
  flashcore_params params;
  std::memset(&params, 0xab, sizeof params);
  flashcore_params_init(&params, sizeof params);
  EXPECT_EQ(params.struct_size, sizeof params);
  EXPECT_EQ(params.window_left, -1);
  EXPECT_EQ(params.window_right, -1);
  EXPECT_EQ(params.q, nullptr);
  EXPECT_EQ(params.has_scale, 0);
  EXPECT_EQ(params.workspace, nullptr);
  EXPECT_EQ(params.cancel, nullptr);
  // The struct of an older caller is shorter. Init stores its size and writes no byte after it.
  constexpr std::size_t kOlder = 64;
  unsigned char bytes[sizeof params];
  std::memset(bytes, 0xab, sizeof bytes);
  flashcore_params_init(reinterpret_cast<flashcore_params*>(bytes), kOlder);
  std::size_t size = 0;
  std::memcpy(&size, bytes, sizeof size);
  EXPECT_EQ(size, kOlder);
  for (std::size_t i = sizeof size; i < kOlder; ++i) EXPECT_EQ(bytes[i], 0);
  for (std::size_t i = kOlder; i < sizeof bytes; ++i) ASSERT_EQ(bytes[i], 0xab);
  // A size smaller than the first field.
  std::memset(bytes, 0xab, sizeof bytes);
  flashcore_params_init(reinterpret_cast<flashcore_params*>(bytes), 3);
  for (std::size_t i = 3; i < sizeof bytes; ++i) ASSERT_EQ(bytes[i], 0xab);
  flashcore_params_init(nullptr, sizeof params);
}

TEST_F(CApi, NullStridesAreCompact) {
  ASSERT_EQ(attention(), FLASHCORE_OK);
  const Tensor want = output_.out;
  output_.out.fill(0);
  for (CTensor& t : call_.tensors) t.tensor.strides = nullptr;
  ASSERT_EQ(attention(), FLASHCORE_OK) << error_.message;
  FLASHCORE_EXPECT_SAME_BITS(output_.out, want);
}

TEST_F(CApi, ByteOffsetsAreAdded) {
  ASSERT_EQ(attention(), FLASHCORE_OK);
  const Tensor want = output_.out;
  output_.out.fill(0);
  for (CTensor& t : call_.tensors) {
    if (t.tensor.data == nullptr) continue;
    t.tensor.data = static_cast<char*>(t.tensor.data) - 4096;
    t.tensor.byte_offset = 4096;
  }
  ASSERT_EQ(attention(), FLASHCORE_OK) << error_.message;
  FLASHCORE_EXPECT_SAME_BITS(output_.out, want);
  q().tensor.data = nullptr;  // an offset does not make a null pointer valid
  expect_refused(FLASHCORE_INVALID_ARGUMENT, "null");
}

TEST_F(CApi, DescriptorsAreChecked) {
  for (const std::int32_t ndim : {-1, 0, 5, 1000}) {
    q().tensor.ndim = ndim;
    expect_refused(FLASHCORE_INVALID_ARGUMENT, "q: ndim");
    EXPECT_TRUE(message_has(std::to_string(ndim).c_str()));
  }
  q().tensor.ndim = 4;
  q().tensor.shape = nullptr;
  expect_refused(FLASHCORE_INVALID_ARGUMENT, "q: shape is NULL");
  q().tensor.shape = q().shape;
  q().shape[0] = q().shape[1] = q().shape[2] = std::int64_t{1} << 40;
  q().tensor.strides = nullptr;
  expect_refused(FLASHCORE_INVALID_ARGUMENT, "q: the shape overflows");
}

TEST_F(CApi, DtypeCodes) {
  struct Row {
    flashcore_dtype dtype;
    const char* becomes;  // q's type in the message about k, which stays f32; null: unknown
  };
  const Row rows[] = {{{FLASHCORE_FLOAT, 64, 1}, "wanted f64"},
                      {{FLASHCORE_FLOAT, 16, 1}, "wanted f16"},
                      {{FLASHCORE_BFLOAT, 16, 1}, "wanted bf16"},
                      {{FLASHCORE_INT, 32, 1}, "i32"},
                      {{FLASHCORE_BOOL, 8, 1}, "bool"},
                      {{FLASHCORE_UINT, 8, 1}, "q is byte"},
                      {{FLASHCORE_INT, 8, 1}, "q is int8"},
                      {{FLASHCORE_FLOAT8_E4M3, 8, 1}, "q is e4m3"},
                      {{FLASHCORE_FLOAT8_E5M2, 8, 1}, "q is e5m2"},
                      {{FLASHCORE_FLOAT8_E5M2, 16, 1}, nullptr},
                      {{FLASHCORE_FLOAT, 8, 1}, nullptr},
                      {{FLASHCORE_FLOAT, 32, 2}, nullptr},
                      {{FLASHCORE_INT, 64, 1}, nullptr},
                      {{FLASHCORE_BFLOAT, 32, 1}, nullptr},
                      {{3, 32, 1}, nullptr},
                      {{255, 255, 65535}, nullptr}};
  for (const Row& row : rows) {
    q().tensor.dtype = row.dtype;
    if (row.becomes != nullptr) {
      expect_refused(FLASHCORE_INVALID_ARGUMENT, row.becomes);
    } else {
      expect_refused(FLASHCORE_UNSUPPORTED, "q: dtype");
      EXPECT_TRUE(message_has(std::to_string(row.dtype.bits).c_str()));
    }
  }
}

TEST_F(CApi, DtypeErrorsOfOtherTensorsNameTheWantedType) {
  CTensor& lengths = q();  // the rank is wrong too, but types are checked first
  lengths.tensor.dtype = {FLASHCORE_INT, 64, 1};
  const std::pair<const flashcore_tensor**, const char*> rows[] = {
      {&call_.params.used_k, "seqused_k: dtype is int64; wanted i32 (int32)"},
      {&call_.params.block_table, "block_table: dtype is int64; wanted i32 (int32)"},
      {&call_.params.sinks, "sinks: dtype is int64; wanted f32"},
      {&call_.params.mask, "mask: dtype is int64; wanted bool"}};
  const flashcore_tensor* const real_q = call_.params.q;
  call_.params.q = call_.params.k;
  for (const auto& [field, words] : rows) {
    const flashcore_tensor* const before = *field;
    *field = real_q;
    expect_refused(FLASHCORE_INVALID_ARGUMENT, words);
    *field = before;
  }
}

TEST_F(CApi, DeviceCodes) {
  for (CTensor& t : call_.tensors) t.tensor.device = {3, 0};  // pinned host memory
  EXPECT_EQ(attention(), FLASHCORE_OK) << error_.message;
  for (const std::int32_t type : {0, 4, 7, -1, 1 << 20}) {
    q().tensor.device.device_type = type;
    expect_refused(FLASHCORE_UNSUPPORTED, "q: device type is");
    EXPECT_TRUE(message_has(std::to_string(type).c_str()));
  }
  q().tensor.device = {FLASHCORE_CUDA, 0};
  expect_refused(FLASHCORE_INVALID_ARGUMENT, "k: is on cpu:0, q is on cuda:0");
  flashcore_device nowhere = {77, 0};
  EXPECT_EQ(flashcore_workspace_init(call_.params.workspace, 1 << 20, nowhere, nullptr, &error_),
            FLASHCORE_UNSUPPORTED);
  EXPECT_EQ(flashcore_workspace_status(call_.params.workspace, 1 << 20, nowhere, nullptr, &error_),
            FLASHCORE_UNSUPPORTED);
}

TEST_F(CApi, FlagsAreZeroOrOne) {
  flashcore_params& p = call_.params;
  const std::pair<const char*, std::int32_t*> flags[] = {{"has_scale", &p.has_scale},
                                                         {"causal", &p.causal},
                                                         {"partial", &p.partial},
                                                         {"checked", &p.checked},
                                                         {"reproducibility", &p.reproducibility},
                                                         {"layout", &p.layout}};
  for (const auto& [name, flag] : flags) {
    for (const std::int32_t value : {2, -1}) {
      *flag = value;
      expect_refused(FLASHCORE_INVALID_ARGUMENT, name);
    }
    *flag = 0;
  }
  p.threads = -3;
  expect_refused(FLASHCORE_INVALID_ARGUMENT, "threads is -3");
  p.threads = 2;
  EXPECT_EQ(attention(), FLASHCORE_OK) << error_.message;
}

TEST_F(CApi, OptionsReachTheCall) {
  flashcore_params& p = call_.params;
  p.causal = 1;
  p.has_scale = 1;
  p.scale = -0.5;
  p.softcap = 3;
  p.num_splits = 2;
  p.window_left = 1;
  ASSERT_EQ(attention(), FLASHCORE_OK) << error_.message;
  inputs_.options = {
      .causal = true, .window_left = 1, .scale = -0.5, .softcap = 3, .num_splits = 2};
  const Output want = attend(inputs_);
  FLASHCORE_EXPECT_SAME(output_, want);
}

TEST_F(CApi, LayoutOneSwapsHeadsAndLengths) {
  for (int i = 0; i < 4; ++i) {  // q, k, v, out: the same memory in the other layout
    std::swap(call_.tensors[i].shape[1], call_.tensors[i].shape[2]);
    std::swap(call_.tensors[i].strides[1], call_.tensors[i].strides[2]);
  }
  call_.params.layout = 1;
  ASSERT_EQ(attention(), FLASHCORE_OK) << error_.message;
  const Output want = attend(inputs_);
  FLASHCORE_EXPECT_SAME(output_, want);
}

TEST_F(CApi, LongErrorsAreTruncatedAndTerminated) {
  const std::string name(5000, 'z');
  call_.params.kernel = name.c_str();
  std::memset(error_.message, 'Q', sizeof error_.message);
  expect_refused(FLASHCORE_INVALID_ARGUMENT, "kernel is \"zzz");
  EXPECT_EQ(std::strlen(error_.message), sizeof error_.message - 1);
}

TEST_F(CApi, PlanDescribesTheCall) {
  flashcore_plan_info info{};
  info.struct_size = sizeof info;
  call_.params.workspace = nullptr;  // not needed yet
  ASSERT_EQ(flashcore_plan(&call_.params, &info, &error_), FLASHCORE_OK) << error_.message;
  const Plan want = attend(inputs_).plan;
  EXPECT_STREQ(info.kernel, want.kernel->id);
  EXPECT_STREQ(info.family, "cpu");
  EXPECT_EQ(info.workspace_bytes, want.workspace_bytes);
  EXPECT_EQ(info.work_items, want.num_tiles);
  EXPECT_EQ(info.tile_q, want.tile_q);
  EXPECT_EQ(info.tile_k, want.tile_k);
  EXPECT_EQ(info.splits, want.splits);
  EXPECT_EQ(info.uses_header, 0);
  call_.params.checked = 1;
  ASSERT_EQ(flashcore_plan(&call_.params, &info, &error_), FLASHCORE_OK) << error_.message;
  EXPECT_EQ(info.uses_header, 1);
  EXPECT_EQ(flashcore_plan(&call_.params, nullptr, &error_), FLASHCORE_INVALID_ARGUMENT);
}

TEST_F(CApi, ExplainReturnsTheSizeItNeeds) {
  std::size_t needed = 0;
  ASSERT_EQ(flashcore_explain(&call_.params, nullptr, 0, &needed, &error_), FLASHCORE_OK);
  ASSERT_GT(needed, 100u);
  std::string text(needed, '#');
  ASSERT_EQ(flashcore_explain(&call_.params, text.data(), needed, nullptr, &error_), FLASHCORE_OK);
  EXPECT_EQ(text[needed - 1], '\0');
  EXPECT_EQ(std::strlen(text.c_str()), needed - 1);
  EXPECT_NE(text.find("kernel     fwd_"), std::string::npos);
  char little[11];
  std::memset(little, '#', sizeof little);
  ASSERT_EQ(flashcore_explain(&call_.params, little, 10, &needed, &error_), FLASHCORE_OK);
  EXPECT_EQ(std::strlen(little), 9u);
  EXPECT_EQ(little[10], '#');
  EXPECT_EQ(needed, text.size());
}

TEST_F(CApi, WorkspaceStatusReportsErrorsOfCheckedCalls) {
  const flashcore_device cpu = {FLASHCORE_CPU, 0};
  void* workspace = call_.params.workspace;
  const std::size_t bytes = call_.params.workspace_bytes;
  ASSERT_EQ(flashcore_workspace_init(workspace, bytes, cpu, nullptr, &error_), FLASHCORE_OK);
  EXPECT_EQ(flashcore_workspace_status(workspace, bytes, cpu, nullptr, &error_), FLASHCORE_OK);
  Tensor used = ints({5, 9});
  const CTensor used_k(used.view());
  call_.params.used_k = &used_k.tensor;
  call_.params.checked = 1;
  expect_refused(FLASHCORE_INVALID_ARGUMENT, "seqused_k[1] is 9");
  EXPECT_EQ(flashcore_workspace_status(workspace, bytes, cpu, nullptr, &error_),
            FLASHCORE_INVALID_ARGUMENT);
  EXPECT_TRUE(message_has("seqused_k[1] is 9"));
  EXPECT_EQ(flashcore_workspace_status(workspace, bytes, cpu, nullptr, &error_), FLASHCORE_OK);
}

TEST_F(CApi, NamesAndVersions) {
  EXPECT_STREQ(flashcore_status_name(FLASHCORE_OK), "ok");
  EXPECT_STREQ(flashcore_status_name(FLASHCORE_CUDA_ERROR), "cuda");
  EXPECT_STREQ(flashcore_status_name(-12345), "unknown");
  EXPECT_STREQ(flashcore_version(), version());
  EXPECT_STREQ(flashcore_source_fingerprint(nullptr), source_fingerprint(""));
  EXPECT_STREQ(flashcore_source_fingerprint("cpu"), source_fingerprint("cpu"));
  EXPECT_EQ(flashcore_source_fingerprint("no such family"), nullptr);
  const std::int32_t count = flashcore_cuda_device_count(&error_);
  EXPECT_EQ(count, cuda_availability().device_count);
  EXPECT_EQ(error_.code == FLASHCORE_OK, count > 0);
  EXPECT_EQ(std::strlen(error_.message) == 0, count > 0);
}

}  // namespace
}  // namespace flashcore::test
