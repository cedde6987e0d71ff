// Ranks as threads of one process, with the three callbacks over queues in memory.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "flashcore/distributed.h"

namespace flashcore::test {

class ThreadComm {
 public:
  static constexpr std::int32_t kClosed = 7;  ///< what callbacks return once a rank has ended

  /// `headers` are the first all-gathers of each rank; sent() does not count them.
  explicit ThreadComm(std::int32_t ranks, std::int32_t headers = 1);
  /// Runs `body` on every rank and returns each result. A rank that returns early is closed: the
  /// others' callbacks then fail.
  std::vector<Status> run(const std::function<Status(const Comm&)>& body);
  /// Bytes that a rank sent to others, without headers, since the last run() began.
  std::int64_t sent(std::int32_t rank) const;
  /// The bytes of each callback of a rank, in order, as sent() counts them.
  const std::vector<std::int64_t>& messages(std::int32_t rank) const {
    return ends_[static_cast<std::size_t>(rank)].messages;
  }

 private:
  using Bytes = std::vector<std::byte>;
  /// The context of one rank's callbacks.
  struct End {
    ThreadComm* comm = nullptr;
    std::int32_t rank = 0;
    std::vector<std::int64_t> messages;
    std::int32_t headers_left = 0;
    bool closed = false;
  };

  /// A callback of a rank begins.
  static void count(End& end);
  void send(End& from, std::int32_t to, const void* data, std::size_t bytes);
  std::int32_t receive(End& to, std::int32_t from, void* data, std::size_t bytes);
  Comm comm_of(std::int32_t rank);

  std::vector<End> ends_;
  const std::int32_t headers_;
  std::map<std::pair<std::int32_t, std::int32_t>, std::deque<Bytes>> queues_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace flashcore::test
