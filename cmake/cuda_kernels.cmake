# The CUDA part: is there an nvcc that can build it, and which kernels does it build?
#
# Sets FLASHCORE_HAS_CUDA and, where it is off, FLASHCORE_NO_CUDA_REASON. Writes
# generated/compiled_kernels.inc (one FLASHCORE_COMPILED(id) per kernel) and one instantiation file
# per family and head dim (more of them would take longer: each has to read CUDA's headers, for every
# architecture); defines the object library flashcore_cuda.

set(FLASHCORE_MIN_NVCC 12.8)
set(FLASHCORE_HAS_CUDA OFF)
set(FLASHCORE_NO_CUDA_REASON "CUDA was switched off when this library was configured (preset \
cuda has it)")
if(NOT FLASHCORE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  # Decided per object library below; CMake only wants some value to test the compiler with.
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

# Which family runs where, and the C++ types of its dtypes.
set(FLASHCORE_ARCHITECTURES_simt 75-real 80-real 90)  # 90: machine code and PTX for what comes after
set(FLASHCORE_ARCHITECTURES_sm80 80 90-real)  # 80: machine code, and PTX for 86, 89 and what comes after
set(FLASHCORE_ARCHITECTURES_sm90 90a-real)  # wgmma and setmaxnreg are of this architecture alone
set(FLASHCORE_ARCHITECTURES_sm80_8bit ${FLASHCORE_ARCHITECTURES_sm80})
set(FLASHCORE_ARCHITECTURES_sm90_e4m3 ${FLASHCORE_ARCHITECTURES_sm90})
if(FLASHCORE_ONLY_ARCHITECTURE)
  set(FLASHCORE_ARCHITECTURES_simt ${FLASHCORE_ONLY_ARCHITECTURE}-real)
  set(FLASHCORE_ARCHITECTURES_sm80 ${FLASHCORE_ONLY_ARCHITECTURE}-real)
  set(FLASHCORE_ARCHITECTURES_sm80_8bit ${FLASHCORE_ONLY_ARCHITECTURE}-real)
endif()
# Families that ask for the dtype at run time: their kernels differ by shape only, and rows that
# differ by dtype only have one kernel in common.
set(FLASHCORE_ANY_DTYPE simt sm80_8bit)
# Where a family's sources are, and the template of its shapes.
foreach(family simt sm80 sm90)
  set(FLASHCORE_FOLDER_${family} ${family})
  set(FLASHCORE_CONFIG_${family} Config)
endforeach()
set(FLASHCORE_HEADER_simt fwd)
foreach(family sm80 sm80_8bit sm90 sm90_e4m3)
  set(FLASHCORE_HEADER_${family} fwd_kernel)
endforeach()
set(FLASHCORE_FOLDER_sm80_8bit sm80)
set(FLASHCORE_CONFIG_sm80_8bit Kv8Config)
set(FLASHCORE_FOLDER_sm90_e4m3 sm90)
set(FLASHCORE_CONFIG_sm90_e4m3 Fp8Config)
set(FLASHCORE_ELEMENT_f32 float)
set(FLASHCORE_ELEMENT_f16 __half)
set(FLASHCORE_ELEMENT_bf16 __nv_bfloat16)

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
    list(GET row 1 family)
    list(GET row 2 dtype)
    list(GET row 3 head_dim)
    list(GET row 4 tile_q)
    list(GET row 5 tile_k)
    list(GET row 6 stages)
    list(GET row 7 warp_rows)
    list(GET row 8 threads)
    list(GET row 9 smem)
    string(APPEND compiled "FLASHCORE_COMPILED(${id})\n")
    set(shape ${head_dim} ${tile_q} ${tile_k} ${stages} ${warp_rows} ${threads})
    if(NOT family IN_LIST FLASHCORE_ANY_DTYPE)
      list(PREPEND shape ${FLASHCORE_ELEMENT_${dtype}})
    endif()
    list(JOIN shape ", " shape)
    set(group ${family}_d${head_dim})
    list(APPEND groups ${group})
    set(group_family_${group} ${family})
    set(folder ${FLASHCORE_FOLDER_${family}})  # which is the namespace too
    string(APPEND group_text_${group} "
using Config_${id} = ${folder}::${FLASHCORE_CONFIG_${family}}<${shape}>;
static_assert(sizeof(${folder}::SharedStorage<Config_${id}>) == ${smem},
              \"${id}: kernels.def states another size of shared memory\");
const void* entry_${id}() {
  return reinterpret_cast<const void*>(&${folder}::fwd_kernel<Config_${id}>);
}
")
  endforeach()
endif()
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/compiled_kernels.inc CONTENT "${compiled}")

if(FLASHCORE_HAS_CUDA)
  # Kernels for several architectures are the bulk of the library, and packed in nvcc's own way it is
  # more than three times as large. A kernel is unpacked once, when it is loaded.
  target_compile_options(flashcore_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  add_library(flashcore_cuda OBJECT
    ${PROJECT_SOURCE_DIR}/src/cuda/backend.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/device.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/registry.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/sm90/make_params.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/sm90/tensor_map.cc
    ${PROJECT_SOURCE_DIR}/src/cuda/common/combine.cu
    ${PROJECT_SOURCE_DIR}/src/cuda/common/append.cu
    ${PROJECT_SOURCE_DIR}/src/cuda/common/quantize.cu)
  set_target_properties(flashcore_cuda PROPERTIES
    CUDA_ARCHITECTURES "${FLASHCORE_ARCHITECTURES_simt}")
  target_link_libraries(flashcore_cuda PRIVATE flashcore_flags)
  target_include_directories(flashcore_cuda PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  set(FLASHCORE_CUDA_OBJECTS $<TARGET_OBJECTS:flashcore_cuda>)
  list(REMOVE_DUPLICATES groups)
  foreach(group IN LISTS groups)
    set(family ${group_family_${group}})
    set(source ${PROJECT_BINARY_DIR}/generated/${group}.cu)
    file(CONFIGURE OUTPUT ${source} CONTENT
"// Written by cmake/cuda_kernels.cmake from src/cuda/kernels.def.
#include \"cuda/${FLASHCORE_FOLDER_${family}}/${FLASHCORE_HEADER_${family}}.cuh\"

namespace flashcore::cuda {
${group_text_${group}}
}  // namespace flashcore::cuda
")
    add_library(flashcore_${group} OBJECT ${source})
    set_target_properties(flashcore_${group} PROPERTIES
      CUDA_ARCHITECTURES "${FLASHCORE_ARCHITECTURES_${family}}")
    target_compile_options(flashcore_${group} PRIVATE -Xptxas=-v)  # registers, spills: in the log
    if(NOT family STREQUAL "simt" AND NOT FLASHCORE_ASSERTS AND NOT FLASHCORE_FAULTS)
      target_compile_options(flashcore_${group} PRIVATE "SHELL:-Xptxas -warn-spills,-Werror")
    endif()
    target_link_libraries(flashcore_${group} PRIVATE flashcore_flags)
    list(APPEND FLASHCORE_CUDA_OBJECTS $<TARGET_OBJECTS:flashcore_${group}>)
  endforeach()
  find_package(CUDAToolkit REQUIRED)
endif()
