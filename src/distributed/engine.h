// Checked calls of the callbacks, and the header: the first message of every call.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "distributed/decimal.h"
#include "flashcore/distributed.h"

namespace flashcore::distributed {

/// The callbacks of one call. A failure becomes a Status that names the scheme, step and peers.
class Engine {
 public:
  Engine(const Comm& comm, const char* scheme, Stream stream) noexcept
      : comm_(comm), scheme_(scheme), stream_(stream) {}

  std::int32_t rank() const noexcept { return comm_.rank; }
  std::int32_t size() const noexcept { return comm_.size; }
  void set_scheme(const char* scheme) noexcept { scheme_ = scheme; }

  /// Does nothing if there is no message in either direction.
  Status sendrecv(const std::string& step, const void* send, std::int64_t send_bytes,
                  std::int32_t to, void* recv, std::int64_t recv_bytes, std::int32_t from) const;
  Status all_to_all(const char* step, const void* send, const std::vector<std::size_t>& send_bytes,
                    void* recv, const std::vector<std::size_t>& recv_bytes) const;
  Status all_gather(const char* step, const void* send, void* recv,
                    const std::vector<std::size_t>& recv_bytes) const;
  /// The same number of bytes of host memory from each rank.
  Status gather_headers(const void* send, void* recv, std::size_t bytes) const;

 private:
  Comm comm_;
  const char* scheme_;
  Stream stream_;
};

Status check_comm(const Comm& comm) noexcept;

/// For header fields that stand for a list of numbers.
template <typename T>
std::int64_t hash_of(std::span<const T> numbers) noexcept {
  std::uint64_t hash = 14695981039346656037u;
  for (const T one : numbers) {
    hash = (hash ^ static_cast<std::uint64_t>(one)) * 1099511628211u;
  }
  return static_cast<std::int64_t>(hash);
}

/// One number of the header.
struct HeaderField {
  std::string words;  ///< "k has %s heads"
  std::int64_t value = 0;
  bool may_differ = false;
  std::string (*show)(std::int64_t) = [](std::int64_t number) { return decimal(number); };
};

/// Compares the headers of all ranks. Every rank gets the same error if they disagree, or if `own`,
/// the check of one rank's arguments, failed. Returns each rank's values.
Result<std::vector<std::vector<std::int64_t>>> agree(const Engine& engine,
                                                     const std::vector<HeaderField>& fields,
                                                     const Status& own);

}  // namespace flashcore::distributed
