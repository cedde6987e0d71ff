// For tests of what only sm_90 has.
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
      GTEST_SKIP() << "this GPU is sm_" << capability << "; wgmma and TMA as used are of sm_90";
    }
  }
};

}  // namespace flashcore::gpu_test
