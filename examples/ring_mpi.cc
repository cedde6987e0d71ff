// One attention over a sequence that is divided between MPI ranks, and its gradients, with every
// scheme, against one call over the whole sequence.
//
//   mpicxx -std=c++20 examples/ring_mpi.cc -lflashcore -o ring_mpi && mpirun -n 4 ./ring_mpi 203
//
// With a second argument "die", the last rank ends before its call, or, with "die N", instead of
// its send-receive number N, in the middle of a ring: mpirun then ends the others.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "flashcore/attention.h"
#include "flashcore/backward.h"
#include "flashcore/distributed.h"
#include "mpi_comm.h"

namespace {

using flashcore::DType;
using flashcore::Scheme;
using flashcore::view;

constexpr std::int64_t kHeads = 8, kKvHeads = 4, kDim = 32;

/// [1, heads, rows, kDim] of f32.
struct Tensor {
  std::int64_t heads, rows;
  std::vector<float> data;

  Tensor(std::int64_t h, std::int64_t r)
      : heads(h), rows(r), data(static_cast<std::size_t>(h * r * kDim)) {}
  flashcore::TensorView tensor() const {
    return view(data.data(), DType::f32, {1, heads, rows, kDim});
  }
  float* row(std::int64_t head, std::int64_t i) { return data.data() + (head * rows + i) * kDim; }
  /// These rows, in order.
  Tensor shard(const std::vector<std::int64_t>& wanted) {
    Tensor made(heads, static_cast<std::int64_t>(wanted.size()));
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < made.rows; ++i) {
        std::copy_n(row(h, wanted[static_cast<std::size_t>(i)]), kDim, made.row(h, i));
      }
    }
    return made;
  }
};

void stop(const flashcore::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

/// A workspace on the CPU.
struct Memory {
  flashcore::Workspace workspace;

  explicit Memory(std::size_t bytes) {
    workspace.bytes = (bytes + 255) / 256 * 256;
    workspace.data = std::aligned_alloc(256, workspace.bytes);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(workspace.data); }
};

/// One call on this rank alone.
void attend(const flashcore::Tensors& tensors, const flashcore::Options& options) {
  const auto problem = flashcore::make_problem(tensors, options);
  stop(problem.status());
  const auto plan = flashcore::make_plan(*problem, *flashcore::device_info({}));
  stop(plan.status());
  const Memory memory(flashcore::workspace_bytes(*plan));
  stop(flashcore::workspace_init(memory.workspace));
  stop(flashcore::run(*plan, tensors, memory.workspace));
}

void differentiate(const flashcore::Tensors& tensors, const flashcore::Gradients& gradients,
                   const flashcore::Options& options) {
  const auto problem = flashcore::make_backward_problem(tensors, gradients, options);
  stop(problem.status());
  const auto plan = flashcore::make_backward_plan(*problem, *flashcore::device_info({}));
  stop(plan.status());
  const Memory memory(flashcore::workspace_bytes(*plan));
  stop(flashcore::run_backward(*plan, tensors, gradients, memory.workspace));
}

/// Zigzag: parts r and 2c-1-r of 2c parts, the same work on all ranks under a causal mask.
std::vector<std::int64_t> zigzag_rows(std::int64_t length, std::int64_t rank, std::int64_t ranks) {
  std::vector<std::int64_t> rows;
  for (const std::int64_t part : {rank, 2 * ranks - 1 - rank}) {
    for (std::int64_t i = part * length / (2 * ranks); i < (part + 1) * length / (2 * ranks); ++i) {
      rows.push_back(i);
    }
  }
  return rows;
}

struct Sequence {
  Tensor q, k, v, out, dout, dq, dk, dv;
  std::vector<float> lse;

  explicit Sequence(std::int64_t rows)
      : q(kHeads, rows),
        k(kKvHeads, rows),
        v(kKvHeads, rows),
        out(kHeads, rows),
        dout(kHeads, rows),
        dq(kHeads, rows),
        dk(kKvHeads, rows),
        dv(kKvHeads, rows),
        lse(static_cast<std::size_t>(kHeads * rows)) {
    std::mt19937 random(1);  // the same on every rank
    std::normal_distribution<float> normal;
    for (Tensor* one : {&q, &k, &v, &dout}) {
      for (float& x : one->data) x = normal(random);
    }
  }
  /// The inputs of these rows.
  Sequence shard(const std::vector<std::int64_t>& rows) {
    Sequence made(static_cast<std::int64_t>(rows.size()));
    made.q = q.shard(rows);
    made.k = k.shard(rows);
    made.v = v.shard(rows);
    made.dout = dout.shard(rows);
    return made;
  }
  flashcore::Tensors tensors() const {
    flashcore::Tensors t;
    t.q = q.tensor();
    t.k = k.tensor();
    t.v = v.tensor();
    t.out = out.tensor();
    t.lse = view(lse.data(), DType::f32, {1, kHeads, out.rows});
    return t;
  }
  flashcore::Gradients gradients() const {
    flashcore::Gradients g;
    g.dout = dout.tensor();
    g.dq = dq.tensor();
    g.dk = dk.tensor();
    g.dv = dv.tensor();
    return g;
  }
};

double largest_difference(const Tensor& a, const Tensor& b) {
  double worst = 0;
  for (std::size_t i = 0; i < a.data.size(); ++i) {
    const double difference = std::fabs(a.data[i] - b.data[i]);
    worst = std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
  }
  double of_all = 0;
  MPI_Allreduce(&worst, &of_all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return of_all;
}

/// Prints one line on rank 0. Returns whether the difference is small. Results that are each within
/// the bound of docs/numerics.md may differ by twice that: here by 6e-6 or more for half of out's
/// elements, and by 17e-6 for half of dq's. The limit is stricter.
bool report(int rank, const char* name, const char* tensor, double difference) {
  if (rank == 0) std::printf("%-8s %-4s largest difference %.1e\n", name, tensor, difference);
  return difference < 4e-6;
}

bool run_schemes(const flashcore::Comm& comm, std::int64_t length) {
  bool good = true;
  const std::vector<std::int64_t> rows = zigzag_rows(length, comm.rank, comm.size);
  for (const Scheme scheme :
       {Scheme::ring, Scheme::gather, Scheme::ulysses, Scheme::two_d, Scheme::halo}) {
    flashcore::Options options;
    options.causal = true;
    if (scheme == Scheme::halo) options.window_left = 16;
    Sequence whole(length);
    attend(whole.tensors(), options);
    differentiate(whole.tensors(), whole.gradients(), options);
    Sequence shard = whole.shard(rows);
    flashcore::DistributedOptions how;
    how.scheme = scheme;
    how.head_ranks = scheme == Scheme::two_d && comm.size % 2 == 0 ? 2 : 0;
    const flashcore::Status status =
        flashcore::distributed_attention(comm, shard.tensors(), options, how);
    if (!status.ok() && comm.size == 3 && scheme == Scheme::ulysses) continue;  // 3 divides no head
    stop(status);
    good &= report(comm.rank, flashcore::to_string(scheme), "out",
                   largest_difference(shard.out, whole.out.shard(rows)));
    // Without a workspace the call allocates its buffers.
    stop(flashcore::distributed_backward(comm, shard.tensors(), shard.gradients(), options, how));
    good &= report(comm.rank, flashcore::to_string(scheme), "dq",
                   largest_difference(shard.dq, whole.dq.shard(rows)));
    good &= report(comm.rank, flashcore::to_string(scheme), "dk",
                   largest_difference(shard.dk, whole.dk.shard(rows)));
    good &= report(comm.rank, flashcore::to_string(scheme), "dv",
                   largest_difference(shard.dv, whole.dv.shard(rows)));
  }
  return good;
}

/// One new query over a cache whose keys are divided between the ranks: key p is on rank p % size.
bool run_decode(const flashcore::Comm& comm, std::int64_t length) {
  Sequence whole(length);
  whole.q = whole.q.shard({length - 1});
  whole.out = Tensor(kHeads, 1);
  attend(whole.tensors(), {});
  std::vector<std::int64_t> keys;
  for (std::int64_t p = comm.rank; p < length; p += comm.size) keys.push_back(p);
  Sequence shard(1);
  shard.q = whole.q;
  shard.k = whole.k.shard(keys);
  shard.v = whole.v.shard(keys);
  const std::int32_t lengths[] = {static_cast<std::int32_t>(length)};
  stop(flashcore::distributed_decode(comm, shard.tensors(), lengths, {}));
  return report(comm.rank, "decode", "out", largest_difference(shard.out, whole.out));
}

/// A rank with other options: every rank gets the same error before any data moves.
bool run_disagreement(const flashcore::Comm& comm) {
  const Sequence shard(8);
  flashcore::Options options;
  options.causal = comm.rank + 1 == comm.size;
  flashcore::DistributedOptions how;
  how.sharding = flashcore::Sharding::contiguous;
  const flashcore::Status status =
      flashcore::distributed_attention(comm, shard.tensors(), options, how);
  if (comm.rank == 0) std::printf("error    %s\n", status.message().c_str());
  return comm.size == 1 || status.code() == flashcore::StatusCode::invalid_argument;
}

/// Callbacks of a rank that ends instead of its send-receive number `number`.
flashcore::Comm that_ends(const flashcore::Comm& comm, std::int64_t number) {
  static decltype(comm.sendrecv) sendrecv;
  static std::int64_t left;
  sendrecv = comm.sendrecv;
  left = number;
  flashcore::Comm made = comm;
  made.sendrecv = [](void* context, const void* send, std::size_t send_bytes, std::int32_t to,
                     void* recv, std::size_t recv_bytes, std::int32_t from, void* stream) {
    if (--left <= 0) std::_Exit(3);
    return sendrecv(context, send, send_bytes, to, recv, recv_bytes, from, stream);
  };
  return made;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const std::int64_t length = argc > 1 ? std::atoll(argv[1]) : 203;
  bool good = false;
  {
    MpiComm mpi(MPI_COMM_WORLD);
    flashcore::Comm comm = mpi.callbacks();
    if (argc > 2 && std::strcmp(argv[2], "die") == 0 && comm.rank + 1 == comm.size) {
      if (argc == 3) std::_Exit(3);
      comm = that_ends(comm, std::atoll(argv[3]));
    }
    good = run_schemes(comm, length);
    good &= run_decode(comm, length);
    good &= run_disagreement(comm);
  }
  MPI_Finalize();
  return good ? 0 : 1;
}
