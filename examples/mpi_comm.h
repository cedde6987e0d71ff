// The callbacks of flashcore::Comm on MPI. Copy this file into a program that uses MPI: the library
// itself does not know it.
//
// MPI calls are not ordered by CUDA streams. For tensors on a GPU use a CUDA-aware MPI, and
// synchronise `stream` at the start of each callback. A message has at most 2 GiB - 1 bytes.
#pragma once

#include <mpi.h>

#include <climits>
#include <vector>

#include "flashcore/distributed.h"

class MpiComm {
 public:
  /// Makes MPI return its errors instead of ending the program.
  explicit MpiComm(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }

  /// Valid as long as this object.
  flashcore::Comm callbacks() {
    flashcore::Comm made;
    made.context = this;
    made.rank = rank_;
    made.size = size_;
    made.sendrecv = sendrecv;
    made.all_to_all = all_to_all;
    made.all_gather = all_gather;
    return made;
  }

 private:
  /// MPI's counts and displacements of messages that follow each other without gaps.
  struct Counts {
    std::vector<int> counts, offsets;
    bool fit = true;

    Counts(const std::size_t* bytes, int ranks) {
      std::size_t sum = 0;
      for (int r = 0; r < ranks; ++r) {
        counts.push_back(static_cast<int>(bytes[r]));
        offsets.push_back(static_cast<int>(sum));
        sum += bytes[r];
      }
      fit = sum <= INT_MAX;
    }
  };

  static std::int32_t sendrecv(void* context, const void* send, std::size_t send_bytes,
                               std::int32_t to, void* recv, std::size_t recv_bytes,
                               std::int32_t from, void* /*stream*/) {
    const MpiComm& self = *static_cast<MpiComm*>(context);
    if (send_bytes > INT_MAX || recv_bytes > INT_MAX) return MPI_ERR_COUNT;
    // 0 bytes: there is no message in that direction.
    return MPI_Sendrecv(send, static_cast<int>(send_bytes), MPI_BYTE,
                        send_bytes == 0 ? MPI_PROC_NULL : to, 0, recv, static_cast<int>(recv_bytes),
                        MPI_BYTE, recv_bytes == 0 ? MPI_PROC_NULL : from, 0, self.comm_,
                        MPI_STATUS_IGNORE);
  }

  static std::int32_t all_to_all(void* context, const void* send, const std::size_t* send_bytes,
                                 void* recv, const std::size_t* recv_bytes, void* /*stream*/) {
    const MpiComm& self = *static_cast<MpiComm*>(context);
    const Counts out(send_bytes, self.size_), in(recv_bytes, self.size_);
    if (!out.fit || !in.fit) return MPI_ERR_COUNT;
    return MPI_Alltoallv(send, out.counts.data(), out.offsets.data(), MPI_BYTE, recv,
                         in.counts.data(), in.offsets.data(), MPI_BYTE, self.comm_);
  }

  static std::int32_t all_gather(void* context, const void* send, void* recv,
                                 const std::size_t* recv_bytes, void* /*stream*/) {
    const MpiComm& self = *static_cast<MpiComm*>(context);
    const Counts in(recv_bytes, self.size_);
    if (!in.fit) return MPI_ERR_COUNT;
    return MPI_Allgatherv(send, in.counts[static_cast<std::size_t>(self.rank_)], MPI_BYTE, recv,
                          in.counts.data(), in.offsets.data(), MPI_BYTE, self.comm_);
  }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
};
