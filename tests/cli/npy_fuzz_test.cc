// A bounded fuzz of the .npy reader. Every input ends its own allocation, so that a sanitizer sees
// the first byte that is read past it. Without a sanitizer, the test still compares an accepted
// array with the size of the file.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "data/npy.h"
#include "npy_bytes.h"
#include "support/rounds.h"
#include "verify/inputs/random.h"

namespace flashcore::tool {
namespace {

std::vector<std::vector<std::byte>> seeds() {
  return {npy_bytes(npy_header("<f4", "(2, 3)"), 24, 1),
          npy_bytes(npy_header("<f2", "(2, 2, 2, 2)", true), 32, 2),
          npy_bytes(npy_header("|b1", "(7,)"), 7, 3),
          npy_bytes(npy_header("<V2", "(3, 0)"), 0, 1),
          npy_bytes("{\"shape\": (5L,), \"descr\": \"<i4\", \"fortran_order\": True}", 20, 2),
          npy_bytes(npy_header("<f8", "(2147483647, 2147483647, 2147483647, 1)"), 8, 1)};
}

/// Tokens of a hostile header.
constexpr const char* kTokens[] = {"(",
                                   ")",
                                   ",",
                                   "{",
                                   "}",
                                   "'",
                                   ":",
                                   "<",
                                   ">",
                                   "f4",
                                   "True",
                                   "shape",
                                   "'descr': ",
                                   "L",
                                   "-1",
                                   "0",
                                   "99999",
                                   "4294967297",
                                   "18446744073709551615",
                                   "[",
                                   "\\",
                                   "\n",
                                   "V2",
                                   "()",
                                   "(1,",
                                   " "};

void mutate(verify::Random& random, std::vector<std::byte>& file) {
  const auto place = [&] {
    return static_cast<std::size_t>(random.below(static_cast<std::int64_t>(file.size()) + 1));
  };
  for (std::int64_t edits = random.between(1, 4); edits > 0; --edits) {
    const std::size_t at = place();
    const auto begin = file.begin() + static_cast<std::ptrdiff_t>(at);
    switch (random.below(5)) {
      case 0:  // change a byte
        if (at < file.size()) file[at] = static_cast<std::byte>(random.bits());
        break;
      case 1:  // truncate
        file.resize(at);
        break;
      case 2: {  // insert a token
        const std::string token = random.pick(kTokens);
        const auto* bytes = reinterpret_cast<const std::byte*>(token.data());
        file.insert(begin, bytes, bytes + token.size());
        break;
      }
      case 3:  // erase some bytes
        file.erase(begin,
                   begin + static_cast<std::ptrdiff_t>(std::min<std::size_t>(
                               static_cast<std::size_t>(random.between(1, 8)), file.size() - at)));
        break;
      default:  // change the length of the header
        if (file.size() > 11) {
          file[static_cast<std::size_t>(random.between(8, 11))] =
              static_cast<std::byte>(random.bits());
        }
    }
  }
}

/// Checks that an accepted array, with its strides, is exactly inside the file.
void check_inside(const NpyArray& array, const std::byte* file, std::size_t size) {
  ASSERT_GE(array.rank, 1);
  ASSERT_LE(array.rank, TensorView::kMaxRank);
  const auto element = static_cast<std::size_t>(size_of(array.dtype));
  ASSERT_GT(element, 0u);
  std::size_t count = 1, last = 0;
  for (int i = 0; i < array.rank; ++i) {
    ASSERT_GE(array.shape[i], 0);
    ASSERT_GT(array.strides[i], 0);
    count *= static_cast<std::size_t>(array.shape[i]);
    if (array.shape[i] > 0) {
      last += static_cast<std::size_t>((array.shape[i] - 1) * array.strides[i]);
    }
  }
  ASSERT_EQ(array.data.size(), count * element);
  ASSERT_LE(array.data.size(), size);
  if (count == 0) return;
  ASSERT_GE(array.data.data(), file);
  ASSERT_EQ(array.data.data() + array.data.size(), file + size);
  ASSERT_LT(last, count);
  volatile unsigned sum = 0;  // reads all bytes, for the sanitizer
  for (const std::byte b : array.data) sum = sum + static_cast<unsigned>(b);
}

TEST(NpyFuzz, AcceptsOrRejectsMutatedFiles) {
  const auto originals = seeds();
  const int inputs = test::rounds(400'000);
  int accepted = 0;
  for (int i = 0; i < inputs; ++i) {
    verify::Random random(20240, static_cast<std::uint64_t>(i));
    std::vector<std::byte> file = originals[static_cast<std::size_t>(
        random.below(static_cast<std::int64_t>(originals.size())))];
    mutate(random, file);
    const auto exact = std::make_unique<std::byte[]>(file.size());
    std::copy(file.begin(), file.end(), exact.get());
    const Result<NpyArray> array = parse_npy({exact.get(), file.size()}, random.chance(0.5));
    if (array.ok()) {
      ++accepted;
      check_inside(*array, exact.get(), file.size());
      if (HasFatalFailure()) FAIL() << "input " << i;
    } else {
      ASSERT_FALSE(array.status().message().empty()) << "input " << i;
    }
  }
  // The fuzz is useful only if some inputs get past the header.
  EXPECT_GT(accepted, inputs / 100);
  EXPECT_LT(accepted, inputs / 2);
}

TEST(NpyFuzz, AcceptsOrRejectsEveryPrefix) {
  for (const auto& file : seeds()) {
    for (std::size_t size = 0; size < file.size(); ++size) {
      const auto exact = std::make_unique<std::byte[]>(size);
      std::copy_n(file.begin(), size, exact.get());
      const Result<NpyArray> array = parse_npy({exact.get(), size});
      if (array.ok()) check_inside(*array, exact.get(), size);
    }
  }
}

}  // namespace
}  // namespace flashcore::tool
