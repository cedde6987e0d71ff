#include "unit/distributed/thread_comm.h"

#include <cstring>
#include <numeric>
#include <thread>

namespace flashcore::test {

ThreadComm::ThreadComm(std::int32_t ranks, std::int32_t headers)
    : ends_(static_cast<std::size_t>(ranks)), headers_(headers) {
  for (std::int32_t r = 0; r < ranks; ++r) {
    ends_[static_cast<std::size_t>(r)].comm = this;
    ends_[static_cast<std::size_t>(r)].rank = r;
  }
}

std::int64_t ThreadComm::sent(std::int32_t rank) const {
  const auto& all = messages(rank);
  return std::accumulate(all.begin(), all.end(), std::int64_t{0});
}

void ThreadComm::count(End& end) {
  if (end.headers_left == 0) end.messages.push_back(0);
}

void ThreadComm::send(End& from, std::int32_t to, const void* data, std::size_t bytes) {
  if (bytes == 0) return;
  const auto* first = static_cast<const std::byte*>(data);
  const std::lock_guard lock(mutex_);
  queues_[{from.rank, to}].emplace_back(first, first + bytes);
  if (to != from.rank && from.headers_left == 0) {
    from.messages.back() += static_cast<std::int64_t>(bytes);
  }
  changed_.notify_all();
}

std::int32_t ThreadComm::receive(End& to, std::int32_t from, void* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  std::unique_lock lock(mutex_);
  std::deque<Bytes>& queue = queues_[{from, to.rank}];
  const End& peer = ends_[static_cast<std::size_t>(from)];
  changed_.wait(lock, [&] { return !queue.empty() || peer.closed; });
  if (queue.empty()) return kClosed;
  const Bytes message = std::move(queue.front());
  queue.pop_front();
  if (message.size() != bytes) return kClosed + 1;  // the ranks disagree about the size
  std::memcpy(data, message.data(), bytes);
  return 0;
}

Comm ThreadComm::comm_of(std::int32_t rank) {
  Comm comm;
  comm.context = &ends_[static_cast<std::size_t>(rank)];
  comm.rank = rank;
  comm.size = static_cast<std::int32_t>(ends_.size());
  comm.sendrecv = [](void* context, const void* send, std::size_t send_bytes, std::int32_t to,
                     void* recv, std::size_t recv_bytes, std::int32_t from, void*) {
    End& end = *static_cast<End*>(context);
    count(end);
    end.comm->send(end, to, send, send_bytes);
    return end.comm->receive(end, from, recv, recv_bytes);
  };
  comm.all_to_all = [](void* context, const void* send, const std::size_t* send_bytes, void* recv,
                       const std::size_t* recv_bytes, void*) {
    End& end = *static_cast<End*>(context);
    count(end);
    const auto ranks = static_cast<std::int32_t>(end.comm->ends_.size());
    const auto* from = static_cast<const std::byte*>(send);
    for (std::int32_t r = 0; r < ranks; from += send_bytes[r++]) {
      end.comm->send(end, r, from, send_bytes[r]);
    }
    auto* to = static_cast<std::byte*>(recv);
    std::int32_t code = 0;
    for (std::int32_t r = 0; r < ranks && code == 0; to += recv_bytes[r++]) {
      code = end.comm->receive(end, r, to, recv_bytes[r]);
    }
    return code;
  };
  comm.all_gather = [](void* context, const void* send, void* recv, const std::size_t* recv_bytes,
                       void*) {
    End& end = *static_cast<End*>(context);
    count(end);
    const auto ranks = static_cast<std::int32_t>(end.comm->ends_.size());
    for (std::int32_t r = 0; r < ranks; ++r) end.comm->send(end, r, send, recv_bytes[end.rank]);
    auto* to = static_cast<std::byte*>(recv);
    std::int32_t code = 0;
    for (std::int32_t r = 0; r < ranks && code == 0; to += recv_bytes[r++]) {
      code = end.comm->receive(end, r, to, recv_bytes[r]);
    }
    if (end.headers_left > 0) --end.headers_left;
    return code;
  };
  return comm;
}

std::vector<Status> ThreadComm::run(const std::function<Status(const Comm&)>& body) {
  std::vector<Status> results(ends_.size());
  queues_.clear();
  for (End& end : ends_) {
    end.closed = false, end.headers_left = headers_;
    end.messages.clear();
  }
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ends_.size(); ++r) {
    threads.emplace_back([&, r] {
      results[r] = body(comm_of(static_cast<std::int32_t>(r)));
      const std::lock_guard lock(mutex_);
      ends_[r].closed = true;
      changed_.notify_all();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

}  // namespace flashcore::test
