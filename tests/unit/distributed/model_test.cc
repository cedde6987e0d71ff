// The choice of a scheme and the cost model.
#include <gtest/gtest.h>

#include <string>

#include "distributed/mask.h"
#include "flashcore/distributed.h"
#include "flashcore/distributed_c.h"

namespace flashcore {
namespace {

using distributed::Mask;
using distributed::Span;

DistributedProblem million(std::int32_t ranks) {
  DistributedProblem p;
  p.q_heads = 64, p.kv_heads = 8;
  p.causal = true;
  p.q_rows = p.k_rows = distributed_rows(1 << 20, ranks, Sharding::zigzag);
  return p;
}

TEST(DistributedModel, VisibleCountsPairs) {
  const std::vector<std::int64_t> docs = {0, 5, 12};
  for (const bool causal : {false, true}) {
    for (const auto& [left, right] : {std::pair{-1, -1}, {2, -1}, {1, 3}, {-1, 0}}) {
      const Mask mask{docs, docs, causal, left, causal ? 0 : right};
      for (const Span q : {Span{0, 4}, {3, 9}, {6, 12}}) {
        for (const Span k : {Span{0, 3}, {2, 11}, {7, 8}}) {
          std::int64_t pairs = 0;
          for (std::int64_t i = q.begin; i < q.end; ++i) {
            for (std::int64_t j = k.begin; j < k.end; ++j) {
              const bool same_document = (i < 5) == (j < 5);
              pairs += same_document && (mask.left < 0 || i - j <= mask.left) &&
                               (mask.right < 0 || j - i <= mask.right)
                           ? 1
                           : 0;
            }
          }
          EXPECT_EQ(mask.visible(q, k), pairs);
          EXPECT_EQ(mask.sees(q, k), pairs > 0);
        }
      }
    }
  }
}

TEST(DistributedModel, PlacementIsComplete) {
  for (const Sharding sharding : {Sharding::zigzag, Sharding::contiguous}) {
    for (const std::int64_t length : {0, 1, 7, 64, 1000003}) {
      for (const std::int32_t ranks : {1, 2, 3, 7}) {
        distributed::Spans all;
        for (const auto& spans : distributed::place(length, ranks, sharding)) {
          all.insert(all.end(), spans.begin(), spans.end());
        }
        EXPECT_EQ(distributed::rows_of(all), length);
        EXPECT_EQ(distributed::rows_of(distributed::joined(all)), length);
      }
    }
  }
}

TEST(DistributedModel, Choices) {
  const auto choice = [](const DistributedProblem& p) {
    const auto found = choose_scheme(p);
    return found.ok()
               ? std::string(to_string(found->scheme)) + " " + std::to_string(found->head_ranks)
               : found.status().message();
  };
  EXPECT_EQ(choice(million(8)), "ulysses 8");
  EXPECT_EQ(choice(million(64)), "2d 8");
  EXPECT_EQ(choice(million(3)), "ring 1");
  EXPECT_EQ(choice(million(1)), "gather 1");
  DistributedProblem p = million(8);
  p.documents = {0, 10, 1 << 20};
  EXPECT_EQ(choice(p), "gather 1");
  p = million(8);
  p.window_left = 128;
  EXPECT_EQ(choice(p), "halo 1");
  p = million(3);
  p.scheme = Scheme::ulysses;
  EXPECT_EQ(choice(p).rfind("3 ranks cannot divide 64 query heads and 8 KV heads", 0), 0u);
  p = million(8);
  p.scheme = Scheme::halo;
  EXPECT_NE(choice(p).find("needs a window"), std::string::npos);
  p.scheme = Scheme::two_d;
  p.head_ranks = 3;
  EXPECT_EQ(choice(p), "head_ranks is 3; wanted a divisor of the 8 ranks");
}

/// Work, bytes and the time over the work's own time, by hand.
TEST(DistributedModel, AMillionTokens) {
  DistributedProblem p = million(64);
  p.scheme = Scheme::ring;
  const auto plan = plan_distributed(p, {});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const std::int64_t n = (1 << 20) / 64;
  for (std::size_t r = 0; r < 64; ++r) {
    EXPECT_EQ(plan->forward.bytes[r], 63 * n * 4096);
    EXPECT_EQ(plan->backward.bytes[r], 63 * n * 4096 + 64 * n * 8192);
  }
  EXPECT_NEAR(plan->forward.work_s, 2.0 * 64 * 128 * 0x1p40 / 64 / 650e12, 1e-4);
  for (const auto& [ranks, slower] : {std::pair{8, 1.0}, {256, 1.0}, {512, 1.77}, {1024, 3.93}}) {
    p = million(ranks);
    p.scheme = Scheme::ring;
    const auto ring = plan_distributed(p, {});
    ASSERT_TRUE(ring.ok());
    EXPECT_NEAR(ring->forward.total_s() / ring->forward.work_s, slower, 0.02) << ranks;
  }
  const auto both = plan_distributed(million(1024), {});
  EXPECT_EQ(both->scheme, Scheme::two_d);
  EXPECT_LT(both->forward.total_s() / both->forward.work_s, 1.02);
}

TEST(DistributedModel, Links) {
  DistributedProblem p = million(8);
  p.scheme = Scheme::ring;
  ClusterSpeeds slow;
  slow.link = {1e6, 0};
  EXPECT_LT(plan_distributed(p, slow)->forward.hidden(), 0.5);
  EXPECT_EQ(plan_distributed(p, {})->forward.hidden(), 1.0);
  EXPECT_EQ(link_speed("ethernet")->bandwidth, 12.5e9);
  EXPECT_NE(link_speed("string").status().message().find("wanted one of nvlink, pcie"),
            std::string::npos);
  slow.link = {0, 0};
  EXPECT_EQ(plan_distributed(p, slow).status().message(),
            "link bandwidth is 0; wanted a positive number");
  ClusterSpeeds speeds;
  EXPECT_FALSE(set_device_speed(speeds, "abacus").ok());
  ASSERT_TRUE(set_device_speed(speeds, "a100").ok());
  EXPECT_EQ(speeds.forward_flops, 200e12);
}

TEST(DistributedModel, Text) {
  DistributedProblem p = million(8);
  p.scheme = Scheme::ring;
  const std::string text = explain(*plan_distributed(p, {}));
  for (const char* part :
       {"scheme    ring, zigzag, 8 ranks", "reason    given by the caller",
        "7 x ring step: 536,870,912 bytes", "100% of them hidden", "not measured"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST(DistributedModel, Decode) {
  DistributedProblem p;
  p.batch = 8, p.q_heads = 32, p.kv_heads = 8;
  p.scheme = Scheme::decode;
  p.q_rows.assign(16, 1);
  p.k_rows.assign(16, 4096);
  const auto plan = plan_distributed(p, {});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->forward.bytes[3], 15 * 8 * 32 * 129 * 4);
  EXPECT_DOUBLE_EQ(plan->forward.work_s, 8 * 4096 * 8 * 256 * 2 / 4.8e12);
  // 16 ranks are on two machines.
  EXPECT_DOUBLE_EQ(plan->forward.transfer_s(), 15 * 8 * 32 * 129 * 4 / 50e9 + 20e-6);
  EXPECT_EQ(plan->backward.transfer_s(), 0);
  EXPECT_EQ(sent_bytes(p, 0, true)->size(), 0u);
  p.q_rows[3] = 2;
  EXPECT_EQ(plan_distributed(p, {}).status().message(),
            "q_rows: differ between ranks; wanted the same new queries on every rank");
  p.q_rows[3] = 1;
  p.window_left = 4;
  EXPECT_FALSE(plan_distributed(p, {}).ok());
  EXPECT_NE(choose_scheme(p).status().message().find("is no scheme of an attention"),
            std::string::npos);
}

TEST(DistributedModel, CAbi) {
  flashcore_distributed_problem p{};
  p.struct_size = sizeof p;
  p.ranks = 4, p.ranks_per_node = 8;
  p.dtype = {FLASHCORE_BFLOAT, 16, 1};
  p.batch = 1, p.q_heads = p.kv_heads = 8, p.head_dim = p.v_dim = 64;
  p.window_left = p.window_right = -1;
  p.length = 100;
  p.link_bandwidth = p.net_bandwidth = 1e9;
  p.forward_flops = p.backward_flops = p.memory_bandwidth = 1e12;
  flashcore_error error{};
  std::int32_t scheme = 0, head_ranks = 0;
  char reason[256];
  ASSERT_EQ(flashcore_distributed_choose(&p, &scheme, &head_ranks, reason, sizeof reason, &error),
            FLASHCORE_OK)
      << error.message;
  EXPECT_EQ(scheme, FLASHCORE_SCHEME_ULYSSES);
  EXPECT_EQ(head_ranks, 4);
  std::size_t needed = 0;
  ASSERT_EQ(flashcore_distributed_plan(&p, 1, nullptr, 0, &needed, &error), FLASHCORE_OK);
  std::string json(needed, ' ');
  ASSERT_EQ(flashcore_distributed_plan(&p, 1, json.data(), needed, nullptr, &error), FLASHCORE_OK);
  for (const char* part :
       {"\"scheme\": \"ulysses\"", "\"sent\": [[[\"q, k, v by heads\", ", "\"text\": \"scheme"}) {
    EXPECT_NE(json.find(part), std::string::npos) << json;
  }
  p.ranks = 0;
  EXPECT_EQ(flashcore_distributed_plan(&p, -1, nullptr, 0, &needed, &error),
            FLASHCORE_INVALID_ARGUMENT);
  EXPECT_STREQ(error.message, "ranks is 0; wanted 1 to 1048576");
  p.struct_size -= 8;
  EXPECT_EQ(flashcore_distributed_choose(&p, &scheme, &head_ranks, nullptr, 0, &error),
            FLASHCORE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace flashcore
