// What the emulator reports, and asynchronous copies and barriers.
#include <gtest/gtest.h>

#include "emulator/unit/run_ptx.h"

namespace flashcore::emulator {
namespace {

using Words = std::vector<std::uint32_t>;

std::string report_of(const std::string& body, const SnippetOptions& options = {}) {
  Words memory(64);
  return run_ptx(body, memory, options);
}
void expect_in(const std::string& report, const std::string& part) {
  EXPECT_NE(report.find(part), std::string::npos) << report;
}

TEST(Faults, AccessesOutsideAnAllocation) {
  const std::string report = report_of("ld.global.u32 %r1, [%rd1+132];");
  expect_in(report, "outside every allocation");
  expect_in(report, "thread 31, PTX line 17: ld.global.u32");
  expect_in(report_of("mov.u32 %r1, smem; ld.shared.u32 %r2, [%r1+16384];"),
            "outside shared memory");
  expect_in(report_of("mov.u32 %r1, 0; ld.shared.u32 %r2, [%r1];"), "outside shared memory");
  expect_in(report_of("ld.global.u32 %r1, [%rd0+2];"), "misaligned access of 4 bytes");
}

TEST(Faults, Deadlocks) {
  // Warp 1 never arrives.
  const std::string report = report_of(R"(
    setp.ge.u32 %p0, %r0, 32;
    @%p0 bra wait;
    bar.sync 1, 64;
    bra.uni end;
  wait:
    bar.sync 2, 64;
  end:)",
                                       {.threads = 64});
  expect_in(report, "deadlock");
  expect_in(report, "warp 0 lanes ffffffff at PTX line 20: bar.sync");
  expect_in(report, "warp 1 lanes ffffffff at PTX line 23: bar.sync");
}

TEST(Faults, CollectivesWithoutTheirLanes) {
  expect_in(report_of(R"(
    setp.lt.u32 %p0, %r0, 16;
    @%p0 bra end;
    shfl.sync.bfly.b32 %r1, %r0, 1, 31, 65535;
  end:)"),
            "not in the member mask");
}

TEST(Faults, UnknownInstructions) {
  EXPECT_THROW(report_of("tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%rd0, {%r0}];"),
               std::runtime_error);
}

TEST(Async, CopiesArriveAtTheWait) {
  const std::string copy = R"(
    mov.u32 %r1, smem;
    shl.b32 %r2, %r0, 2;
    add.u32 %r1, %r1, %r2;
    cp.async.ca.shared.global [%r1], [%rd1], 4;
    cp.async.commit_group;)";
  const std::string read = "\nld.shared.u32 %r3, [%r1]; st.global.u32 [%rd1+128], %r3;";
  Words memory(64, 5);
  EXPECT_EQ(run_ptx(copy + "cp.async.wait_group 0;" + read, memory), "");
  EXPECT_EQ(memory[32 + 9], 5u);
  EXPECT_EQ(run_ptx(copy + "cp.async.wait_group 1;" + read, memory), "");
  EXPECT_EQ(memory[32 + 9], 0xffffffffu);  // poison: the copy is still in flight
}

/// Warp 0 hands 8 values to warp 1 through one word of shared memory and two mbarriers.
constexpr const char* kHandOver = R"(
    mov.u32 %r1, smem;
    setp.ne.u32 %p0, %r0, 0;
    mov.u32 %r2, 32;
    @!%p0 mbarrier.init.shared::cta.b64 [%r1], %r2;
    @!%p0 mbarrier.init.shared::cta.b64 [%r1+8], %r2;
    bar.sync 0;
    mov.u32 %r3, 0;
    mov.u32 %r7, 0;
    setp.ge.u32 %p1, %r0, 32;
  loop:
    and.b32 %r4, %r3, 1;
    xor.b32 %r5, %r4, 1;
    @%p1 bra consume;
  empty:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+8], %r5;
    @!%p2 bra empty;
    st.shared.u32 [%r1+16], %r3;
    mbarrier.arrive.shared::cta.b64 _, [%r1];
    bra.uni next;
  consume:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], %r4;
    @!%p2 bra consume;
    ld.shared.u32 %r6, [%r1+16];
    mad.lo.u32 %r7, %r7, 2, %r6;
    mbarrier.arrive.shared::cta.b64 _, [%r1+8];
  next:
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p3, %r3, 8;
    @%p3 bra loop;
    st.global.u32 [%rd1], %r7;)";

TEST(Async, MbarrierPhasesInAnyOrder) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Words memory(64);
    EXPECT_EQ(run_ptx(kHandOver, memory, {.threads = 64, .seed = seed}), "");
    EXPECT_EQ(memory[40], 247u);  // ((0 * 2 + 1) * 2 + 2) …
  }
}

TEST(Async, AMissingWaitShowsInSomeOrder) {
  std::string broken = kHandOver;
  const std::string wait = "    @!%p2 bra empty;\n";
  broken.erase(broken.find(wait), wait.size());
  const std::string try_wait = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+8], %r5;";
  broken.erase(broken.find(try_wait), try_wait.size());
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Words memory(64);
    wrong += run_ptx(broken, memory, {.threads = 64, .seed = seed}) != "" || memory[40] != 247u;
  }
  EXPECT_GT(wrong, 0);
}

TEST(Faults, AnMbarrierThatIsNotInitialised) {
  expect_in(report_of("mov.u32 %r1, smem; mbarrier.arrive.shared::cta.b64 _, [%r1];"),
            "not initialised");
}

}  // namespace
}  // namespace flashcore::emulator
