// Paged KV on the GPU: the same bits as contiguous KV, bad page ids, and append().
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

#include "core/numeric.h"
#include "gpu/support.h"
#include "plan/planner.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

constexpr std::int64_t kBatch = 2, kQHeads = 4, kKvHeads = 2, kKeys = 384, kDim = 64;
constexpr std::int32_t kUsed[kBatch] = {384, 217};

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::vector<std::byte> random_bf16(std::int64_t count, std::uint64_t seed) {
  verify::Random random(seed);
  std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
  for (std::uint16_t& x : values) x = core::bf16_of_float(static_cast<float>(random.normal()));
  return bytes_of(values);
}

std::vector<std::int32_t> shuffled(std::int64_t count, std::uint64_t seed) {
  verify::Random random(seed);
  std::vector<std::int32_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (std::int64_t i = count - 1; i > 0; --i) {
    std::swap(order[static_cast<std::size_t>(i)],
              order[static_cast<std::size_t>(random.below(i + 1))]);
  }
  return order;
}

/// Runs the views with a contiguous out and returns its bytes.
std::vector<std::byte> run_attention(Tensors t, const Options& options) {
  std::int64_t elements = 1;
  for (int i = 0; i < 4; ++i) elements *= t.q.shape[i];
  const DeviceBuffer out(static_cast<std::size_t>(elements) * 2);
  t.out =
      view(out.data(), DType::bf16, {t.q.shape[0], t.q.shape[1], t.q.shape[2], t.q.shape[3]}, kGpu);
  const Plan plan = plan_for(t, options);
  const TestWorkspace workspace(plan.workspace_bytes);
  require(run(plan, t, workspace.get()));
  require(workspace_status(workspace.get()));
  return out.download();
}

/// [batch, keys, heads, dim] memory of K or V and the same rows as shuffled pages.
struct Cache {
  explicit Cache(std::uint64_t seed)
      : host(random_bf16(kBatch * kKeys * kKvHeads * kDim, seed)), device(host) {}

  TensorView whole() const {
    return swap_axes(view(device.data(), DType::bf16, {kBatch, kKeys, kKvHeads, kDim}, kGpu), 1, 2);
  }
  /// Page p of the rows in order becomes page order[p].
  TensorView pages(std::int64_t page_size, const std::vector<std::int32_t>& order) {
    const auto page_bytes = static_cast<std::size_t>(page_size * kKvHeads * kDim * 2);
    std::vector<std::byte> moved(host.size());
    for (std::size_t p = 0; p < order.size(); ++p) {
      std::memcpy(moved.data() + static_cast<std::size_t>(order[p]) * page_bytes,
                  host.data() + p * page_bytes, page_bytes);
    }
    shuffled = std::make_unique<DeviceBuffer>(moved);
    return view(shuffled->data(), DType::bf16,
                {static_cast<std::int64_t>(order.size()), page_size, kKvHeads, kDim}, kGpu);
  }

  std::vector<std::byte> host;
  DeviceBuffer device;
  std::unique_ptr<DeviceBuffer> shuffled;
};

class PagedKvOnGpu : public GpuTest {};

TEST_F(PagedKvOnGpu, SameBitsAsContiguousKv) {
  Cache k(2), v(3);
  const DeviceBuffer used(bytes_of(std::vector<std::int32_t>(kUsed, kUsed + kBatch)));
  const TensorView used_k = view(used.data(), DType::i32, {kBatch}, kGpu);
  std::vector<const char*> tested{nullptr, "fwd_simt_bf16_d64_q64"};
  for (const KernelInfo& kernel :
       kernels_of(Operation::fwd, Family::sm90, Inputs::native, DType::bf16)) {
    if (kernel.head_dim == kDim && require(device_info(kGpu)).compute_capability == 90)
      tested.push_back(kernel.id);
  }
  // Steps of large tiles differ for pages of 16 keys and more, a power of two, and other pages.
  for (const KernelInfo& kernel :
       kernels_of(Operation::fwd, Family::sm80, Inputs::native, DType::bf16)) {
    if (kernel.head_dim == kDim && kernel.tile_q >= 128) tested.push_back(kernel.id);
  }
  for (const char* kernel : tested) {
    const bool hopper = kernel != nullptr && find_kernel(kernel)->family == Family::sm90;
    const bool prefill = hopper || (kernel != nullptr && find_kernel(kernel)->tile_q >= 128);
    for (const std::int64_t q_len : {1, 70, 300}) {
      if (q_len > 70 && !prefill) continue;  // the planner may choose by layout
      const DeviceBuffer q(random_bf16(kBatch * kQHeads * q_len * kDim, 1));
      const DeviceBuffer out(random_bf16(kBatch * kQHeads * q_len * kDim, 1));
      for (const int splits : {0, 1, 3}) {
        if (hopper && splits > 1) continue;
        Options options;
        options.causal = true;
        options.checked = true;
        options.num_splits = splits;
        options.kernel = kernel;
        Tensors t{.q = view(q.data(), DType::bf16, {kBatch, kQHeads, q_len, kDim}, kGpu),
                  .k = k.whole(),
                  .v = v.whole(),
                  .seqused_k = used_k};
        const std::vector<std::byte> want = run_attention(t, options);
        // For the plans only: run_attention() has its own.
        t.out = view(out.data(), DType::bf16, {kBatch, kQHeads, q_len, kDim}, kGpu);
        const KernelInfo* dense_kernel = plan_for(t, options).kernel;
        for (const std::int64_t page_size : {1, 3, 8, 16, 24, 64, 128, 192}) {
          const std::int64_t each = kKeys / page_size;
          const std::vector<std::int32_t> order = shuffled(kBatch * each, 4);
          const DeviceBuffer table(bytes_of(order));
          t.k = k.pages(page_size, order);
          t.v = v.pages(page_size, order);
          t.block_table = view(table.data(), DType::i32, {kBatch, each}, kGpu);
          // Small pages are slow to load by TMA: the planner may choose another kernel.
          if (plan_for(t, options).kernel != dense_kernel) {
            EXPECT_TRUE(kernel == nullptr && q_len > 1);
            continue;
          }
          EXPECT_TRUE(run_attention(t, options) == want)
              << page_size << " keys a page, " << q_len << " queries, " << splits << " splits, "
              << (kernel == nullptr ? "planner's kernel" : kernel);
        }
      }
    }
  }
}

TEST_F(PagedKvOnGpu, BadIdsAreReportedAndNeverUsed) {
  for (const std::int64_t q_len : {1, 70}) {
    for (const std::int32_t bad : {-1, INT32_MAX, INT32_MIN, 1 << 20}) {
      verify::CaseSpec spec = dense(DType::f16, 3, 4, 2, q_len, 96, 64);
      spec.page_size = 16;
      spec.options.checked = true;
      const verify::CaseMemory memory(spec);
      GpuCase gpu(memory);
      const TensorView& table = gpu.tensors().block_table;
      auto* entry = static_cast<std::int32_t*>(table.data) + table.strides[0] * 1 + 4;
      require(cudaMemcpy(entry, &bad, sizeof bad, cudaMemcpyHostToDevice), "cudaMemcpy");
      require(gpu.run(nullptr));
      const Status status = workspace_status(gpu.workspace().get());
      const std::string wanted = "block_table[1, 4] is " + std::to_string(bad);
      EXPECT_NE(status.message().find(wanted), std::string::npos) << status.message();
      EXPECT_TRUE(gpu.workspace().header_is_zero());
      // The next call with valid data is correct.
      expect_right(memory, gpu.direct(memory, nullptr), gpu.plan());
      EXPECT_TRUE(workspace_status(gpu.workspace().get()).ok());
    }
  }
}

/// A cache of nine keys for each of three sequences and up to four new keys, on the host and on the
/// GPU. Both must end with the same bytes. An 8-bit cache (`stored`) has a scale per two keys.
struct AppendPair {
  AppendPair(DType dtype, std::int64_t dim, bool paged, bool varlen, DType stored = DType::none) {
    const bool eight_bit = stored != DType::none;
    const DType cached = eight_bit ? stored : dtype;
    verify::Random random(5);
    const auto add = [&](TensorView AppendTensors::*member, const TensorView& shape) {
      TensorView t = shape;
      std::size_t bytes = static_cast<std::size_t>(size_of(t.dtype));
      for (int i = 0; i < t.rank; ++i) bytes *= static_cast<std::size_t>(t.shape[i]);
      t.data = reinterpret_cast<void*>(host.size());
      host.resize((host.size() + bytes + 255) / 256 * 256);
      offsets.*member = t;
    };
    const auto cache = [&](std::int64_t d) {
      return paged ? view(nullptr, cached, {8, 3, 2, d}) : view(nullptr, cached, {3, 2, 9, d});
    };
    const auto rows = [&](std::int64_t d) {
      return varlen ? view(nullptr, dtype, {8, 2, d}) : view(nullptr, dtype, {3, 2, 4, d});
    };
    add(&AppendTensors::k, cache(dim));
    add(&AppendTensors::v, cache(dim + 8));
    add(&AppendTensors::k_new, rows(dim));
    add(&AppendTensors::v_new, rows(dim + 8));
    for (std::byte& x : host) x = static_cast<std::byte>(random.bits());
    if (eight_bit) {  // random bits may be NaN
      for (const TensorView* t : {&offsets.k_new, &offsets.v_new}) {
        TensorView on_host = *t;
        on_host.data = host.data() + reinterpret_cast<std::uintptr_t>(t->data);
        verify::for_each_element(on_host, [&](std::int64_t at) {
          verify::store(on_host.data, dtype, at, 30 * random.normal());
        });
      }
      for (const auto member : {&AppendTensors::k_scale, &AppendTensors::v_scale}) {
        add(member, view(nullptr, DType::f32, {3, 2, 5}));
        std::vector<float> scales;
        for (int i = 0; i < 3 * 2 * 5; ++i) {
          scales.push_back(static_cast<float>(0.02 + random.uniform()));
        }
        std::memcpy(host.data() + reinterpret_cast<std::uintptr_t>((offsets.*member).data),
                    scales.data(), scales.size() * sizeof(float));
      }
      offsets.kv_scale_block = 2;
    }
    add(&AppendTensors::seqused_k, view(nullptr, DType::i32, {3}));
    if (paged) add(&AppendTensors::block_table, view(nullptr, DType::i32, {3, 3}));
    if (varlen) add(&AppendTensors::cu_seqlens_new, view(nullptr, DType::i32, {4}));
    set(&AppendTensors::seqused_k, {0, 5, 3});
    if (paged) set(&AppendTensors::block_table, {7, 0, 99, 6, 2, 5, 3, 1, 4});
    if (varlen) set(&AppendTensors::cu_seqlens_new, {0, 3, 3, 7});
  }

  void set(TensorView AppendTensors::*member, const std::vector<std::int32_t>& values) {
    std::memcpy(host.data() + reinterpret_cast<std::uintptr_t>((offsets.*member).data),
                values.data(), values.size() * sizeof(std::int32_t));
  }
  AppendTensors at(std::byte* base, Device device) const {
    AppendTensors t = offsets;
    for (TensorView* view : {&t.k, &t.v, &t.k_new, &t.v_new, &t.seqused_k, &t.block_table,
                             &t.cu_seqlens_new, &t.k_scale, &t.v_scale}) {
      if (!view->given()) continue;
      view->data = base + reinterpret_cast<std::uintptr_t>(view->data);
      view->device = device;
    }
    return t;
  }

  std::vector<std::byte> host;
  AppendTensors offsets;  // data holds the byte offset
};

TEST_F(PagedKvOnGpu, AppendMatchesTheCpu) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int64_t dim : {1, 5, 64, 128, 576}) {
      for (const bool paged : {false, true}) {
        for (const bool varlen : {false, true}) {
          AppendPair pair(dtype, dim, paged, varlen);
          const DeviceBuffer gpu(pair.host);
          const TestWorkspace workspace(kWorkspaceHeaderBytes);
          require(append(pair.at(gpu.data(), kGpu), workspace.get()));
          require(workspace_status(workspace.get()));
          EXPECT_TRUE(workspace.header_is_zero());
          std::vector<std::byte> want = pair.host;
          require(append(pair.at(want.data(), Device{})));
          EXPECT_TRUE(want != pair.host);
          EXPECT_TRUE(gpu.download() == want)
              << to_string(dtype) << " dim " << dim << (paged ? " paged" : "")
              << (varlen ? " varlen" : "");
        }
      }
    }
  }
}

TEST_F(PagedKvOnGpu, AppendQuantizesAsTheCpuDoes) {
  for (const DType stored : {DType::e4m3, DType::e5m2, DType::int8, DType::u8}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const std::int64_t dim : {5, 64, 128}) {
        for (const bool varlen : {false, true}) {
          const AppendPair pair(dtype, dim, true, varlen, stored);
          const DeviceBuffer gpu(pair.host);
          const TestWorkspace workspace(kWorkspaceHeaderBytes);
          require(append(pair.at(gpu.data(), kGpu), workspace.get()));
          require(workspace_status(workspace.get()));
          std::vector<std::byte> want = pair.host;
          require(append(pair.at(want.data(), Device{})));
          EXPECT_TRUE(want != pair.host);
          EXPECT_TRUE(gpu.download() == want) << to_string(dtype) << " to " << to_string(stored)
                                              << " dim " << dim << (varlen ? " varlen" : "");
        }
      }
    }
  }
}

TEST_F(PagedKvOnGpu, AppendReportsValuesThatCannotBeQuantized) {
  AppendPair pair(DType::f32, 64, true, false, DType::int8);
  const auto at = [&](const TensorView& t, std::int64_t index) {
    return reinterpret_cast<float*>(pair.host.data() + reinterpret_cast<std::uintptr_t>(t.data)) +
           index;
  };
  const auto reported = [&] {
    const DeviceBuffer gpu(pair.host);
    const TestWorkspace workspace(kWorkspaceHeaderBytes);
    require(append(pair.at(gpu.data(), kGpu), workspace.get()));
    return workspace_status(workspace.get()).message();
  };
  *at(pair.offsets.k_new, ((1 * 2 + 1) * 4 + 2) * 64 + 17) = NAN;  // sequence 1 has 5 keys
  EXPECT_NE(reported().find("k_new: the row for key 7 of batch 1, head 1"), std::string::npos)
      << reported();
  *at(pair.offsets.k_new, ((1 * 2 + 1) * 4 + 2) * 64 + 17) = 0.f;
  *at(pair.offsets.v_scale, (2 * 2 + 0) * 5 + 2) = -1.f;  // keys 4 and 5 of sequence 2, head 0
  EXPECT_NE(reported().find("v_scale: the scale of key "), std::string::npos) << reported();
}

TEST_F(PagedKvOnGpu, AppendSkipsAndReportsRowsThatDoNotFit) {
  struct Row {
    TensorView AppendTensors::*member;
    std::vector<std::int32_t> values;
    bool varlen;
    const char* wanted;
  };
  const auto used = &AppendTensors::seqused_k;
  const auto table = &AppendTensors::block_table;
  const auto ends = &AppendTensors::cu_seqlens_new;
  const Row rows[] = {{used, {0, -1, 3}, false, "seqused_k[1] is -1"},
                      {used, {0, 10, 3}, false, "seqused_k[1] is 10"},
                      {used, {0, 2147483647, 3}, false, "seqused_k[1] is 2147483647"},
                      {used, {0, 6, 3}, false, "seqused_k[1]: with its new keys sequence 1 has 10"},
                      {table, {7, 0, 99, 6, -1, 5, 3, 1, 4}, false, "block_table[1, 1] is -1"},
                      {table, {7, 8, 99, 6, 2, 5, 3, 1, 4}, false, "block_table[0, 1] is 8"},
                      {ends, {0, 3, 3, 9}, true, "cu_seqlens_new[3] is 9"},
                      {ends, {0, 3, 3, -2}, true, "cu_seqlens_new[3] is -2"}};
  for (const Row& row : rows) {
    SCOPED_TRACE(row.wanted);
    AppendPair pair(DType::f16, 64, true, row.varlen);
    pair.set(row.member, row.values);
    const DeviceBuffer gpu(pair.host);
    const TestWorkspace workspace(kWorkspaceHeaderBytes);
    require(append(pair.at(gpu.data(), kGpu), workspace.get()));
    const Status status = workspace_status(workspace.get());
    EXPECT_NE(status.message().find(row.wanted), std::string::npos) << status.message();
    EXPECT_TRUE(workspace.header_is_zero());
    // The inputs, which follow the cache, are unchanged.
    const std::vector<std::byte> after = gpu.download();
    const auto first_input = reinterpret_cast<std::uintptr_t>(pair.offsets.k_new.data);
    EXPECT_TRUE(std::equal(after.begin() + static_cast<std::ptrdiff_t>(first_input), after.end(),
                           pair.host.begin() + static_cast<std::ptrdiff_t>(first_input)));
    // Without a workspace there is no report, and append() writes the same rows.
    const DeviceBuffer quiet(pair.host);
    require(append(pair.at(quiet.data(), kGpu)));
    EXPECT_TRUE(quiet.download() == after);
  }
}

// Each step appends one key and runs attention with one query, in one stream. All rows together
// equal one causal call over all keys.
TEST_F(PagedKvOnGpu, DecodeLoopEqualsOneCall) {
  constexpr std::int64_t kSteps = 70, kPage = 16, kEach = 5;
  const std::int64_t row = kKvHeads * kDim;
  Options options;
  options.causal = true;
  options.reproducibility = Reproducibility::batch_invariant;
  const DeviceBuffer q(random_bf16(kBatch * kSteps * kQHeads * kDim, 11));
  const DeviceBuffer k(random_bf16(kBatch * kSteps * row, 12));
  const DeviceBuffer v(random_bf16(kBatch * kSteps * row, 13));
  const auto all = [&](const DeviceBuffer& memory, std::int64_t heads) {
    return swap_axes(view(memory.data(), DType::bf16, {kBatch, kSteps, heads, kDim}, kGpu), 1, 2);
  };
  const auto step_of = [](TensorView t, std::int64_t step) {
    t.data = static_cast<std::byte*>(t.data) + step * t.strides[2] * 2;
    t.shape[2] = 1;
    return t;
  };
  const std::vector<std::byte> want =
      run_attention({.q = all(q, kQHeads), .k = all(k, kKvHeads), .v = all(v, kKvHeads)}, options);

  const std::vector<std::int32_t> order = shuffled(kBatch * kEach, 14);
  const DeviceBuffer table(bytes_of(order));
  const DeviceBuffer k_pages(static_cast<std::size_t>(kBatch * kEach * kPage * row * 2));
  const DeviceBuffer v_pages(k_pages.bytes());
  Tensors t{.k = view(k_pages.data(), DType::bf16, {kBatch * kEach, kPage, kKvHeads, kDim}, kGpu),
            .v = view(v_pages.data(), DType::bf16, {kBatch * kEach, kPage, kKvHeads, kDim}, kGpu),
            .block_table = view(table.data(), DType::i32, {kBatch, kEach}, kGpu)};
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto have = static_cast<std::int32_t>(step);
    const DeviceBuffer before(bytes_of(std::vector<std::int32_t>(kBatch, have)));
    const DeviceBuffer now(bytes_of(std::vector<std::int32_t>(kBatch, have + 1)));
    require(append({.k_new = step_of(all(k, kKvHeads), step),
                    .v_new = step_of(all(v, kKvHeads), step),
                    .k = t.k,
                    .v = t.v,
                    .seqused_k = view(before.data(), DType::i32, {kBatch}, kGpu),
                    .block_table = t.block_table}));
    t.q = step_of(all(q, kQHeads), step);
    t.seqused_k = view(now.data(), DType::i32, {kBatch}, kGpu);
    const std::vector<std::byte> got = run_attention(t, options);
    for (std::int64_t head = 0; head < kBatch * kQHeads; ++head) {
      ASSERT_EQ(std::memcmp(got.data() + head * kDim * 2,
                            want.data() + (head * kSteps + step) * kDim * 2, kDim * 2),
                0)
          << "step " << step << " head " << head;
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
