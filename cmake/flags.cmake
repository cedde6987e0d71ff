# Compile flags of all C++ code. Floating point stays IEEE: no fast-math anywhere.
add_library(flashcore_flags INTERFACE)
target_include_directories(flashcore_flags INTERFACE
  ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR})
target_compile_options(flashcore_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion>)
# CMAKE_CXX_STANDARD would also apply to CUDA, for which CMake 3.25 does not know C++20.
# --expt-relaxed-constexpr: functions of src/core are constexpr on host and device.
target_compile_features(flashcore_flags INTERFACE cxx_std_20)
target_compile_options(flashcore_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 --expt-relaxed-constexpr>)
target_compile_definitions(flashcore_flags INTERFACE
  FLASHCORE_VERSION="${PROJECT_VERSION}" $<$<BOOL:${FLASHCORE_FAULTS}>:FLASHCORE_FAULTS>
  $<$<BOOL:${FLASHCORE_ASSERTS}>:FLASHCORE_ASSERTS>)
target_link_libraries(flashcore_flags INTERFACE Threads::Threads)

# -O1 -g1 takes half the compile time of -O2 -g. Reports still name functions and lines.
if(FLASHCORE_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-O1> $<$<COMPILE_LANGUAGE:C,CXX>:-g1>
                      $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${FLASHCORE_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:C,CXX>:-fno-sanitize-recover=all>
                      $<$<COMPILE_LANGUAGE:C,CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${FLASHCORE_SANITIZE})
endif()
