# libflashcore: shared (exports the public API) and static (for the tools and tests, which also see
# the inside). The objects are compiled once.
add_library(flashcore_objects OBJECT
  src/api/attention.cc
  src/api/c_api.cc
  src/api/overlap.cc
  src/api/polled_run.cc
  src/api/status.cc
  src/api/tensor_checks.cc
  src/api/validate.cc
  src/api/validate_merge.cc
  src/api/layout.cc
  src/api/quantize.cc
  src/api/scales.cc
  src/api/append.cc
  src/api/version.cc
  src/backend/backend.cc
  src/backend/params.cc
  src/cpu/assert.cc
  src/cpu/combine.cc
  src/cpu/append.cc
  src/cpu/quantize.cc
  src/cpu/cpu_backend.cc
  src/cpu/cpu_info.cc
  src/cpu/thread_pool.cc
  src/plan/device_info.cc
  src/plan/explain.cc
  src/plan/kernel_table.cc
  src/plan/planner.cc
  src/plan/split_kv.cc
  src/plan/tuning_cpu.cc
  src/plan/tuning_gpu.cc
  src/plan/tuning_sm80.cc
  src/plan/tuning_sm90.cc
  src/reference/oracle.cc
  src/verify/call.cc
  src/verify/case.cc
  src/verify/case_lengths.cc
  src/verify/case_memory.cc
  src/verify/case_pages.cc
  src/verify/case_sizes.cc
  src/verify/compare.cc
  src/verify/discover.cc
  src/verify/format.cc
  src/verify/ladder.cc
  src/verify/ladder_parts.cc
  src/verify/lengths.cc
  src/verify/probe_inputs.cc
  src/verify/probes.cc
  src/verify/report.cc
  src/verify/report_html.cc
  src/verify/rung_bounds.cc
  src/verify/rung_combine.cc
  src/verify/rung_coverage.cc
  src/verify/rung_dequant.cc
  src/verify/rung_layout.cc
  src/verify/rung_lse.cc
  src/verify/rung_mask.cc
  src/verify/rung_random.cc
  src/verify/rung_scores.cc
  src/verify/rung_softmax.cc
  src/verify/rung_uniform.cc
  src/verify/score_codes.cc
  src/verify/score_reading.cc
  src/verify/subject.cc
  src/verify/verify_api.cc
  ${FLASHCORE_FINGERPRINT})
target_link_libraries(flashcore_objects PRIVATE flashcore_flags)
if(NOT FLASHCORE_HAS_CUDA)
  target_sources(flashcore_objects PRIVATE src/backend/no_cuda.cc)
  # The text must not contain a semicolon: it would end the definition.
  set_source_files_properties(src/backend/no_cuda.cc PROPERTIES
    COMPILE_DEFINITIONS "FLASHCORE_NO_CUDA_REASON=\"${FLASHCORE_NO_CUDA_REASON}\"")
endif()
set(objects $<TARGET_OBJECTS:flashcore_objects> ${FLASHCORE_CPU_OBJECTS} ${FLASHCORE_CUDA_OBJECTS})

add_library(flashcore SHARED ${objects})
set_target_properties(flashcore PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
  LINKER_LANGUAGE CXX)
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

# Checks of our own kernels from the inside: for the tools and tests, not part of the library.
add_library(flashcore_verify STATIC
  src/verify/call_runner.cc
  src/verify/check.cc
  src/verify/coverage.cc
  src/verify/stage_scores.cc
  src/verify/stage_splits.cc
  src/verify/stages.cc
  src/verify/trace.cc
  src/verify/work_facts.cc)
target_link_libraries(flashcore_verify PUBLIC flashcore_flags flashcore_static)
