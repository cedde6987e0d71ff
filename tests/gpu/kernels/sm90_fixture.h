// Fixture of the tests that need sm_90.
#pragma once

#include "gpu/support.h"

namespace flashcore::gpu_test {

class HopperTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    const int capability = require(device_info(kGpu)).compute_capability;
    if (capability != 90) {
      GTEST_SKIP() << "wgmma and TMA need sm_90; this GPU is sm_" << capability;
    }
  }
};

}  // namespace flashcore::gpu_test
