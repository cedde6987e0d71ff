// The search for races finds each missing barrier, in any order of the warps, and nothing else.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "emulator/unit/run_ptx.h"

namespace flashcore::emulator {
namespace {

constexpr int kSeeds = 10;

/// The kernel without the lines that contain `part`.
std::string without(const std::string& kernel, const std::string& part) {
  std::string rest;
  bool found = false;
  for (std::size_t at = 0; at < kernel.size();) {
    const std::size_t end = std::min(kernel.find('\n', at), kernel.size() - 1) + 1;
    const std::string line = kernel.substr(at, end - at);
    if (line.find(part) == std::string::npos) {
      rest += line;
    } else {
      found = true;
    }
    at = end;
  }
  EXPECT_TRUE(found) << part;
  return rest;
}

std::string report_of(const std::string& kernel, std::uint64_t seed) {
  std::vector<std::uint32_t> memory(256, 1);
  return run_ptx(kernel, memory, {.threads = 64, .seed = seed, .find_races = true});
}

void expect_none(const std::string& kernel) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) EXPECT_EQ(report_of(kernel, seed), "");
}
/// The accesses of a race come in either order.
void expect_race(const std::string& kernel, const std::string& what = "") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string report = report_of(kernel, seed);
    EXPECT_TRUE(report.starts_with("race: " + what)) << "seed " << seed << ": " << report;
  }
}

/// Every thread writes a word, and reads that of a thread of the other warp; twice.
const std::string kCtaBarrier = R"(
    shl.b32 %r1, %r0, 2;
    mov.u32 %r2, smem;
    add.u32 %r3, %r2, %r1;
    xor.b32 %r1, %r1, 128;
    add.u32 %r4, %r2, %r1;
    st.shared.u32 [%r3], %r0;
    bar.sync 0;  // first
    ld.shared.u32 %r5, [%r4];
    barrier.sync 1, 64;  // second
    st.shared.u32 [%r3], %r5;
)";

TEST(Races, BarriersOfTheCta) {
  expect_none(kCtaBarrier);
  expect_race(without(kCtaBarrier, "first"));
  expect_race(without(kCtaBarrier, "second"));
}

/// Both warps write the same value and read it back.
const std::string kSameValue = R"(
    mov.u32 %r1, smem;
    mov.u32 %r2, 7;
    st.shared.u32 [%r1], %r2;
    ld.shared.u32 %r3, [%r1];
    bar.sync 0;  // both
    st.shared.u32 [%r1], %r0;
)";

TEST(Races, WritesOfTheSameValue) {
  const std::string one_value = kSameValue.substr(0, kSameValue.find("bar.sync"));
  expect_none(one_value);
  expect_race(kSameValue);
}

/// Lane 0 writes what the other lanes of its warp read.
const std::string kWarp = R"(
    mov.u32 %r1, smem;
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra end;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 st.shared.u32 [%r1], %r0;
    bar.warp.sync 0xffffffff;
    ld.shared.u32 %r2, [%r1];
  end:
)";

TEST(Races, LanesOfAWarp) {
  expect_none(kWarp);
  expect_race(without(kWarp, "bar.warp.sync"));
}

/// Warp 0 hands a word to warp 1 eight times. Barriers: full at 0, empty at 8; one thread arrives
/// for its warp.
const std::string kHandOver = R"(
    mov.u32 %r1, smem;
    setp.ne.u32 %p0, %r0, 0;
    and.b32 %r8, %r0, 31;
    setp.ne.u32 %p4, %r8, 0;
    mov.u32 %r2, 1;
    @!%p0 mbarrier.init.shared::cta.b64 [%r1], %r2;
    @!%p0 mbarrier.init.shared::cta.b64 [%r1+8], %r2;
    bar.sync 0;
    mov.u32 %r3, 0;
    setp.ge.u32 %p1, %r0, 32;
  loop:
    and.b32 %r4, %r3, 1;
    xor.b32 %r5, %r4, 1;
    @%p1 bra consume;
  empty:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+8], %r5;
    @!%p2 bra empty;
    @!%p0 st.shared.u32 [%r1+16], %r3;
    @!%p0 mbarrier.arrive.shared::cta.b64 _, [%r1];
    bra.uni next;
  consume:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], %r4;
    @!%p3 bra consume;
    ld.shared.u32 %r6, [%r1+16];
    bar.warp.sync 0xffffffff;
    @!%p4 mbarrier.arrive.shared::cta.b64 _, [%r1+8];
  next:
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p3, %r3, 8;
    @%p3 bra loop;
)";

TEST(Races, Mbarriers) {
  expect_none(kHandOver);
  // The other lanes of the consumer may read after its arrival.
  expect_race(without(kHandOver, "bar.warp.sync"));
}

/// A bulk copy of 128 bytes to shared memory, which both warps then read and overwrite.
const std::string kBulkLoad = R"(
    mov.u32 %r1, smem;
    setp.ne.u32 %p0, %r0, 0;
    mov.u32 %r2, 1;
    @!%p0 mbarrier.init.shared::cta.b64 [%r1], %r2;
    bar.sync 0;
    add.u32 %r3, %r1, 128;
    mov.u32 %r4, 128;
    @!%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r4;
    @!%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd0], %r4, [%r1];
    mov.u32 %r5, 0;
  again:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r5;  // copied
    @!%p1 bra again;  // copied
    ld.shared.u32 %r6, [%r1+128];
    bar.sync 0;  // read
    @!%p0 st.shared.u32 [%r1+128], %r5;
)";

TEST(Races, BulkCopies) {
  expect_none(kBulkLoad);
  expect_race(without(kBulkLoad, "// copied"));
  expect_race(without(kBulkLoad, "// read"));
}

/// All threads write what thread 0 copies to global memory.
const std::string kBulkStore = R"(
    mov.u32 %r1, smem;
    setp.ne.u32 %p0, %r0, 0;
    shl.b32 %r2, %r0, 2;
    add.u32 %r3, %r1, %r2;
    st.shared.u32 [%r3], %r0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.u32 %r4, 256;
    @!%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], %r4;
    @!%p0 cp.async.bulk.commit_group;
    @!%p0 cp.async.bulk.wait_group 0;
)";

TEST(Races, WritesForTheAsyncProxy) {
  expect_none(kBulkStore);
  expect_race(without(kBulkStore, "fence.proxy"),
              "read by the async proxy after write, without fence");
  expect_race(without(kBulkStore, "bar.sync"));
}

/// A CTA of a cluster writes to the other one's shared memory.
const std::string kCluster = R"(
    mov.u32 %r1, smem;
    mov.u32 %r2, %cluster_ctarank;
    xor.b32 %r3, %r2, 1;
    shl.b32 %r4, %r0, 2;
    add.u32 %r1, %r1, %r4;
    mapa.shared::cluster.u32 %r5, %r1, %r3;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    st.shared::cluster.u32 [%r5], %r2;
    barrier.cluster.arrive;  // written
    barrier.cluster.wait;  // written
    ld.shared.u32 %r6, [%r1];
    barrier.cluster.arrive;
    barrier.cluster.wait;
)";

TEST(Races, Clusters) {
  for (const bool complete : {true, false}) {
    std::vector<std::uint32_t> memory(64);
    const std::string report =
        run_ptx(complete ? kCluster : without(kCluster, "// written"), memory,
                {.threads = 32, .ctas = 2, .cluster = 2, .find_races = true});
    EXPECT_EQ(report.find("race: ") != std::string::npos, !complete) << report;
  }
}

TEST(Races, AreNotSearchedForByDefault) {
  std::vector<std::uint32_t> memory(64);
  EXPECT_EQ(run_ptx(without(kWarp, "bar.warp.sync"), memory), "");
}

}  // namespace
}  // namespace flashcore::emulator
