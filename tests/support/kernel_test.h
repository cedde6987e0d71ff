// Fixture for tests that run once for each CPU kernel that this machine can execute.
#pragma once

#include <gtest/gtest.h>

#include "support/draw.h"

namespace flashcore::test {

class KernelTest : public testing::TestWithParam<const KernelInfo*> {
 protected:
  const KernelInfo& kernel() const { return *GetParam(); }
  DType dtype() const { return kernel().dtype; }

  /// Random numbers with a fixed seed: the same in every run.
  Random& random() { return random_; }

 private:
  Random random_{20240607};
};

inline std::string kernel_name(const testing::TestParamInfo<const KernelInfo*>& test) {
  return test.param->id;
}

}  // namespace flashcore::test

#define FLASHCORE_FOR_EACH_KERNEL(Suite)                                             \
  INSTANTIATE_TEST_SUITE_P(Kernels, Suite,                                           \
                           testing::ValuesIn(::flashcore::test::runnable_kernels()), \
                           ::flashcore::test::kernel_name)
