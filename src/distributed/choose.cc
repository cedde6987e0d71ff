// Chooses the scheme. The choice depends only on what all ranks know.
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "core/error.h"
#include "distributed/guarded.h"
#include "flashcore/distributed.h"

namespace flashcore {
namespace {

using ll = long long;

std::string scheme_reason(const char* format, std::int64_t a, std::int64_t b) {
  char text[256];
  std::snprintf(text, sizeof text, format, ll{a}, ll{b});
  return text;
}

/// The largest number of ranks of one machine that divides the KV heads.
std::int32_t most_head_ranks(std::int32_t ranks, std::int32_t node, std::int64_t kv_heads) {
  const std::int64_t common = std::gcd(std::int64_t{ranks}, kv_heads);
  for (std::int64_t count = std::min<std::int64_t>(common, node); count > 1; --count) {
    if (common % count == 0) return static_cast<std::int32_t>(count);
  }
  return 1;
}

Status check_heads(std::int64_t count, const DistributedProblem& p) {
  const bool divides =
      p.q_heads % count == 0 && (p.kv_heads % count == 0 || count % p.kv_heads == 0);
  if (divides) return {};
  return invalid_argument(
      "%lld ranks cannot divide %lld query heads and %lld KV heads evenly; use "
      "scheme=\"ring\", or as many ranks as divide both numbers",
      ll{count}, ll{p.q_heads}, ll{p.kv_heads});
}

bool has_window(const DistributedProblem& p) {
  return p.window_left >= 0 && (p.causal || p.window_right >= 0);
}

SchemeChoice best_scheme(const DistributedProblem& p, std::int32_t ranks) {
  if (ranks == 1) return {Scheme::gather, 1, "one rank sends nothing"};
  if (has_window(p)) {
    return {Scheme::halo, 1, "a window: each rank needs only the keys next to its rows"};
  }
  if (p.documents.size() > 2) {
    return {Scheme::gather, 1, "packed documents: one exchange, and one call over many documents"};
  }
  if (ranks <= p.ranks_per_node && p.kv_heads % ranks == 0) {
    return {
        Scheme::ulysses, ranks,
        scheme_reason("%lld ranks of one machine divide %lld KV heads: its bytes per row do not "
                      "grow with the number of ranks",
                      ranks, p.kv_heads)};
  }
  const std::int32_t count = most_head_ranks(ranks, p.ranks_per_node, p.kv_heads);
  if (ranks > p.ranks_per_node && count > 1) {
    return {Scheme::two_d, count,
            scheme_reason("several machines: %lld ranks divide the heads, so that a step between "
                          "machines has %lld times the work for the same bytes",
                          count, count)};
  }
  return {Scheme::ring, 1,
          scheme_reason("%lld KV heads cannot be divided by %lld ranks", p.kv_heads, ranks)};
}

Result<SchemeChoice> choice_of(const DistributedProblem& p) {
  const auto ranks = static_cast<std::int32_t>(p.q_rows.size());
  if (ranks < 1) return invalid_argument("ranks is %d; wanted 1 or more", ranks);
  if (p.kv_heads < 1 || p.ranks_per_node < 1) {
    return invalid_argument("kv_heads and ranks_per_node: wanted 1 or more");
  }
  const char* given = "given by the caller";
  switch (p.scheme) {
    case Scheme::automatic: return best_scheme(p, ranks);
    case Scheme::ulysses:
      FLASHCORE_RETURN_IF_ERROR(check_heads(ranks, p));
      return SchemeChoice{p.scheme, ranks, given};
    case Scheme::two_d: {
      const std::int32_t count =
          p.head_ranks == 0 ? most_head_ranks(ranks, p.ranks_per_node, p.kv_heads) : p.head_ranks;
      if (count < 1 || ranks % count != 0) {
        return invalid_argument("head_ranks is %d; wanted a divisor of the %d ranks", count, ranks);
      }
      FLASHCORE_RETURN_IF_ERROR(check_heads(count, p));
      return SchemeChoice{p.scheme, count, given};
    }
    case Scheme::halo:
      if (!has_window(p)) {
        return invalid_argument(
            "scheme is \"halo\", which needs a window: pass window=(left, "
            "right), or window=(left, -1) with causal=True");
      }
      return SchemeChoice{p.scheme, 1, given};
    case Scheme::ring:
    case Scheme::gather: return SchemeChoice{p.scheme, 1, given};
    case Scheme::decode:
      return invalid_argument(
          "scheme is \"decode\", which plans distributed_decode() and is no scheme of an "
          "attention");
  }
  return invalid_argument("scheme is %d; wanted 0 to 5", static_cast<int>(p.scheme));
}

}  // namespace

const char* to_string(Scheme scheme) noexcept {
  switch (scheme) {
    case Scheme::automatic: return "auto";
    case Scheme::ring: return "ring";
    case Scheme::gather: return "gather";
    case Scheme::ulysses: return "ulysses";
    case Scheme::two_d: return "2d";
    case Scheme::halo: return "halo";
    case Scheme::decode: return "decode";
  }
  return "unknown";
}

Result<SchemeChoice> choose_scheme(const DistributedProblem& problem) noexcept {
  return distributed::guarded<Result<SchemeChoice>>([&] { return choice_of(problem); });
}

}  // namespace flashcore
