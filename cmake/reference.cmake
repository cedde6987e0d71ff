# The inner loops of the oracle, compiled once per instruction set like the CPU kernels
# (cpu_kernels.cmake), with which they share no code.
set(FLASHCORE_REFERENCE_FLAGS_generic "")
set(isas generic)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND isas avx2 avx512)
  set(FLASHCORE_REFERENCE_FLAGS_avx2 -mavx2)
  set(FLASHCORE_REFERENCE_FLAGS_avx512 -mavx512f -mprefer-vector-width=512)
endif()
set(FLASHCORE_REFERENCE_OBJECTS "")
foreach(isa IN LISTS isas)
  add_library(flashcore_reference_${isa} OBJECT ${PROJECT_SOURCE_DIR}/src/reference/sums_${isa}.cc)
  # Not fused: all instruction sets give the same bits.
  set(optimize -O3)
  if(FLASHCORE_SANITIZE)
    set(optimize -O1)
  endif()
  target_compile_options(flashcore_reference_${isa} PRIVATE
    ${optimize} -ffp-contract=off ${FLASHCORE_REFERENCE_FLAGS_${isa}})
  target_link_libraries(flashcore_reference_${isa} PRIVATE flashcore_flags)
  list(APPEND FLASHCORE_REFERENCE_OBJECTS $<TARGET_OBJECTS:flashcore_reference_${isa}>)
endforeach()
