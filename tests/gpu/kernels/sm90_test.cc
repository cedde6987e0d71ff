// Primitives of the Hopper kernels in isolation: TMA loads, mbarriers, wgmma, and both GEMMs of a
// mainloop step. The results compare core/wgmma_layout.h and core/mma_layout.h with the hardware.
// Then, through the public API: data past the last key and extreme scores.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/mma_layout.h"
#include "core/wgmma_layout.h"
#include "gpu/support.h"
#include "sm90_fixture.h"
#include "sm90_kernels.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

using Hopper = HopperTest;

constexpr int kPanelColumns = core::PanelTile<64, 64>::kPanelColumns;

bool is_hopper(const KernelInfo& kernel) {
  return kernel.family == Family::sm90 && kernel.inputs == Inputs::native &&
         kernel.op == Operation::fwd;
}

// ---------------------------------------------------------------------------------------------
// TMA

/// Never 0 or 0xffff. The indices of equal values differ by a multiple of 65521.
std::uint16_t value_at(std::size_t index) { return static_cast<std::uint16_t>(index % 65521 + 1); }

/// A tensor with 0xffff in all padding.
TileCopy tensor_of(int columns, int rows, int heads, int batch, bool rows_first) {
  constexpr int kSlack = 8;  // elements after a row
  TileCopy call{};
  call.columns = columns;
  call.rows = rows;
  call.heads = heads;
  call.batch = batch;
  const int row = (columns + 7) / 8 * 8 + kSlack;
  call.row_stride = rows_first ? heads * row : row;
  call.head_stride = rows_first ? row : rows * row;
  call.batch_stride = rows * heads * row;
  call.tensor.assign(static_cast<std::size_t>(batch * call.batch_stride), 0xffff);
  for (int b = 0; b < batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < columns; ++c) {
          const auto at = static_cast<std::size_t>(b * call.batch_stride + h * call.head_stride +
                                                   r * call.row_stride + c);
          call.tensor[at] = value_at(at);
        }
      }
    }
  }
  return call;
}

/// Checks every element of the tile; those past the tensor's edges are 0.
void check_copy(const TileCopy& call) {
  SCOPED_TRACE(testing::Message() << "tile " << call.tile_rows << " x " << call.tile_columns
                                  << " of " << call.rows << " x " << call.columns << ", from row "
                                  << call.row << ", head " << call.head << ", batch " << call.b
                                  << ", row stride " << call.row_stride);
  const std::vector<std::uint16_t> got = run_copy_tile(call);
  const int stored_columns = (call.tile_columns + 63) / 64 * 64;  // whole panels
  ASSERT_EQ(got.size(), static_cast<std::size_t>(call.tile_rows * stored_columns));
  for (int r = 0; r < call.tile_rows; ++r) {
    for (int c = 0; c < stored_columns; ++c) {
      const bool inside = call.row + r < call.rows && c < call.columns;
      const auto at =
          static_cast<std::size_t>(call.b * call.batch_stride + call.head * call.head_stride +
                                   (call.row + r) * call.row_stride + c);
      ASSERT_EQ(got[static_cast<std::size_t>(r * stored_columns + c)], inside ? call.tensor[at] : 0)
          << "row " << r << " column " << c;
    }
  }
}

TEST_F(Hopper, TmaLoadsATileInItsLayout) {
  for (const int tile_rows : kCopiedRows) {
    for (const int tile_columns : kCopiedColumns) {
      TileCopy call = tensor_of(tile_columns, tile_rows + 7, 2, 2, false);
      call.tile_rows = tile_rows;
      call.tile_columns = tile_columns;
      for (const int corner : {0, 1}) {  // the first tile and an inner one
        call.row = 5 * corner;
        call.head = call.b = corner;
        check_copy(call);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(Hopper, TmaZeroFillsPastTheEdges) {
  for (const int tile_rows : kCopiedRows) {
    for (const int tile_columns : kCopiedColumns) {
      // With 40 columns, all panels but the first are outside the tensor.
      for (const int columns : {tile_columns - 8, tile_columns - 24, 40}) {
        for (const bool rows_first : {false, true}) {
          TileCopy call = tensor_of(columns, tile_rows + 3, 3, 2, rows_first);
          call.tile_rows = tile_rows;
          call.tile_columns = tile_columns;
          call.head = call.b = 1;  // another head follows in memory
          for (const int row : {0, 4, tile_rows + 2, tile_rows + 3, 2 * tile_rows}) {
            call.row = row;
            check_copy(call);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Barriers

TEST_F(Hopper, PhaseCompletesWithItsLastArrivalAndByte) {
  constexpr int kPhases = 9;
  const std::vector<int> got = run_barrier_phases(kPhases);
  ASSERT_EQ(got.size(), static_cast<std::size_t>(kPhases * kBarrierEvents));
  for (int phase = 0; phase < kPhases; ++phase) {
    for (int event = 0; event < kBarrierEvents; ++event) {
      const bool complete = event == kBarrierEvents - 1;
      EXPECT_EQ(got[static_cast<std::size_t>(phase * kBarrierEvents + event)],
                complete ? kOwnPhaseEnded : kPhaseBeforeEnded)
          << "phase " << phase << " event " << event;
    }
  }
}

TEST_F(Hopper, CtasOfAClusterExchangeData) {
  for (const int ctas : {2, 3, 7, 8}) {
    const std::vector<float> got = run_cluster_stores(ctas);
    std::size_t at = 0;
    for (int to = 0; to < ctas; ++to) {
      for (int from = 0; from < ctas; ++from) {
        for (int i = 0; i < kClusterThreads * 6; ++i) {
          const int sent = (from * ctas + to) * kClusterThreads * 6 + i;
          ASSERT_EQ(got[at++], static_cast<float>(sent))
              << ctas << " CTAs: " << from << " to " << to;
        }
      }
    }
  }
}

TEST_F(Hopper, PipelineDeliversEveryTileWithDelays) {
  for (const int stages : {2, 4}) {
    for (const int tiles : {1, 2, 3, 4, 5, 8, 9, 41}) {
      std::vector<std::uint16_t> matrix(static_cast<std::size_t>(tiles) * kPipelineRows *
                                        kPanelColumns);
      for (std::size_t i = 0; i < matrix.size(); ++i) matrix[i] = value_at(i);
      const std::vector<std::uint16_t> got = run_pipeline(stages, matrix);
      for (std::size_t i = 0; i < matrix.size(); ++i) {
        ASSERT_EQ(got[i], matrix[i])
            << stages << " stages, tile " << i / (kPipelineRows * kPanelColumns) << " of " << tiles
            << ", element " << i % (kPipelineRows * kPanelColumns);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// wgmma: small integers, so that every sum is exact

constexpr int kGroupRows = 64;
constexpr int kGroupThreads = 128;

class Matrix {
 public:
  Matrix(int rows, int columns)
      : rows_(rows), columns_(columns), values_(static_cast<std::size_t>(rows * columns)) {}

  /// Integers from -most to most.
  static Matrix random(int rows, int columns, int most, std::uint64_t seed) {
    verify::Random numbers(seed);
    Matrix m(rows, columns);
    for (int& x : m.values_) x = static_cast<int>(numbers.between(-most, most));
    return m;
  }

  int rows() const { return rows_; }
  int columns() const { return columns_; }
  int& at(int row, int column) {
    return values_[static_cast<std::size_t>(row * columns_ + column)];
  }
  int at(int row, int column) const {
    return values_[static_cast<std::size_t>(row * columns_ + column)];
  }

  Matrix transposed() const {
    Matrix m(columns_, rows_);
    for (int r = 0; r < rows_; ++r) {
      for (int c = 0; c < columns_; ++c) m.at(c, r) = at(r, c);
    }
    return m;
  }

  std::vector<std::uint16_t> bits(HalfFormat format) const {
    std::vector<std::uint16_t> all;
    for (const int x : values_) all.push_back(bits_of(format, static_cast<float>(x)));
    return all;
  }

 private:
  int rows_, columns_;
  std::vector<int> values_;
};

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix m(a.rows(), b.columns());
  for (int i = 0; i < a.rows(); ++i) {
    for (int k = 0; k < a.columns(); ++k) {
      for (int j = 0; j < b.columns(); ++j) m.at(i, j) += a.at(i, k) * b.at(k, j);
    }
  }
  return m;
}

/// Calls visit(accumulator index, row, column). Warp w of the warpgroup has rows 16 w to 16 w + 15;
/// register 4 n + r of a lane is register r of n-tile n of mma.sync.
template <typename Visit>
void for_each_accumulator(int columns, Visit visit) {
  for (int thread = 0; thread < kGroupThreads; ++thread) {
    for (int reg = 0; reg < columns / 2; ++reg) {
      const core::Coordinate at = core::mma_c(thread % 32, reg % 4);
      visit(static_cast<std::size_t>(thread * columns / 2 + reg), 16 * (thread / 32) + at.row,
            8 * (reg / 4) + at.column);
    }
  }
}

std::vector<float> accumulators_of(const Matrix& m) {
  std::vector<float> c(static_cast<std::size_t>(kGroupThreads * m.columns() / 2));
  for_each_accumulator(m.columns(), [&](std::size_t index, int row, int column) {
    c[index] = static_cast<float>(m.at(row, column));
  });
  return c;
}

void expect_accumulators(const std::vector<float>& got, const Matrix& want) {
  const std::vector<float> wanted = accumulators_of(want);
  ASSERT_EQ(got.size(), wanted.size());
  for_each_accumulator(want.columns(), [&](std::size_t index, int row, int column) {
    if (testing::Test::HasFatalFailure()) return;
    ASSERT_EQ(got[index], wanted[index])
        << "row " << row << " column " << column << ", register "
        << index % static_cast<std::size_t>(want.columns() / 2) << " of thread "
        << index / static_cast<std::size_t>(want.columns() / 2);
  });
}

Matrix sum(const Matrix& a, const Matrix& b) {
  Matrix m(a.rows(), a.columns());
  for (int i = 0; i < a.rows(); ++i) {
    for (int j = 0; j < a.columns(); ++j) m.at(i, j) = a.at(i, j) + b.at(i, j);
  }
  return m;
}

const char* name_of(HalfFormat format) { return format == HalfFormat::f16 ? "f16" : "bf16"; }

template <std::size_t kCount>
bool contains(const int (&list)[kCount], int value) {
  return std::find(std::begin(list), std::end(list), value) != std::end(list);
}

TEST(HopperKernels, HaveTestedShapes) {
  int found = 0;
  for (const KernelInfo& kernel : kernels()) {
    if (!is_hopper(kernel)) continue;
    ++found;
    EXPECT_TRUE(contains(kCopiedRows, kernel.tile_q)) << kernel.id;
    EXPECT_TRUE(contains(kCopiedRows, kernel.tile_k)) << kernel.id;
    EXPECT_TRUE(contains(kCopiedColumns, kernel.head_dim)) << kernel.id;
    EXPECT_TRUE(contains(kScoreColumns, kernel.tile_k)) << kernel.id;
    EXPECT_TRUE(contains(kScoreDepths, kernel.head_dim)) << kernel.id;
    EXPECT_TRUE(contains(kOutputColumns, kernel.head_dim)) << kernel.id;
  }
  EXPECT_GT(found, 0);
}

TEST_F(Hopper, WgmmaSsIsExact) {
  for (const int columns : kScoreColumns) {
    for (const int depth : kScoreDepths) {
      const Matrix q = Matrix::random(kGroupRows, depth, 8, 1);
      const Matrix k = Matrix::random(columns, depth, 8, 2);
      const Matrix c = Matrix::random(kGroupRows, columns, 1000, 3);
      const Matrix qk = product(q, k.transposed());
      for (const HalfFormat format : {HalfFormat::f16, HalfFormat::bf16}) {
        SCOPED_TRACE(testing::Message()
                     << name_of(format) << ", n " << columns << ", depth " << depth);
        const SsResult got = run_wgmma_ss(
            {format, columns, depth, q.bits(format), k.bits(format), accumulators_of(c)});
        expect_accumulators(got.added, sum(c, qk));
        expect_accumulators(got.alone, qk);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(Hopper, WgmmaSsMnMajorIsExact) {
  for (const int columns : kMnMajorColumns) {
    const Matrix ds = Matrix::random(kGroupRows, kMnMajorDepth, 8, 9);
    const Matrix k = Matrix::random(kMnMajorDepth, columns, 8, 10);
    const Matrix c = Matrix::random(kGroupRows, columns, 1000, 11);
    const Matrix dq = product(ds, k);
    for (const HalfFormat format : {HalfFormat::f16, HalfFormat::bf16}) {
      SCOPED_TRACE(testing::Message() << name_of(format) << ", n " << columns);
      const SsResult got =
          run_wgmma_ss_mn_major({format, columns, kMnMajorDepth, ds.transposed().bits(format),
                                 k.bits(format), accumulators_of(c)});
      expect_accumulators(got.added, sum(c, dq));
      expect_accumulators(got.alone, dq);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(Hopper, WgmmaRsIsExact) {
  for (const int columns : kOutputColumns) {
    for (const int depth : kOutputDepths) {
      const Matrix p = Matrix::random(kGroupRows, depth, 8, 4);
      const Matrix v = Matrix::random(depth, columns, 8, 5);
      const Matrix c = Matrix::random(kGroupRows, columns, 1000, 6);
      const Matrix pv = product(p, v);
      for (const HalfFormat format : {HalfFormat::f16, HalfFormat::bf16}) {
        SCOPED_TRACE(testing::Message()
                     << name_of(format) << ", n " << columns << ", depth " << depth);
        WarpgroupGemm call{format,         columns,        depth,
                           p.bits(format), v.bits(format), accumulators_of(c)};
        expect_accumulators(run_wgmma_rs(call, true), sum(c, pv));
        std::fill(call.c.begin(), call.c.end(), std::nanf(""));
        expect_accumulators(run_wgmma_rs(call, false), pv);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The packed accumulators of Q K^T are the A operand of P V. Both GEMMs read the last stage of the
// kernel's own shared memory. Inputs are at most 1, so scores are at most 256: exact in bf16, too.
TEST_F(Hopper, ScoreAccumulatorsAreTheOperandOfPV) {
  for (const KernelInfo& kernel : kernels()) {
    if (!is_hopper(kernel)) continue;
    SCOPED_TRACE(kernel.id);
    const HalfFormat format = kernel.dtype == DType::f16 ? HalfFormat::f16 : HalfFormat::bf16;
    const Matrix q = Matrix::random(kernel.tile_q, kernel.head_dim, 1, 7);
    const Matrix k = Matrix::random(kernel.tile_k, kernel.head_dim, 1, 8);
    const Matrix v = Matrix::random(kernel.tile_k, kernel.head_dim, 8, 9);
    const Matrix want = product(product(q, k.transposed()), v);
    const std::vector<float> got =
        run_two_gemms(kernel, q.bits(format), k.bits(format), v.bits(format));
    ASSERT_EQ(got.size(), static_cast<std::size_t>(kernel.tile_q * kernel.head_dim));
    for (int row = 0; row < kernel.tile_q; ++row) {
      for (int column = 0; column < kernel.head_dim; ++column) {
        ASSERT_EQ(got[static_cast<std::size_t>(row * kernel.head_dim + column)],
                  static_cast<float>(want.at(row, column)))
            << "row " << row << " column " << column;
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Data past the last key, extreme scores

/// Fills rows first … first + count - 1 of all heads of K or V with f(). In a dense tensor, these
/// are rows of sequence b.
template <typename F>
void fill_rows(const TensorView& t, std::int64_t b, std::int64_t first, std::int64_t count, F f) {
  const bool varlen = t.rank == 3;  // [rows, heads, columns], otherwise [batch, heads, rows, …]
  const int row_axis = varlen ? 0 : 2, column_axis = t.rank - 1;
  for (std::int64_t row = first; row < first + count; ++row) {
    for (std::int64_t head = 0; head < t.shape[1]; ++head) {
      for (std::int64_t column = 0; column < t.shape[column_axis]; ++column) {
        verify::store(t.data, t.dtype,
                      (varlen ? 0 : b * t.strides[0]) + head * t.strides[1] +
                          row * t.strides[row_axis] + column * t.strides[column_axis],
                      f());
      }
    }
  }
}

/// Kernels of family sm90 in this build.
std::vector<const KernelInfo*> sm90_kernels() {
  std::vector<const KernelInfo*> found = runnable_kernels();
  found.erase(std::remove_if(found.begin(), found.end(),
                             [](const KernelInfo* kernel) { return !is_hopper(*kernel); }),
              found.end());
  return found;
}

double quiet_nan() { return std::numeric_limits<double>::quiet_NaN(); }

verify::CaseSpec tail_spec(const KernelInfo& kernel, std::int64_t batch, std::int64_t kv_len,
                           bool causal) {
  verify::CaseSpec spec = dense(kernel, batch, 2, 1, kernel.tile_q + 3, kv_len);
  spec.options.kernel = kernel.id;
  spec.options.causal = causal;
  spec.lse = true;
  return spec;
}

void run_and_compare(const verify::CaseMemory& memory) {
  GpuCase gpu(memory);
  expect_right(memory, gpu.direct(memory, nullptr), gpu.plan());
}

TEST_F(Hopper, IgnoresNanPastUsedKeys) {
  const std::vector<const KernelInfo*> found = sm90_kernels();
  ASSERT_FALSE(found.empty()) << "this build has no kernel of family sm90";
  for (const KernelInfo* kernel : found) {
    const std::int64_t tile = kernel->tile_k, capacity = 3 * tile;
    // Near tile boundaries, and inside a group of 8 rows.
    const std::int64_t used[] = {0,
                                 1,
                                 8,
                                 tile - 1,
                                 tile,
                                 tile + 1,
                                 tile + 8 + 3,
                                 2 * tile - 1,
                                 2 * tile + 1,
                                 capacity - 1,
                                 capacity};
    for (const bool causal : {false, true}) {
      verify::CaseSpec spec = tail_spec(*kernel, std::size(used), capacity, causal);
      spec.used_k = true;
      const verify::CaseMemory memory(spec);
      const Tensors& t = memory.tensors();
      verify::Random random(10);
      for (std::int64_t b = 0; b < spec.batch; ++b) {
        verify::store(t.seqused_k.data, t.seqused_k.dtype, b, static_cast<double>(used[b]));
        for (const TensorView* view : {&t.k, &t.v}) {
          fill_rows(*view, b, 0, used[b], [&] { return random.normal(); });
          fill_rows(*view, b, used[b], capacity - used[b], quiet_nan);
        }
      }
      run_and_compare(memory);
      if (HasFailure()) return;
    }
  }
}

// Some kernels compare scores as integers, which reverses the order of negative ones. Tests rows
// with only negative scores, with only negative scores at first, and with a largest score of 0. The
// scores are far below 0: if the row max were wrongly 0, all probabilities would vanish. Only the
// last column makes them negative: tensor cores truncate sums, and many products of one sign would
// test that instead.
TEST_F(Hopper, HandlesRowsWithoutPositiveScores) {
  const std::vector<const KernelInfo*> found = sm90_kernels();
  ASSERT_FALSE(found.empty()) << "this build has no kernel of family sm90";
  for (const KernelInfo* kernel : found) {
    for (const bool causal : {false, true}) {
      const std::int64_t keys = 2 * kernel->tile_k + 5;
      const verify::CaseMemory memory(tail_spec(*kernel, 3, keys, causal));
      const Tensors& t = memory.tensors();
      verify::Random random(11);
      std::int64_t column = 0;
      const auto ending_in = [&](double last) {
        return [&, last] { return ++column % kernel->head_dim == 0 ? last : random.normal(); };
      };
      const double far = std::sqrt(200 * std::sqrt(kernel->head_dim));  // scores of 200
      for (std::int64_t b = 0; b < 3; ++b) {
        fill_rows(t.q, b, 0, memory.spec().q_len, ending_in(far));
        fill_rows(t.k, b, 0, keys, ending_in(-far));
      }
      fill_rows(t.k, 1, keys - kernel->tile_k, 3, ending_in(far));
      for (std::int64_t key = 0; key < keys; key += 7) {
        fill_rows(t.k, 2, key, 1, [] { return 0.0; });
      }
      run_and_compare(memory);
      if (HasFailure()) return;
    }
  }
}

// Tensor cores truncate sums: products of one sign lose more than random ones (docs/numerics.md,
// Scores). With 256 columns, the loss exceeds the random walk of a rounded sum.
TEST_F(Hopper, HandlesProductsOfOneSign) {
  const std::vector<const KernelInfo*> found = sm90_kernels();
  ASSERT_FALSE(found.empty()) << "this build has no kernel of family sm90";
  for (const KernelInfo* kernel : found) {
    for (const double sign : {1.0, -1.0}) {
      const std::int64_t keys = 2 * kernel->tile_k + 5;
      const verify::CaseMemory memory(tail_spec(*kernel, 1, keys, false));
      const Tensors& t = memory.tensors();
      verify::Random random(12);
      const auto with_sign = [&](double x) {
        return [&random, x] { return 8 * x * (std::fabs(random.normal()) + 0.01); };
      };
      fill_rows(t.q, 0, 0, memory.spec().q_len, with_sign(1.0));
      fill_rows(t.k, 0, 0, keys, with_sign(sign));
      run_and_compare(memory);
      if (HasFailure()) return;
    }
  }
}

// Every second varlen sequence has NaN in K and V. Its outputs are NaN, those of the sequences next
// to it must not be.
TEST_F(Hopper, IgnoresNanOfTheNextVarlenSequence) {
  const std::vector<const KernelInfo*> found = sm90_kernels();
  ASSERT_FALSE(found.empty()) << "this build has no kernel of family sm90";
  for (const KernelInfo* kernel : found) {
    for (const bool causal : {false, true}) {
      for (const bool q_varlen : {false, true}) {
        verify::CaseSpec spec = tail_spec(*kernel, 8, 2 * kernel->tile_k + 5, causal);
        spec.seed = causal ? 2 : 1;  // other lengths
        spec.kv_varlen = true;
        spec.q_varlen = q_varlen;
        const verify::CaseMemory memory(spec);
        const Tensors& t = memory.tensors();
        const auto* ends = static_cast<const std::int32_t*>(t.cu_seqlens_k.data);
        for (std::int64_t b = 1; b < spec.batch; b += 2) {
          for (const TensorView* view : {&t.k, &t.v}) {
            fill_rows(*view, b, ends[b], ends[b + 1] - ends[b], quiet_nan);
          }
        }
        // Rows of no sequence.
        for (const TensorView* view : {&t.k, &t.v}) {
          fill_rows(*view, 0, ends[spec.batch], view->shape[0] - ends[spec.batch], quiet_nan);
        }
        run_and_compare(memory);
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
