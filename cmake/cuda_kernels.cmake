# CUDA: finds an nvcc that can compile the kernels, and generates them from src/cuda/kernels.def.
#
# Sets FLASHCORE_HAS_CUDA and, if it is off, FLASHCORE_NO_CUDA_REASON. Writes
# generated/compiled_kernels.inc (one FLASHCORE_COMPILED(id) per kernel) and instantiation files: one
# per family, inputs and head dim, or several of these together; sm80 kernels without PTX have their
# own. More files would take longer to compile, because nvcc reads CUDA's headers for each file and
# architecture. Defines the object library flashcore_cuda.

set(FLASHCORE_MIN_NVCC 12.8)
set(FLASHCORE_HAS_CUDA OFF)
set(FLASHCORE_NO_CUDA_REASON "CUDA was switched off when this library was configured (preset \
cuda has it)")
if(NOT FLASHCORE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  # Object libraries set their own architectures below; CMake needs one to test the compiler.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90)
  endif()
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(FLASHCORE_NO_CUDA_REASON "no nvcc was found when this library was configured")
  else()
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS FLASHCORE_MIN_NVCC)
      set(FLASHCORE_NO_CUDA_REASON "nvcc was ${CMAKE_CUDA_COMPILER_VERSION} when this library was \
configured, and ${FLASHCORE_MIN_NVCC} is the oldest that can build the kernels")
    else()
      set(FLASHCORE_HAS_CUDA ON)
    endif()
  endif()
  if(FLASHCORE_CUDA STREQUAL "ON" AND NOT FLASHCORE_HAS_CUDA)
    message(FATAL_ERROR "FLASHCORE_CUDA=ON, but ${FLASHCORE_NO_CUDA_REASON}")
  endif()
endif()
if(FLASHCORE_HAS_CUDA)
  message(STATUS "CUDA kernels: yes, nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
else()
  message(STATUS "CUDA kernels: no, ${FLASHCORE_NO_CUDA_REASON}")
endif()

# The architectures of each family.
set(FLASHCORE_ARCHITECTURES_simt 75-real 80-real 90)  # 90: SASS, and PTX for later GPUs
set(FLASHCORE_ARCHITECTURES_sm80 80 90-real)  # 80: SASS, and PTX for 86, 89 and later GPUs
set(FLASHCORE_ARCHITECTURES_sm90 90a-real)  # only 90a has wgmma and setmaxnreg
# Kernels that use no feature of an architecture: one run of the front end gives PTX, and from it the
# machine code of all of them. A run for each would take half of the time.
set(FLASHCORE_SHARED_simt_fwd arch=compute_75,code=[sm_75,sm_80,sm_90,compute_75])
set(FLASHCORE_SHARED_simt_bwd ${FLASHCORE_SHARED_simt_fwd})
# Large tiles of sm80: they use no clusters, and are launched without PDL (cuda/launch.cc). 8-bit K/V
# are converted by instructions of sm_89.
set(FLASHCORE_SHARED_sm80_large arch=compute_80,code=[sm_80,sm_90,compute_80])
set(FLASHCORE_LARGE_TILE 64)  # core::is_large_tile()
if(FLASHCORE_ONLY_ARCHITECTURE)
  set(FLASHCORE_ARCHITECTURES_simt ${FLASHCORE_ONLY_ARCHITECTURE}-real)
  set(FLASHCORE_ARCHITECTURES_sm80 ${FLASHCORE_ONLY_ARCHITECTURE}-real)
endif()
# A family's folder and namespace have the family's name. The header fwd_kernel.cuh in the folder
# defines fwd_kernel<Config>, bwd_kernel.cuh bwd_kernel<BwdConfig>; in simt, fwd.cuh and bwd.cuh.
# fused_kernel.cuh defines fused_kernel<FusedConfig>, for ids that end with _fused.
# Families with another kernel for calls that are not plain (cuda/kernel_entry.h).
set(FLASHCORE_GENERAL_sm80_fwd fwd_kernel_general)
set(FLASHCORE_GENERAL_sm90_fwd fwd_kernel_general)
set(FLASHCORE_GENERAL_sm80_bwd bwd_kernel_general)
set(FLASHCORE_GENERAL_sm90_bwd bwd_kernel_general)
# Families with another kernel for calls with a bias: a function that returns its address.
set(FLASHCORE_BIAS_sm90_fwd bias_kernel)
# Families with another kernel for calls with a softcap: a function likewise.
set(FLASHCORE_SOFTCAP_sm90_fwd softcap_kernel)
# Families with another kernel for calls with a boolean mask only: a function likewise.
set(FLASHCORE_MASKED_sm80_fwd masked_kernel)
# Families with other kernels for calls with key ranges: a function of the entry.
set(FLASHCORE_RANGES_sm90_fwd ranges_kernel)
# The template that takes a kernel's shape, by the column `inputs`.
set(FLASHCORE_CONFIG_native Config)
set(FLASHCORE_CONFIG_kv8 Kv8Config)
set(FLASHCORE_CONFIG_fp8 Fp8Config)
# Kernels that read the dtype at run time: rows that differ by dtype only share one kernel.
set(FLASHCORE_ANY_DTYPE simt_native sm80_kv8)
# Families whose template takes v_dim behind head_dim. In the others both are equal.
set(FLASHCORE_TAKES_V_DIM sm90_bwd)
# Files that are compiled together, and the name of that file. Each takes less time than the longest
# file.
set(FLASHCORE_TOGETHER
  "simt_d[0-9]+" simt
  "bwd_simt_d[0-9]+" bwd_simt
  "bwd_sm80_d(64|96|128)" bwd_sm80_to_d128
  "bwd_sm80_d(192|256)" bwd_sm80_to_d256
  "sm80_kv8_d(64|128)" sm80_kv8_to_d128
  "sm80_large_d(64|96|128)" sm80_large_to_d128
  "sm80_large_d(192|256)" sm80_large_to_d256
  "sm80_d(64|96|128|192|256)" sm80)
# Kernels that may spill registers.
set(FLASHCORE_MAY_SPILL simt)
set(FLASHCORE_ELEMENT_f32 float)
set(FLASHCORE_ELEMENT_f16 __half)
set(FLASHCORE_ELEMENT_bf16 __nv_bfloat16)

function(flashcore_file_of group result)
  set(rules ${FLASHCORE_TOGETHER})
  while(rules)
    list(POP_FRONT rules pattern file)
    if(group MATCHES "^${pattern}$")
      set(group ${file})
    endif()
  endwhile()
  set(${result} ${group} PARENT_SCOPE)
endfunction()

set(compiled "// Written by cmake/cuda_kernels.cmake from src/cuda/kernels.def.\n")
set(groups "")
if(FLASHCORE_HAS_CUDA)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
               ${PROJECT_SOURCE_DIR}/src/cuda/kernels.def)
  file(STRINGS ${PROJECT_SOURCE_DIR}/src/cuda/kernels.def rows REGEX "^FLASHCORE_KERNEL\\(")
  foreach(row IN LISTS rows)
    string(REGEX REPLACE "^FLASHCORE_KERNEL\\((.*)\\)$" "\\1" row "${row}")
    string(REGEX REPLACE " *, *" ";" row "${row}")
    list(GET row 0 id)
    if(NOT id MATCHES "${FLASHCORE_KERNELS}")
      continue()
    endif()
    list(POP_FRONT row id op family inputs dtype head_dim v_dim tile_q tile_k stages warp_rows threads
         smem code)
    set(takes_v_dim FALSE)
    if(${family}_${op} IN_LIST FLASHCORE_TAKES_V_DIM)
      set(takes_v_dim TRUE)
    endif()
    if((NOT v_dim EQUAL head_dim AND NOT takes_v_dim)
       OR (op STREQUAL "bwd" AND NOT inputs STREQUAL "native"))
      message(FATAL_ERROR "${id}: no kernel template takes op ${op} with dims ${head_dim}/${v_dim}")
    endif()
    string(APPEND compiled "FLASHCORE_COMPILED(${id})\n")
    set(shape ${tile_q} ${tile_k} ${stages} ${warp_rows} ${threads})
    if(takes_v_dim)
      list(PREPEND shape ${v_dim})
    endif()
    list(PREPEND shape ${head_dim})
    if(NOT ${family}_${inputs} IN_LIST FLASHCORE_ANY_DTYPE)
      list(PREPEND shape ${FLASHCORE_ELEMENT_${dtype}})
    endif()
    list(JOIN shape ", " shape)
    set(group ${family}_d${head_dim})
    if(NOT inputs STREQUAL "native")
      set(group ${family}_${inputs}_d${head_dim})
    endif()
    set(shared_by ${family}_${op})
    if(family STREQUAL "sm80" AND op STREQUAL "fwd" AND inputs STREQUAL "native"
       AND NOT tile_q LESS FLASHCORE_LARGE_TILE)
      set(shared_by sm80_large)
      set(group sm80_large_d${head_dim})
    endif()
    set(config ${FLASHCORE_CONFIG_${inputs}})
    set(storage SharedStorage)
    if(family STREQUAL "sm80" AND code STREQUAL "sass")
      string(APPEND group _sass)
    endif()
    if(op STREQUAL "bwd")
      set(group bwd_${group})
      set(config BwdConfig)
      set(storage BwdStorage)
    endif()
    set(general ${op}_kernel)
    if(DEFINED FLASHCORE_GENERAL_${family}_${op})
      set(general ${FLASHCORE_GENERAL_${family}_${op}})
    endif()
    set(bias "&${family}::${general}<Config_${id}>")
    if(DEFINED FLASHCORE_BIAS_${family}_${op})
      set(bias "${family}::${FLASHCORE_BIAS_${family}_${op}}<Config_${id}>()")
    endif()
    set(softcap "&${family}::${general}<Config_${id}>")
    if(DEFINED FLASHCORE_SOFTCAP_${family}_${op})
      set(softcap "${family}::${FLASHCORE_SOFTCAP_${family}_${op}}<Config_${id}>()")
    endif()
    set(masked "&${family}::${general}<Config_${id}>")
    if(DEFINED FLASHCORE_MASKED_${family}_${op})
      set(masked "${family}::${FLASHCORE_MASKED_${family}_${op}}<Config_${id}>()")
    endif()
    set(ranges "&${family}::${general}<Config_${id}>")
    if(DEFINED FLASHCORE_RANGES_${family}_${op})
      set(ranges "${family}::${FLASHCORE_RANGES_${family}_${op}}<Config_${id}>(entry)")
    endif()
    set(form ${op})
    set(plain ${op}_kernel)
    if(id MATCHES "_fused$")
      set(form fused)
      string(APPEND group _fused)
      set(config FusedConfig)
      set(plain fused_kernel)
      set(general finish_dq)
      set(bias "&${family}::finish_dq<Config_${id}>")
      set(softcap "${bias}")
      set(masked "${bias}")
      set(ranges "${bias}")
    endif()
    flashcore_file_of(${group} group)
    list(APPEND groups ${group})
    set(group_family_${group} ${family})
    set(group_architectures_${group} ${FLASHCORE_ARCHITECTURES_${family}})
    if(code STREQUAL "sass")
      list(TRANSFORM group_architectures_${group} REPLACE "^([0-9]+)$" "\\1-real")
    endif()
    set(group_code_${group} "${FLASHCORE_SHARED_${shared_by}}")
    set(group_form_${group} ${form})
    string(APPEND group_text_${group} "
using Config_${id} = ${family}::${config}<${shape}>;
static_assert(sizeof(${family}::${storage}<Config_${id}>) == ${smem},
              \"${id}: kernels.def states another size of shared memory\");
const void* entry_${id}(KernelEntry entry) {
  return reinterpret_cast<const void*>(
      entry == KernelEntry::plain     ? &${family}::${plain}<Config_${id}>
      : entry == KernelEntry::bias    ? ${bias}
      : entry == KernelEntry::softcap ? ${softcap}
      : entry == KernelEntry::masked  ? ${masked}
      : entry == KernelEntry::general ? &${family}::${general}<Config_${id}>
                                      : ${ranges});
}
")
  endforeach()
endif()
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/compiled_kernels.inc CONTENT "${compiled}")

if(FLASHCORE_HAS_CUDA)
  # Kernels for several architectures are most of the library. Without compression it is more than
  # three times as large. The driver decompresses a kernel once, when it loads it.
  target_compile_options(flashcore_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  add_library(flashcore_cuda OBJECT
    ${PROJECT_SOURCE_DIR}/src/cuda/backend.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/device.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/launch.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/launch_backward.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/registry.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/timing.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/sm90/make_params.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/sm90/tensor_map.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/common/combine.cu
    ${PROJECT_SOURCE_DIR}/src/cuda/common/append.cu
    ${PROJECT_SOURCE_DIR}/src/cuda/common/backward.cu
    ${PROJECT_SOURCE_DIR}/src/cuda/common/pack_mask.cu
    ${PROJECT_SOURCE_DIR}/src/cuda/common/quantize.cu)
  set_target_properties(flashcore_cuda PROPERTIES
    CUDA_ARCHITECTURES "${FLASHCORE_ARCHITECTURES_simt}")
  target_link_libraries(flashcore_cuda PRIVATE flashcore_flags)
  target_include_directories(flashcore_cuda PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  # Only the Hopper kernels need it.
  add_library(flashcore_repair OBJECT ${PROJECT_SOURCE_DIR}/src/cuda/simt/repair.cu)
  set_target_properties(flashcore_repair PROPERTIES CUDA_ARCHITECTURES 90-real)
  target_link_libraries(flashcore_repair PRIVATE flashcore_flags)
  set(FLASHCORE_CUDA_OBJECTS $<TARGET_OBJECTS:flashcore_cuda> $<TARGET_OBJECTS:flashcore_repair>)
  list(REMOVE_DUPLICATES groups)
  foreach(group IN LISTS groups)
    set(family ${group_family_${group}})
    set(header ${group_form_${group}}_kernel)
    if(family STREQUAL "simt")
      set(header ${group_form_${group}})
    endif()
    set(source ${PROJECT_BINARY_DIR}/generated/${group}.cu)
    file(CONFIGURE OUTPUT ${source} CONTENT
"// Written by cmake/cuda_kernels.cmake from src/cuda/kernels.def.
#include \"cuda/${family}/${header}.cuh\"
#include \"cuda/kernel_entry.h\"

namespace flashcore::cuda {
${group_text_${group}}
}  // namespace flashcore::cuda
")
    add_library(flashcore_${group} OBJECT ${source})
    if(group_code_${group} AND NOT FLASHCORE_ONLY_ARCHITECTURE AND NOT FLASHCORE_EMULATOR)
      set_target_properties(flashcore_${group} PROPERTIES CUDA_ARCHITECTURES OFF)
      target_compile_options(flashcore_${group} PRIVATE --generate-code=${group_code_${group}})
    else()
      set_target_properties(flashcore_${group} PROPERTIES
        CUDA_ARCHITECTURES "${group_architectures_${group}}")
    endif()
    target_compile_options(flashcore_${group} PRIVATE -Xptxas=-v)  # logs registers and spills
    if(NOT family IN_LIST FLASHCORE_MAY_SPILL AND NOT FLASHCORE_ASSERTS AND NOT FLASHCORE_FAULTS)
      target_compile_options(flashcore_${group} PRIVATE "SHELL:-Xptxas -warn-spills,-Werror")
    endif()
    target_link_libraries(flashcore_${group} PRIVATE flashcore_flags)
    list(APPEND FLASHCORE_CUDA_OBJECTS $<TARGET_OBJECTS:flashcore_${group}>)
  endforeach()
  find_package(CUDAToolkit REQUIRED)
endif()
