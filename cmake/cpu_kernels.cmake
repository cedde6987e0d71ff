# The CPU kernels: one source, compiled once per instruction set of the target architecture.
# Only these objects get such flags, and they export nothing that other code could call: see
# src/cpu/kernels/simd.h and scripts/checks/isa_leaks.
set(FLASHCORE_ISAS generic)
set(FLASHCORE_ISA_FLAGS_generic "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  list(APPEND FLASHCORE_ISAS neon)
  set(FLASHCORE_ISA_FLAGS_neon "")
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND FLASHCORE_ISAS avx2 avx512 vnni amx)
  set(FLASHCORE_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(FLASHCORE_ISA_FLAGS_avx512
    -mavx2 -mfma -mf16c -mavx512f -mavx512vl -mavx512bw -mavx512dq -mprefer-vector-width=512)
  set(FLASHCORE_ISA_FLAGS_vnni ${FLASHCORE_ISA_FLAGS_avx512} -mavx512vnni)
  set(FLASHCORE_ISA_FLAGS_amx ${FLASHCORE_ISA_FLAGS_avx512} -mamx-tile -mamx-bf16)
endif()
# flashcore_add_cpu_kernel(<target> <isa> <flags> [<optimization>]): the object library of one
# instruction set.
function(flashcore_add_cpu_kernel target isa flags)
  set(sources ${PROJECT_SOURCE_DIR}/src/cpu/kernels/target_${isa}.cc)
  # Not every instruction set has its own kernels for gradients.
  set(backward ${PROJECT_SOURCE_DIR}/src/cpu/kernels/target_${isa}_bwd.cc)
  if(EXISTS ${backward})
    list(APPEND sources ${backward})
  endif()
  add_library(${target} OBJECT ${sources})
  # Optimised in every build type: at -O0 a test of 20,000 problems would take a day. With a sanitizer
  # -O3 takes minutes to compile.
  set(optimize -O3)
  if(ARGC GREATER 3)
    set(optimize ${ARGV3})
  elseif(FLASHCORE_SANITIZE)
    set(optimize -O1)
  endif()
  # simd.h has explicit FMAs. The compiler would fuse other products in some instantiations only, and a
  # row's bits would depend on the number of rows beside it.
  target_compile_options(${target} PRIVATE
    ${optimize} -ffp-contract=off ${FLASHCORE_ISA_FLAGS_${isa}})
  target_link_libraries(${target} PRIVATE ${flags})
endfunction()

set(FLASHCORE_CPU_OBJECTS "")
foreach(isa IN LISTS FLASHCORE_ISAS)
  flashcore_add_cpu_kernel(flashcore_cpu_${isa} ${isa} flashcore_flags)
  list(APPEND FLASHCORE_CPU_OBJECTS $<TARGET_OBJECTS:flashcore_cpu_${isa}>)
endforeach()
