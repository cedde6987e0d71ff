# Compile flags of all C++ code. Floating point stays IEEE: no fast-math anywhere.
add_library(flashcore_flags INTERFACE)
target_include_directories(flashcore_flags INTERFACE
  ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR})
target_compile_options(flashcore_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion>)
target_compile_definitions(flashcore_flags INTERFACE
  FLASHCORE_VERSION="${PROJECT_VERSION}" $<$<BOOL:${FLASHCORE_PLANTS}>:FLASHCORE_PLANTS>)
target_link_libraries(flashcore_flags INTERFACE Threads::Threads)

if(FLASHCORE_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${FLASHCORE_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:C,CXX>:-fno-sanitize-recover=all>
                      $<$<COMPILE_LANGUAGE:C,CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${FLASHCORE_SANITIZE})
endif()
