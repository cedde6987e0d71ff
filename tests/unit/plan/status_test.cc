// Status, Result, views, names of enum values, fingerprints and kernel ids.
#include "flashcore/status.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "core/error.h"
#include "flashcore/attention.h"
#include "flashcore/plan.h"

namespace flashcore {
namespace {

TEST(Status, DefaultIsOk) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::ok);
  EXPECT_EQ(status.message(), "");
}

TEST(Status, FormatsItsMessage) {
  const Status status = invalid_argument("%s is %d; wanted %g", "x", 3, 2.5);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_EQ(status.message(), "x is 3; wanted 2.5");
  EXPECT_EQ(unsupported("no").code(), StatusCode::unsupported);
  EXPECT_EQ(error(StatusCode::cuda, "launch").code(), StatusCode::cuda);
  EXPECT_EQ(out_of_memory().code(), StatusCode::out_of_memory);
  EXPECT_EQ(out_of_memory().message(), "out of memory");
}

TEST(Status, LongMessagesAreTruncated) {
  const std::string long_text(5000, 'y');
  const Status status = invalid_argument("begins %s", long_text.c_str());
  EXPECT_EQ(status.message().substr(0, 9), "begins yy");
  EXPECT_GE(status.message().size(), 1000u);
  EXPECT_LT(status.message().size(), 1100u);
}

TEST(Result, HoldsAValueOrAStatus) {
  const Result<int> value = 7;
  ASSERT_TRUE(value.ok());
  EXPECT_EQ(*value, 7);
  EXPECT_EQ(value.value(), 7);
  EXPECT_TRUE(value.status().ok());
  const Result<int> failed = invalid_argument("bad");
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.status().message(), "bad");
  Result<std::string> text = std::string("a long string that owns memory of its own");
  EXPECT_EQ(text->size(), 41u);
  const std::string moved = std::move(text).value();
  EXPECT_EQ(moved, "a long string that owns memory of its own");
}

TEST(Names, AreDistinctAndNeverUnknown) {
  std::set<std::string> names;
  for (int code = 0; code <= 6; ++code) names.insert(to_string(static_cast<StatusCode>(code)));
  EXPECT_EQ(names.size(), 7u);
  EXPECT_EQ(names.count("unknown"), 0u);
  EXPECT_STREQ(to_string(static_cast<StatusCode>(99)), "unknown");
  names.clear();
  for (int dtype = 0; dtype <= 6; ++dtype) names.insert(to_string(static_cast<DType>(dtype)));
  EXPECT_EQ(names.size(), 7u);
  EXPECT_EQ(names.count("unknown"), 0u);
  EXPECT_STREQ(to_string(static_cast<DType>(99)), "unknown");
  names.clear();
  for (int isa = 0; isa <= 3; ++isa) names.insert(to_string(static_cast<Isa>(isa)));
  EXPECT_EQ(names.size(), 4u);
  EXPECT_STREQ(to_string(DeviceType::cpu), "cpu");
  EXPECT_STREQ(to_string(DeviceType::cuda), "cuda");
}

TEST(DTypes, HaveTheRightSizes) {
  EXPECT_EQ(size_of(DType::f64), 8);
  EXPECT_EQ(size_of(DType::f32), 4);
  EXPECT_EQ(size_of(DType::i32), 4);
  EXPECT_EQ(size_of(DType::f16), 2);
  EXPECT_EQ(size_of(DType::bf16), 2);
  EXPECT_EQ(size_of(DType::boolean), 1);
  EXPECT_EQ(size_of(DType::none), 0);
}

TEST(Views, CompactStridesAndSwappedAxes) {
  float data[2 * 3 * 4 * 5];
  const TensorView v = view(data, DType::f32, {2, 3, 4, 5});
  EXPECT_EQ(v.rank, 4);
  const std::int64_t wanted[] = {60, 20, 5, 1};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(v.strides[i], wanted[i]);
  const TensorView s = swap_axes(v, 1, 2);
  EXPECT_EQ(s.shape[1], 4);
  EXPECT_EQ(s.strides[1], 5);
  EXPECT_EQ(s.shape[2], 3);
  EXPECT_EQ(s.strides[2], 20);
  EXPECT_FALSE(TensorView{}.given());
  EXPECT_EQ(view(data, DType::f32, {1, 1, 1, 1, 1}).rank, TensorView::kMaxRank);
}

TEST(Library, VersionAndFingerprints) {
  EXPECT_STREQ(version(), FLASHCORE_VERSION);
  for (const char* family : {"", "cpu", "simt", "sm80", "sm90"}) {
    ASSERT_NE(source_fingerprint(family), nullptr) << family;
    EXPECT_GE(std::string(source_fingerprint(family)).size(), 12u);
  }
  EXPECT_STRNE(source_fingerprint(""), source_fingerprint("cpu"));
  EXPECT_STREQ(source_fingerprint("sm80_8bit"), source_fingerprint("sm80"));
  EXPECT_STREQ(source_fingerprint("sm90_e4m3"), source_fingerprint("sm90"));
  EXPECT_STREQ(source_fingerprint(nullptr), source_fingerprint(""));
  for (const char* unknown : {"sm123", "cpu_8bit", "sm80_e4m3", "tree"}) {
    EXPECT_EQ(source_fingerprint(unknown), nullptr) << unknown;
  }
}

TEST(Kernels, IdsAreUniqueAndFindable) {
  std::set<std::string> ids;
  for (const KernelInfo& kernel : kernels()) {
    EXPECT_TRUE(ids.insert(kernel.id).second) << kernel.id;
    EXPECT_EQ(find_kernel(kernel.id), &kernel);
    EXPECT_NE(source_fingerprint(kernel.family_name()), nullptr);
    if (kernel.isa == Isa::generic && kernel.device == DeviceType::cpu) {
      EXPECT_TRUE(kernel.compiled) << kernel.id << ": every build has the generic C++ kernel";
    }
  }
  EXPECT_EQ(find_kernel("nothing"), nullptr);
  EXPECT_EQ(find_kernel(nullptr), nullptr);
}

}  // namespace
}  // namespace flashcore
