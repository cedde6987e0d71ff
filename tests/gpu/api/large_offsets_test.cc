// Element offsets past 2^31 and byte offsets past 2^33: small tensors with huge strides in one
// large allocation give the same bits as contiguous ones.
#include <cstring>
#include <stdexcept>

#include "gpu/support.h"

namespace flashcore::gpu_test {
namespace {

// Distance of two slices: the second begins past element 2^31. Not a power of two, so that an
// offset without its high word addresses other data in the arena.
constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 12288;
constexpr std::size_t kSlotBytes = std::size_t{4} << 20;  // room for one slice of one tensor
constexpr std::size_t kSlots = 6;
constexpr std::size_t kArenaBytes = static_cast<std::size_t>(kFar) * 4 + kSlots * kSlotBytes;

struct FarCase {
  const char* name;
  int axis;  // axis of [batch, heads, rows, ...] with the huge stride
  verify::CaseSpec spec;
};

void PrintTo(const FarCase& c, std::ostream* out) { *out << c.name; }

std::vector<FarCase> far_cases() {
  verify::CaseSpec heads = dense(DType::f16, 1, 2, 2, 70, 130, 64);
  verify::CaseSpec batches = dense(DType::bf16, 2, 2, 1, 70, 130, 128);
  verify::CaseSpec rows = dense(DType::f32, 1, 1, 1, 2, 2, 64);
  heads.options.num_splits = 2;
  heads.bias = {true, true, true, true};
  heads.bias_f32 = heads.out_f32 = true;
  batches.options.causal = true;
  batches.mask = {true, true, true, true};
  for (verify::CaseSpec* spec : {&heads, &batches, &rows}) spec->lse = true;
  return {{"heads", 1, heads}, {"batches", 0, batches}, {"rows", 2, rows}};
}

class LargeOffsets : public GpuTest, public ::testing::WithParamInterface<FarCase> {};

/// Copies a contiguous tensor of two slices along `axis` into the arena, the second slice kFar
/// elements after the first, and returns the new view.
TensorView copy_far(const TensorView& compact, int axis, std::byte* slot) {
  TensorView far = compact;
  far.data = slot;
  std::int64_t outer = 1;
  for (int i = 0; i < axis; ++i) outer *= compact.shape[i];
  if (outer != 1 || compact.shape[axis] != 2) throw std::runtime_error("not two slices");
  far.strides[axis] = kFar;
  const auto size = static_cast<std::size_t>(size_of(compact.dtype));
  const auto slice = static_cast<std::size_t>(compact.strides[axis]) * size;
  if (slice > kSlotBytes) throw std::runtime_error("the slice is larger than its slot");
  for (std::size_t i = 0; i < 2; ++i) {
    require(cudaMemcpy(slot + i * static_cast<std::size_t>(kFar) * size,
                       static_cast<const std::byte*>(compact.data) + i * slice, slice,
                       cudaMemcpyDeviceToDevice),
            "cudaMemcpy");
  }
  return far;
}

std::vector<std::byte> gather(const TensorView& far, int axis, std::size_t slice_elements) {
  const std::size_t size = static_cast<std::size_t>(size_of(far.dtype));
  std::vector<std::byte> host(2 * slice_elements * size);
  for (std::size_t i = 0; i < 2; ++i) {
    require(cudaMemcpy(host.data() + i * slice_elements * size,
                       static_cast<const std::byte*>(far.data) +
                           i * static_cast<std::size_t>(far.strides[axis]) * size,
                       slice_elements * size, cudaMemcpyDeviceToHost),
            "cudaMemcpy");
  }
  return host;
}

TEST_P(LargeOffsets, GiveTheBitsOfCompactTensors) {
  std::size_t free_bytes = 0, total_bytes = 0;
  require(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  if (free_bytes < kArenaBytes + (std::size_t{1} << 28)) {
    GTEST_SKIP() << "needs " << (kArenaBytes >> 30) + 1 << " GiB of free GPU memory, there are "
                 << (free_bytes >> 30);
  }
  const int axis = GetParam().axis;
  const verify::CaseMemory memory(GetParam().spec);
  GpuCase gpu(memory);
  const std::vector<std::byte> compact_block = gpu.direct(memory, nullptr);
  expect_right(memory, compact_block, gpu.plan());

  const DeviceBuffer arena(kArenaBytes);
  gpu.load(memory);
  Tensors far = gpu.tensors();
  std::size_t slot = 0;
  const auto next_slot = [&] { return arena.data() + kSlotBytes * slot++; };
  far.out = copy_far(far.out, axis, next_slot());
  far.lse = copy_far(far.lse, axis, next_slot());
  far.q = copy_far(far.q, axis, next_slot());
  far.k = copy_far(far.k, axis, next_slot());
  far.v = copy_far(far.v, axis, next_slot());
  if (far.bias.given()) far.bias = copy_far(far.bias, axis, next_slot());
  if (far.mask.given()) far.mask = copy_far(far.mask, axis, next_slot());
  ASSERT_LE(slot, kSlots);
  const Plan plan = plan_for(far, memory.spec().options);
  EXPECT_EQ(plan.kernel, gpu.plan().kernel);
  const TestWorkspace workspace(plan.workspace_bytes);
  require(run(plan, far, workspace.get()));
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");

  for (const auto& [far_view, compact_view] :
       {std::pair{far.out, memory.tensors().out}, std::pair{far.lse, memory.tensors().lse}}) {
    const auto elements = static_cast<std::size_t>(compact_view.strides[axis]);
    const std::vector<std::byte> got = gather(far_view, axis, elements);
    const std::byte* want =
        compact_block.data() +
        (static_cast<const std::byte*>(compact_view.data) - memory.bytes().data());
    EXPECT_EQ(std::memcmp(got.data(), want, got.size()), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Axes, LargeOffsets, ::testing::ValuesIn(far_cases()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace flashcore::gpu_test
