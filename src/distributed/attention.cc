// distributed_attention() and distributed_backward(): checks, compares headers, runs the scheme.
#include <optional>

#include "core/error.h"
#include "distributed/gather.h"
#include "distributed/guarded.h"
#include "distributed/heads.h"
#include "distributed/ring.h"

namespace flashcore {
namespace {

using namespace distributed;  // NOLINT: the parts of this file's functions

/// The ranks that have the same heads as this one.
Members members_of(const Job& job, std::int32_t rank) noexcept {
  return {rank / job.head_ranks, rank % job.head_ranks, job.head_ranks};
}

HeadTensor head_tensor(const TensorView& rows, DType dtype, std::int64_t dim, bool of_q = true) {
  HeadTensor made;
  made.rows = rows;
  made.dtype = dtype;
  made.dim = dim;
  made.of_q = of_q;
  return made;
}

TensorView lse_rows(const TensorView& lse) noexcept {
  return lse.given() ? with_column(lse) : TensorView();
}

/// q, k and v.
void add_inputs(const Job& job, const Shards& shards, HeadTensors& tensors) {
  tensors.push_back(head_tensor(shards.q, job.dtype, job.head_dim));
  tensors.push_back(head_tensor(shards.k, job.dtype, job.head_dim, false));
  tensors.push_back(head_tensor(shards.v, job.dtype, job.v_dim, false));
}

TensorView sinks_of(const Job& job, std::int32_t rank, const TensorView& sinks) noexcept {
  const HeadRange own = job.heads(rank % job.head_ranks);
  return sinks.given() ? slice(sinks, 0, own.q_begin, own.q_heads()) : TensorView();
}

Status run_by_heads(const Job& job, const Engine& engine, Local& local, const Shards& shards) {
  HeadExchange exchange(job, engine, local);
  HeadTensors in, out;
  add_inputs(job, shards, in);
  out.push_back(head_tensor(lse_rows(shards.lse), DType::f32, 1));
  out.push_back(head_tensor(shards.out, job.dtype, job.v_dim));
  FLASHCORE_RETURN_IF_ERROR(exchange.reserve(in));
  FLASHCORE_RETURN_IF_ERROR(exchange.reserve(out));
  FLASHCORE_RETURN_IF_ERROR(exchange.to_heads("q, k, v by heads", in));
  const Shards inner = {in[0].heads,
                        in[1].heads,
                        in[2].heads,
                        out[1].heads,
                        without_column(out[0].heads),
                        sinks_of(job, engine.rank(), shards.sinks)};
  const Job one = job.one_head_group(engine.rank());
  FLASHCORE_RETURN_IF_ERROR(run_ring(one, members_of(job, engine.rank()), engine, local, inner));
  return exchange.to_rows("out by rows", out);
}

Status run_scheme(const Job& job, const Engine& engine, Local& local, const Shards& shards) {
  if (!job.is_ring()) return run_gather(job, engine, local, shards);
  if (job.head_ranks > 1) return run_by_heads(job, engine, local, shards);
  return run_ring(job, {engine.rank(), 0, 1}, engine, local, shards);
}

Options local_options(const Options& options) {
  Options made;
  made.causal = options.causal;
  made.window_left = options.window_left;
  made.window_right = options.window_right;
  made.scale = options.scale;
  made.softcap = options.softcap;
  made.reproducibility = options.reproducibility;
  return made;
}

Status attend_over_ranks(const Comm& comm, const Tensors& t, const Options& options,
                         const DistributedOptions& how, Stream stream) {
  FLASHCORE_RETURN_IF_ERROR(check_comm(comm));
  Engine engine(comm, "distributed_attention", stream);
  Status own = check_shards(t, options);
  if (own.ok()) own = make_problem(t, local_options(options)).status();
  const auto headers = agree(engine, header_of(t, options, how, false), own);
  if (!headers.ok()) return headers.status();
  // Every rank that fails here fails with the same error: the job follows from the headers.
  const Result<Job> job = make_job(problem_of(t, options, how, *headers));
  if (!job.ok()) return job.status();
  engine.set_scheme(to_string(job->scheme));
  Result<Local> local = Local::make(t.q.device, stream, local_options(options));
  if (!local.ok()) return local.status();
  return run_scheme(*job, engine, *local, {t.q, t.k, t.v, t.out, t.lse, t.sinks});
}

/// The backward pass of one rank. reserve() reads no tensor.
class BackwardPass {
 public:
  BackwardPass(const Job& job, const Engine& engine, Local& local, const Shards& shards,
               const Gradients& gradients)
      : job_(job),
        engine_(engine),
        local_(local),
        shards_(shards),
        gradients_(gradients),
        inner_job_(job.one_head_group(engine.rank())),
        exchange_(job, engine, local) {}

  Status reserve() {
    const std::int64_t rows = rows_of(job_.q_of(engine_.rank()));
    const Result<std::int64_t> bytes = local_.workspace_of(job_, rows, 0);
    if (!bytes.ok()) return bytes.status();
    FLASHCORE_RETURN_IF_ERROR(local_.reserve(sinks_workspace_, *bytes));
    if (!job_.is_ring()) {
      return gather_.emplace(job_, engine_, local_, shards_, gradients_).reserve();
    }
    if (job_.head_ranks > 1) FLASHCORE_RETURN_IF_ERROR(reserve_heads());
    if (inner_job_.ranks() > 1) {
      return ring_
          .emplace(inner_job_, members_of(job_, engine_.rank()), engine_, local_, inner_shards_,
                   inner_gradients_)
          .reserve();
    }
    return all_keys_
        .emplace(inner_job_, 0, local_, inner_shards_, inner_gradients_, inner_job_.k_of(0))
        .reserve();
  }

  Status run() {
    if (gradients_.dsinks.given()) FLASHCORE_RETURN_IF_ERROR(differentiate_sinks());
    if (gather_) return gather_->run();
    inner_shards_ = shards_;
    inner_gradients_ = gradients_;
    if (job_.head_ranks > 1) FLASHCORE_RETURN_IF_ERROR(divide_heads());
    if (ring_) {
      FLASHCORE_RETURN_IF_ERROR(ring_->run());
    } else {
      FLASHCORE_RETURN_IF_ERROR(all_keys_->run(KeyBlock(inner_shards_.k, inner_shards_.v)));
      FLASHCORE_RETURN_IF_ERROR(local_.store(inner_gradients_.dk, all_keys_->sums().k));
      FLASHCORE_RETURN_IF_ERROR(local_.store(inner_gradients_.dv, all_keys_->sums().v));
    }
    return job_.head_ranks > 1 ? return_heads() : Status();
  }

 private:
  bool shares_heads() const noexcept { return job_.head_ranks > job_.kv_heads; }

  /// They need no keys: the LSE and out have them.
  Status differentiate_sinks() {
    const KeyBlock none(job_, sinks_workspace_.data(), job_.dtype, 0, local_.device());
    Gradients wanted;
    wanted.dout = gradients_.dout;
    wanted.dlse = gradients_.dlse;
    wanted.dsinks = gradients_.dsinks;
    return local_.differentiate(local_call(shards_, none.k, none.v, {}, kNoStarts), wanted, false,
                                sinks_workspace_);
  }

  Status reserve_heads() {
    in_.push_back(head_tensor(lse_rows(shards_.lse), DType::f32, 1));
    in_.push_back(head_tensor(lse_rows(gradients_.dlse), DType::f32, 1));
    add_inputs(job_, shards_, in_);
    in_.push_back(head_tensor(shards_.out, job_.dtype, job_.v_dim));
    in_.push_back(head_tensor(gradients_.dout, job_.dtype, job_.v_dim));
    const DType wide = shares_heads() ? DType::f32 : job_.dtype;
    out_.push_back(head_tensor(gradients_.dk, wide, job_.head_dim, false));
    out_.push_back(head_tensor(gradients_.dv, wide, job_.v_dim, false));
    out_.push_back(head_tensor(gradients_.dq, job_.dtype, job_.head_dim));
    FLASHCORE_RETURN_IF_ERROR(exchange_.reserve(in_));
    FLASHCORE_RETURN_IF_ERROR(exchange_.reserve(out_));
    if (!shares_heads()) return {};
    return local_.reserve(key_sums_, job_.kv_bytes(rows_of(job_.k_of(engine_.rank())), true));
  }

  Status divide_heads() {
    FLASHCORE_RETURN_IF_ERROR(exchange_.to_heads("q, k, v, out and dO by heads", in_));
    inner_shards_ = {in_[2].heads,
                     in_[3].heads,
                     in_[4].heads,
                     in_[5].heads,
                     without_column(in_[0].heads),
                     sinks_of(job_, engine_.rank(), shards_.sinks)};
    inner_gradients_.dout = in_[6].heads;
    inner_gradients_.dlse = without_column(in_[1].heads);
    inner_gradients_.dk = out_[0].heads;
    inner_gradients_.dv = out_[1].heads;
    inner_gradients_.dq = out_[2].heads;
    return {};
  }

  Status return_heads() {
    if (!shares_heads()) return exchange_.to_rows("gradients by rows", out_);
    const std::int64_t rows = rows_of(job_.k_of(engine_.rank()));
    const KeyBlock sums(job_, key_sums_.data(), DType::f32, rows, local_.device());
    FLASHCORE_RETURN_IF_ERROR(local_.zero(key_sums_.data(), job_.kv_bytes(rows, true)));
    out_[0].rows = sums.k;
    out_[1].rows = sums.v;
    out_[0].how = out_[1].how = Write::add;
    FLASHCORE_RETURN_IF_ERROR(exchange_.to_rows("gradients by rows", out_));
    FLASHCORE_RETURN_IF_ERROR(local_.store(gradients_.dk, sums.k));
    return local_.store(gradients_.dv, sums.v);
  }

  const Job& job_;
  const Engine& engine_;
  Local& local_;
  const Shards shards_;
  const Gradients gradients_;
  const Job inner_job_;  ///< of the ranks with the same heads
  Shards inner_shards_;
  Gradients inner_gradients_;
  HeadExchange exchange_;
  HeadTensors in_, out_;
  Buffer sinks_workspace_, key_sums_;
  std::optional<GatherBackward> gather_;
  std::optional<RingBackward> ring_;
  std::optional<AllKeysBackward> all_keys_;
};

Status check_gradients(const Tensors& t, const Gradients& g, const Options& options) {
  FLASHCORE_RETURN_IF_ERROR(check_shards(t, options));
  if (g.dbias.given()) return unsupported("dbias: distributed calls have no bias");
  for (const auto& [name, one] :
       {std::pair{"dout", &g.dout}, {"dq", &g.dq}, {"dk", &g.dk}, {"dv", &g.dv}}) {
    FLASHCORE_RETURN_IF_ERROR(check_shard(name, *one, t.q, true));
  }
  return make_backward_problem(t, g, local_options(options)).status();
}

Status check_workspace(const Workspace& workspace, const Arena& arena, Device device) {
  if (workspace.data == nullptr) return {};
  if (workspace.device != device) return invalid_argument("workspace: is on another device than q");
  if (reinterpret_cast<std::uintptr_t>(workspace.data) % 256 != 0) {
    return invalid_argument("workspace: the pointer is not a multiple of 256");
  }
  if (workspace.bytes >= arena.used()) return {};
  return invalid_argument(
      "workspace: has %zu bytes; wanted %zu, see distributed_backward_workspace()", workspace.bytes,
      arena.used());
}

Status differentiate_over_ranks(const Comm& comm, const Tensors& t, const Gradients& g,
                                const Options& options, const DistributedOptions& how,
                                const Workspace& workspace, Stream stream) {
  FLASHCORE_RETURN_IF_ERROR(check_comm(comm));
  Engine engine(comm, "distributed_backward", stream);
  const Status own = check_gradients(t, g, options);
  const auto headers = agree(engine, header_of(t, options, how, true), own);
  if (!headers.ok()) return headers.status();
  const Result<Job> job = make_job(problem_of(t, options, how, *headers));
  if (!job.ok()) return job.status();
  engine.set_scheme(to_string(job->scheme));
  Arena arena(workspace);
  Result<Local> local = Local::make(t.q.device, stream, local_options(options),
                                    workspace.data == nullptr ? nullptr : &arena);
  std::optional<BackwardPass> pass;
  Status ready = local.status();
  if (ready.ok()) {
    const Shards shards = {t.q, t.k, t.v, t.out, t.lse, t.sinks};
    ready = pass.emplace(*job, engine, *local, shards, g).reserve();
  }
  if (ready.ok()) ready = check_workspace(workspace, arena, t.q.device);
  // The ranks need different amounts of memory: all must be ready before data moves.
  const auto others = agree(engine, {}, ready);
  return others.ok() ? pass->run() : others.status();
}

Result<std::size_t> backward_workspace(const DistributedProblem& problem, std::int32_t rank,
                                       Device device) {
  if (problem.dtype == DType::f64) {
    return invalid_argument("dtype is f64; wanted f32, f16 or bf16");
  }
  const Result<Job> job = make_job(problem);
  if (!job.ok()) return job.status();
  if (rank < 0 || rank >= job->ranks()) {
    return invalid_argument("rank is %d; wanted 0 to %d", rank, job->ranks() - 1);
  }
  Comm comm;
  comm.rank = rank;
  comm.size = job->ranks();
  const Engine engine(comm, to_string(job->scheme), nullptr);
  Options options;
  options.causal = problem.causal;
  options.window_left = problem.window_left;
  options.window_right = problem.window_right;
  options.reproducibility = problem.reproducibility;
  Arena arena({});
  Result<Local> local = Local::make(device, nullptr, options, &arena);
  if (!local.ok()) return local.status();
  BackwardPass pass(*job, engine, *local, {}, {});
  FLASHCORE_RETURN_IF_ERROR(pass.reserve());
  return arena.used();
}

}  // namespace

Status distributed_attention(const Comm& comm, const Tensors& tensors, const Options& options,
                             const DistributedOptions& distributed, Stream stream) noexcept {
  return guarded<Status>(
      [&] { return attend_over_ranks(comm, tensors, options, distributed, stream); });
}

Result<std::size_t> distributed_backward_workspace(const DistributedProblem& problem,
                                                   std::int32_t rank, Device device) noexcept {
  return guarded<Result<std::size_t>>([&] { return backward_workspace(problem, rank, device); });
}

Status distributed_backward(const Comm& comm, const Tensors& tensors, const Gradients& gradients,
                            const Options& options, const DistributedOptions& distributed,
                            Workspace workspace, Stream stream) noexcept {
  return guarded<Status>([&] {
    return differentiate_over_ranks(comm, tensors, gradients, options, distributed, workspace,
                                    stream);
  });
}

}  // namespace flashcore
