// The .npy reader: accepted files, and the messages for rejected ones.
#include "data/npy.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <numeric>

#include "command_error.h"
#include "npy_bytes.h"

namespace flashcore::tool {
namespace {

std::string refusal(const std::vector<std::byte>& file, bool bf16 = false) {
  const Result<NpyArray> array = parse_npy(file, bf16);
  EXPECT_FALSE(array.ok());
  return array.ok() ? "" : array.status().message();
}

TEST(Npy, ReadsEveryVersion) {
  for (const int major : {1, 2, 3}) {
    const auto file = npy_bytes(npy_header("<f4", "(2, 3)"), 24, major);
    const Result<NpyArray> array = parse_npy(file);
    ASSERT_TRUE(array.ok()) << array.status().message();
    EXPECT_EQ(array->dtype, DType::f32);
    EXPECT_EQ(array->rank, 2);
    EXPECT_EQ(array->shape[0], 2);
    EXPECT_EQ(array->shape[1], 3);
    EXPECT_EQ(array->strides[0], 3);
    EXPECT_EQ(array->strides[1], 1);
    EXPECT_EQ(array->data.size(), 24u);
    EXPECT_EQ(array->data[5], std::byte{5});
  }
  EXPECT_NE(refusal(npy_bytes(npy_header("<f4", "(2, 3)"), 24, 4)).find("version"),
            std::string::npos);
}

TEST(Npy, ReadsEveryType) {
  const std::pair<const char*, DType> types[] = {
      {"<f2", DType::f16},     {"<f4", DType::f32},  {"=f8", DType::f64},
      {"<i4", DType::i32},     {"f4", DType::f32},   {"|b1", DType::boolean},
      {"|u1", DType::boolean}, {"<V2", DType::bf16}, {"|V2", DType::bf16}};
  for (const auto& [descr, dtype] : types) {
    const auto bytes = static_cast<std::size_t>(size_of(dtype));
    const Result<NpyArray> array = parse_npy(npy_bytes(npy_header(descr, "(1,)"), bytes));
    ASSERT_TRUE(array.ok()) << descr << ": " << array.status().message();
    EXPECT_EQ(array->dtype, dtype) << descr;
  }
  const auto two_bytes = npy_bytes(npy_header("<u2", "(1,)"), 2);
  EXPECT_NE(refusal(two_bytes).find("--dtype bf16"), std::string::npos);
  ASSERT_TRUE(parse_npy(two_bytes, true).ok());
  EXPECT_EQ(parse_npy(two_bytes, true)->dtype, DType::bf16);
}

TEST(Npy, ReadsFortranOrderAsStrides) {
  const auto file = npy_bytes(npy_header("<f4", "(2, 3, 4)", true), 96);
  const Result<NpyArray> array = parse_npy(file);
  ASSERT_TRUE(array.ok());
  EXPECT_EQ(array->strides[0], 1);
  EXPECT_EQ(array->strides[1], 2);
  EXPECT_EQ(array->strides[2], 6);
}

TEST(Npy, ReadsHeadersOfOtherWriters) {
  for (const char* header : {"{\"shape\": (3,), \"fortran_order\": False, \"descr\": \"<f4\"}",
                             "{ 'fortran_order' :False,'descr':'<f4','shape':(3L,),}      \n",
                             "\t{'descr':'<f4','fortran_order':False,'shape':(3)}\r\n"}) {
    const Result<NpyArray> array = parse_npy(npy_bytes(header, 12));
    EXPECT_TRUE(array.ok()) << header << ": " << array.status().message();
  }
}

TEST(Npy, ReadsEmptyArrays) {
  const Result<NpyArray> array = parse_npy(npy_bytes(npy_header("<f4", "(2, 0, 5)"), 0));
  ASSERT_TRUE(array.ok()) << array.status().message();
  EXPECT_TRUE(array->data.empty());
}

TEST(Npy, RejectsWithReasons) {
  const auto with = [](const std::string& header, std::size_t bytes) {
    return refusal(npy_bytes(header, bytes));
  };
  EXPECT_NE(refusal({}).find("not a .npy file"), std::string::npos);
  EXPECT_NE(with(npy_header("<f4", "(2, 3)"), 23).find("23 bytes"), std::string::npos);
  EXPECT_NE(with(npy_header("<f4", "(2, 3)"), 28).find("needs 6 elements"), std::string::npos);
  EXPECT_NE(with(npy_header(">f4", "(1,)"), 4).find("big-endian"), std::string::npos);
  EXPECT_NE(with(npy_header("<i8", "(1,)"), 8).find("int32"), std::string::npos);
  EXPECT_NE(with(npy_header("<c8", "(1,)"), 8).find("<c8"), std::string::npos);
  EXPECT_NE(with(npy_header("<f4", "()"), 4).find("single number"), std::string::npos);
  EXPECT_NE(with(npy_header("<f4", "(1,1,1,1,1)"), 4).find("dimensions"), std::string::npos);
  EXPECT_NE(with(npy_header("<f4", "(-1,)"), 4).find("extent"), std::string::npos);
  EXPECT_NE(with(npy_header("<f4", "(99999999999999999999,)"), 4).find("extent"),
            std::string::npos);
  EXPECT_NE(with(npy_header("<f4", "(2147483647, 2147483647, 2147483647)"), 4).find("memory"),
            std::string::npos);
  EXPECT_NE(with("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", 4)
                .find("structured"),
            std::string::npos);
  EXPECT_NE(with("{'descr': '<f4', 'shape': (1,)}", 4).find("lacks"), std::string::npos);
  EXPECT_NE(with("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", 4)
                .find("repeated"),
            std::string::npos);
  EXPECT_NE(with("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", 4).find("True"),
            std::string::npos);
  EXPECT_NE(with("[1]", 4).find("dictionary"), std::string::npos);
}

TEST(Npy, MessagesHaveNoControlCharacters) {
  const std::string message = refusal(npy_bytes(npy_header("<\033[2J", "(1,)"), 4));
  EXPECT_EQ(message.find('\033'), std::string::npos);
}

TEST(Npy, RejectsHeadersLongerThanTheFile) {
  auto file = npy_bytes(npy_header("<f4", "(1,)"), 4, 2);
  file[8] = file[9] = file[10] = file[11] = std::byte{0xff};
  EXPECT_NE(refusal(file).find("inside its header"), std::string::npos);
  file.resize(11);
  EXPECT_NE(refusal(file).find("inside its header"), std::string::npos);
}

TEST(Npy, RoundTripsEveryType) {
  for (const DType dtype :
       {DType::f64, DType::f32, DType::f16, DType::bf16, DType::i32, DType::boolean}) {
    std::vector<std::byte> data(static_cast<std::size_t>(24 * size_of(dtype)));
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7);
    const std::vector<std::byte> file = to_npy(view(data.data(), dtype, {2, 3, 4}));
    const Result<NpyArray> array = parse_npy(file);
    ASSERT_TRUE(array.ok()) << array.status().message();
    EXPECT_EQ(array->dtype, dtype);
    EXPECT_EQ(array->rank, 3);
    EXPECT_TRUE(std::equal(data.begin(), data.end(), array->data.begin(), array->data.end()));
    EXPECT_EQ((array->data.data() - file.data()) % 64, 0);
  }
}

TEST(Npy, WritesStridedTensorsInCOrder) {
  float data[12];
  std::iota(data, data + 12, 0.0f);
  const std::vector<std::byte> file =
      to_npy(swap_axes(view(data, DType::f32, {1, 3, 4}), 1, 2));  // transposed
  const Result<NpyArray> array = parse_npy(file);
  ASSERT_TRUE(array.ok());
  EXPECT_EQ(array->shape[1], 4);
  float second = 0;
  std::memcpy(&second, array->data.data() + sizeof second, sizeof second);
  EXPECT_EQ(second, 4.0f);
}

TEST(Npy, WritesATrailingCommaForOneDimension) {
  const float data[3] = {1, 2, 3};
  const std::vector<std::byte> file = to_npy(view(data, DType::f32, {3}));
  const std::string text(reinterpret_cast<const char*>(file.data()), file.size());
  EXPECT_NE(text.find("'shape': (3, ), "), std::string::npos);
}

TEST(Files, ThrowIfThePathIsInvalid) {
  EXPECT_THROW(read_file("/nonexistent/file.npy"), CommandError);
  EXPECT_THROW(write_file("/nonexistent/file.npy", {}), CommandError);
}

}  // namespace
}  // namespace flashcore::tool
