#include "distributed/engine.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace flashcore::distributed {
namespace {

constexpr std::size_t kHeaderFields = 32;

struct Header {
  std::int64_t count;  // of fields; -1: `text` is an error
  std::int64_t values[kHeaderFields];
  char text[512 - 8 * (kHeaderFields + 1)];
};
static_assert(sizeof(Header) == 512);

Status failure(const char* scheme, const std::string& step, const char* call, std::int32_t code,
               const std::string& peers) {
  return error(StatusCode::internal,
               "%s, %s: %s%s failed with code %d; a rank ended, or the engine's timeout passed",
               scheme, step.c_str(), call, peers.c_str(), code);
}

std::string with_value(const std::string& words, const std::string& value) {
  const std::size_t at = words.find("%s");
  return at == std::string::npos ? words : words.substr(0, at) + value + words.substr(at + 2);
}

}  // namespace

Status Engine::sendrecv(const std::string& step, const void* send, std::int64_t send_bytes,
                        std::int32_t to, void* recv, std::int64_t recv_bytes,
                        std::int32_t from) const {
  if (send_bytes == 0 && recv_bytes == 0) return {};
  const std::int32_t code =
      comm_.sendrecv(comm_.context, send, static_cast<std::size_t>(send_bytes), to, recv,
                     static_cast<std::size_t>(recv_bytes), from, stream_);
  if (code == 0) return {};
  return failure(scheme_, step, "sendrecv", code,
                 " to rank " + decimal(to) + " and from rank " + decimal(from));
}

Status Engine::all_to_all(const char* step, const void* send,
                          const std::vector<std::size_t>& send_bytes, void* recv,
                          const std::vector<std::size_t>& recv_bytes) const {
  const std::int32_t code =
      comm_.all_to_all(comm_.context, send, send_bytes.data(), recv, recv_bytes.data(), stream_);
  return code == 0 ? Status() : failure(scheme_, step, "all_to_all", code, "");
}

Status Engine::all_gather(const char* step, const void* send, void* recv,
                          const std::vector<std::size_t>& recv_bytes) const {
  const std::int32_t code = comm_.all_gather(comm_.context, send, recv, recv_bytes.data(), stream_);
  return code == 0 ? Status() : failure(scheme_, step, "all_gather", code, "");
}

Status Engine::gather_headers(const void* send, void* recv, std::size_t bytes) const {
  const std::vector<std::size_t> each(static_cast<std::size_t>(size()), bytes);
  const std::int32_t code = comm_.all_gather(comm_.context, send, recv, each.data(), nullptr);
  return code == 0 ? Status() : failure(scheme_, "header", "all_gather", code, "");
}

Status check_comm(const Comm& comm) noexcept {
  if (comm.size < 1 || comm.rank < 0 || comm.rank >= comm.size) {
    return invalid_argument("comm: rank is %d of %d; wanted 0 to size-1", comm.rank, comm.size);
  }
  if (comm.sendrecv == nullptr) return invalid_argument("comm.sendrecv: is NULL");
  if (comm.all_to_all == nullptr) return invalid_argument("comm.all_to_all: is NULL");
  if (comm.all_gather == nullptr) return invalid_argument("comm.all_gather: is NULL");
  return {};
}

Result<std::vector<std::vector<std::int64_t>>> agree(const Engine& engine,
                                                     const std::vector<HeaderField>& fields,
                                                     const Status& own) {
  Header mine{};
  const std::size_t count = std::min(fields.size(), kHeaderFields);
  mine.count = own.ok() ? static_cast<std::int64_t>(count) : -1;
  for (std::size_t i = 0; i < count && own.ok(); ++i) mine.values[i] = fields[i].value;
  std::strncpy(mine.text, own.message().c_str(), sizeof mine.text - 1);
  std::vector<Header> all(static_cast<std::size_t>(engine.size()));
  FLASHCORE_RETURN_IF_ERROR(engine.gather_headers(&mine, all.data(), sizeof mine));
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].count >= 0) continue;
    all[r].text[sizeof all[r].text - 1] = '\0';
    return invalid_argument("rank %zu: %s", r, all[r].text);
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].count == all[0].count) continue;
    return invalid_argument("rank %zu: makes another call than rank 0", r);
  }
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (fields[i].may_differ || all[r].values[i] == all[0].values[i]) continue;
      const std::string first = fields[i].show(all[0].values[i]);
      const std::string other = fields[i].show(all[r].values[i]);
      return invalid_argument("rank %zu: %s, rank 0 has %s; all ranks must pass the same", r,
                              with_value(fields[i].words, other).c_str(), first.c_str());
    }
  }
  std::vector<std::vector<std::int64_t>> values;
  for (const Header& one : all) values.emplace_back(one.values, one.values + count);
  return values;
}

}  // namespace flashcore::distributed
