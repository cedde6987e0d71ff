# One cycle model per kernel family, and their shared code.
file(GLOB FLASHCORE_MODELS CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/plan/model/*.cc)

# libflashcore: shared (exports the public API) and static (for the tools and tests, which also use
# internal functions). The objects are compiled once.
add_library(flashcore_objects OBJECT
  bindings/python/fastcall.cc
  bindings/python/polled_call.cc
  src/api/append.cc
  src/api/attention.cc
  src/api/block_mask.cc
  src/api/backward.cc
  src/api/c_api.cc
  src/api/c_block_mask.cc
  src/api/c_backward.cc
  src/api/c_convert.cc
  src/api/c_distributed.cc
  src/api/explain_mask.cc
  src/api/mask_rows.cc
  src/api/merge.cc
  src/api/quantize.cc
  src/api/status.cc
  src/api/validate/backward.cc
  src/api/validate/block_mask.cc
  src/api/validate/kv.cc
  src/api/validate/merge.cc
  src/api/validate/overlap.cc
  src/api/validate/problem.cc
  src/api/validate/quant.cc
  src/api/validate/tensor.cc
  src/api/version.cc
  src/backend/backend.cc
  src/backend/backward_params.cc
  src/backend/params.cc
  src/cpu/append.cc
  src/cpu/assert.cc
  src/cpu/backend.cc
  src/cpu/backward.cc
  src/cpu/combine.cc
  src/cpu/cpu_info.cc
  src/cpu/quantize.cc
  src/cpu/thread_pool.cc
  src/distributed/attention.cc
  src/distributed/choose.cc
  src/distributed/costs.cc
  src/distributed/decode.cc
  src/distributed/decode_plan.cc
  src/distributed/engine.cc
  src/distributed/explain.cc
  src/distributed/gather.cc
  src/distributed/heads.cc
  src/distributed/job.cc
  src/distributed/local.cc
  src/distributed/mask.cc
  src/distributed/ring.cc
  src/distributed/traffic.cc
  src/plan/backward.cc
  src/plan/cost.cc
  src/plan/devices.cc
  src/plan/explain.cc
  src/plan/kernel_table.cc
  src/plan/planner.cc
  src/plan/problem_line.cc
  src/plan/select.cc
  src/plan/split_kv.cc
  src/plan/workspace.cc
  ${FLASHCORE_MODELS}
  src/reference/cut_sums.cc
  src/reference/elements.cc
  src/reference/gradient_blocks.cc
  src/reference/gradient_pairs.cc
  src/reference/oracle.cc
  src/reference/oracle_bwd.cc
  src/reference/scores.cc
  src/reference/sums.cc
  src/verify/api.cc
  src/verify/discover.cc
  src/verify/discover_bwd.cc
  src/verify/gradient_call.cc
  src/verify/implementation.cc
  src/verify/implementation_bwd.cc
  src/verify/inputs/block.cc
  src/verify/inputs/call.cc
  src/verify/inputs/call_variants.cc
  src/verify/inputs/case.cc
  src/verify/inputs/case_lengths.cc
  src/verify/inputs/case_memory.cc
  src/verify/inputs/case_pages.cc
  src/verify/inputs/case_sizes.cc
  src/verify/inputs/compare.cc
  src/verify/inputs/compare_bwd.cc
  src/verify/inputs/format.cc
  src/verify/inputs/lengths.cc
  src/verify/inputs/probe_inputs.cc
  src/verify/probe_list.cc
  src/verify/probe_sequence.cc
  src/verify/run_probes.cc
  src/verify/probes/bounds.cc
  src/verify/probes/combine.cc
  src/verify/probes/coverage.cc
  src/verify/probes/dequant.cc
  src/verify/probes/grad_accumulate.cc
  src/verify/probes/grad_bounds.cc
  src/verify/probes/grad_coverage.cc
  src/verify/probes/grad_ds.cc
  src/verify/probes/grad_dv.cc
  src/verify/probes/grad_extremes.cc
  src/verify/probes/grad_layout.cc
  src/verify/probes/grad_mask.cc
  src/verify/probes/grad_options.cc
  src/verify/probes/grad_random.cc
  src/verify/probes/grad_sizes.cc
  src/verify/probes/grad_tail.cc
  src/verify/probes/gradient_axes.cc
  src/verify/probes/gradient_diagnosis.cc
  src/verify/probes/gradient_explanation.cc
  src/verify/probes/gradient_heads.cc
  src/verify/probes/gradient_mix.cc
  src/verify/probes/gradient_reading.cc
  src/verify/probes/gradient_patterns.cc
  src/verify/probes/gradient_terms.cc
  src/verify/probes/layout.cc
  src/verify/probes/lse.cc
  src/verify/probes/mask.cc
  src/verify/probes/random.cc
  src/verify/probes/score_encodings.cc
  src/verify/probes/score_reading.cc
  src/verify/probes/scores.cc
  src/verify/probes/softmax.cc
  src/verify/probes/uniform.cc
  src/verify/report/html.cc
  src/verify/report/json.cc
  src/verify/report/text.cc
  ${FLASHCORE_FINGERPRINT})
target_link_libraries(flashcore_objects PRIVATE flashcore_flags)
# For bindings/python/fastcall.h, which is not installed.
target_include_directories(flashcore_objects PRIVATE ${PROJECT_SOURCE_DIR})
if(NOT FLASHCORE_HAS_CUDA)
  target_sources(flashcore_objects PRIVATE src/backend/no_cuda.cc)
  # The text must not contain a semicolon, which would end the definition.
  set_source_files_properties(src/backend/no_cuda.cc PROPERTIES
    COMPILE_DEFINITIONS "FLASHCORE_NO_CUDA_REASON=\"${FLASHCORE_NO_CUDA_REASON}\"")
endif()
set(objects $<TARGET_OBJECTS:flashcore_objects> ${FLASHCORE_CPU_OBJECTS} ${FLASHCORE_REFERENCE_OBJECTS}
  ${FLASHCORE_CUDA_OBJECTS})

add_library(flashcore SHARED ${objects})
# The SOVERSION is the version of the C ABI: C programs of 0.1 run with this library
# (tests/consumer/abi_0_1). C++ programs must be compiled again for each minor version.
set_target_properties(flashcore PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION 0.1 LINKER_LANGUAGE CXX)
add_library(flashcore_static STATIC ${objects})
set_target_properties(flashcore_static PROPERTIES LINKER_LANGUAGE CXX)
foreach(library flashcore flashcore_static)
  target_include_directories(${library} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(${library} PUBLIC cxx_std_20)
  target_link_libraries(${library} PUBLIC Threads::Threads)
  if(FLASHCORE_HAS_CUDA)
    target_link_libraries(${library} PRIVATE CUDA::cudart_static)
  endif()
endforeach()

# Checks of FlashCore's kernels by internal functions. For the tools and tests, not in the library.
add_library(flashcore_check STATIC
  src/check/call_runner.cc
  src/check/check.cc
  src/check/check_bwd.cc
  src/check/coverage.cc
  src/check/gradient_memory.cc
  src/check/stage_scores.cc
  src/check/stage_splits.cc
  src/check/stages.cc
  src/check/trace.cc
  src/check/work_facts.cc)
target_link_libraries(flashcore_check PUBLIC flashcore_flags flashcore_static)
