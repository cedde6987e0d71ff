// Registration and launch of kernels: what nvcc's host code and the library call.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "emulator/machine/grid.h"
#include "emulator/runtime/device.h"
#include "emulator/runtime/kernels.h"
#include "emulator/runtime/stream.h"

namespace flashcore::emulator {
namespace {

struct Launch {
  dim3 grid, block;
  dim3 cluster{1, 1, 1};
  std::size_t dynamic_shared = 0;
  cudaStream_t stream = nullptr;
};

std::vector<Launch>& pushed_configurations() {
  thread_local std::vector<Launch> pushed;
  return pushed;
}

Dim dim_of(const dim3& from) { return {from.x, from.y, from.z}; }

bool is_valid(const Launch& launch, const Kernel& kernel, const Program& program) {
  const DeviceModel& device = device_model();
  const std::uint64_t threads = dim_of(launch.block).count(),
                      cluster = dim_of(launch.cluster).count();
  const auto shared = static_cast<std::size_t>(device.shared_per_block);
  return threads >= 1 && threads <= 1024 && dim_of(launch.grid).count() >= 1 &&
         (program.max_threads == 0 || threads <= static_cast<std::uint64_t>(program.max_threads)) &&
         launch.dynamic_shared <= static_cast<std::size_t>(kernel.max_dynamic_shared) &&
         program.shared_bytes + launch.dynamic_shared <= shared && cluster >= 1 && cluster <= 8 &&
         launch.grid.x % launch.cluster.x == 0 && (cluster == 1 || device.compute_capability >= 90);
}

cudaError_t run(const Launch& launch, const Program& program,
                const std::vector<std::uint8_t>& params) {
  Grid grid;
  grid.program = &program;
  grid.dim = dim_of(launch.grid);
  grid.block = dim_of(launch.block);
  grid.cluster = dim_of(launch.cluster);
  grid.dynamic_shared_bytes = launch.dynamic_shared;
  grid.compute_capability = device_model().compute_capability;
  grid.params = params;
  grid.schedule = {next_seed(), resident_ctas(), finds_races()};
  const std::string report = grid.run();
  if (report.empty()) return cudaSuccess;
  std::fprintf(stderr, "emulator: %s\n", report.c_str());
  break_device(cudaErrorLaunchFailure);
  return cudaErrorLaunchFailure;
}

cudaError_t launch_kernel(const Launch& launch, const void* entry, void** arguments) {
  Kernel* kernel = find_kernel(entry);
  if (kernel == nullptr) return remember(cudaErrorInvalidDeviceFunction);
  const Program* program = nullptr;
  try {
    program = &program_of(*kernel);
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "emulator: %s (kernel %s)\n", error.what(), kernel->name.c_str());
    return remember(cudaErrorNoKernelImageForDevice);
  }
  if (!is_valid(launch, *kernel, *program)) return remember(cudaErrorInvalidConfiguration);
  std::vector<std::uint8_t> params(program->param_bytes);
  for (std::size_t k = 0; k < program->param_offsets.size(); ++k) {
    std::memcpy(params.data() + program->param_offsets[k], arguments[k], program->param_sizes[k]);
  }
  return submit(launch.stream, cudaGraphNodeTypeKernel,
                [launch, program, params] { return run(launch, *program, params); });
}

}  // namespace
}  // namespace flashcore::emulator

using namespace flashcore::emulator;  // NOLINT: the API's functions are global

extern "C" {

cudaError_t cudaLaunchKernel(const void* entry, dim3 grid, dim3 block, void** arguments,
                             std::size_t shared, cudaStream_t stream) {
  Launch launch{grid, block};
  launch.dynamic_shared = shared;
  launch.stream = stream;
  return launch_kernel(launch, entry, arguments);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* entry,
                                void** arguments) {
  Launch launch{config->gridDim, config->blockDim};
  launch.dynamic_shared = config->dynamicSmemBytes;
  launch.stream = config->stream;
  for (unsigned k = 0; k < config->numAttrs; ++k) {
    if (config->attrs[k].id != cudaLaunchAttributeClusterDimension) continue;
    const auto& cluster = config->attrs[k].val.clusterDim;
    launch.cluster = dim3(cluster.x, cluster.y, cluster.z);
  }
  return launch_kernel(launch, entry, arguments);
}

void** __cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void** binary, const char* host, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  register_kernel(binary, host, name);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared,
                                     CUstream_st* stream) {
  Launch launch{grid, block};
  launch.dynamic_shared = shared;
  launch.stream = stream;
  pushed_configurations().push_back(launch);
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  const Launch launch = pushed_configurations().back();
  pushed_configurations().pop_back();
  *grid = launch.grid;
  *block = launch.block;
  *shared = launch.dynamic_shared;
  *static_cast<cudaStream_t*>(stream) = launch.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* entry) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(entry));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               std::size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared,
                          stream);
}

}  // extern "C"
