# bin/flashcore_instrumented: the command with fault injection (core/fault.h) and assertions
# (core/assert.h) compiled in. FLASHCORE_FAULT=n and FLASHCORE_ASSERT=1 switch them on at run time.
#
# The hooks change the layout of core's structs, so every file that includes them is compiled a second
# time. The normal build provides all other objects. tests/scripts/instrumented_test.py checks this
# list against the #include lines and against the symbols of flashcore_tool.
set(FLASHCORE_INSTRUMENTED_SOURCES "src/(api|backend|cpu|plan)/|src/verify/inputs/case(_memory)?[.]")

# CUDA builds have their own presets for faults and assertions.
if(FLASHCORE_SANITIZE OR FLASHCORE_HAS_CUDA OR FLASHCORE_FAULTS OR FLASHCORE_ASSERTS
   OR NOT TARGET flashcore_cli)
  return()
endif()

add_library(flashcore_instrumented_flags INTERFACE)
target_compile_definitions(flashcore_instrumented_flags INTERFACE FLASHCORE_FAULTS FLASHCORE_ASSERTS)
target_link_libraries(flashcore_instrumented_flags INTERFACE flashcore_flags)

get_target_property(sources flashcore_objects SOURCES)
get_target_property(check_sources flashcore_check SOURCES)
list(FILTER sources INCLUDE REGEX "^(${FLASHCORE_INSTRUMENTED_SOURCES})")
add_library(flashcore_instrumented_objects OBJECT
  ${sources} ${check_sources} ${FLASHCORE_FINGERPRINT})
target_link_libraries(flashcore_instrumented_objects PRIVATE flashcore_instrumented_flags)
# -O1: it runs a few thousand small problems, and -O3 takes three times as long to compile.
target_compile_options(flashcore_instrumented_objects PRIVATE -O1)
if(FLASHCORE_UNITY)
  flashcore_share_headers(flashcore_instrumented_objects)
endif()
foreach(isa IN LISTS FLASHCORE_ISAS)
  flashcore_add_cpu_kernel(flashcore_instrumented_${isa} ${isa} flashcore_instrumented_flags -O1)
  list(APPEND kernels $<TARGET_OBJECTS:flashcore_instrumented_${isa}>)
endforeach()

add_executable(flashcore_instrumented
  tools/flashcore/main.cc $<TARGET_OBJECTS:flashcore_instrumented_objects> ${kernels})
target_include_directories(flashcore_instrumented PRIVATE
  ${PROJECT_SOURCE_DIR}/tools/flashcore)
# From the archives the linker takes only files that are not compiled a second time: a file in both
# would be a multiple definition. Targets instead of archives would add the libraries that they link.
target_link_libraries(flashcore_instrumented PRIVATE flashcore_instrumented_flags
  $<TARGET_FILE:flashcore_tool> $<TARGET_FILE:flashcore_static> ${CMAKE_DL_LIBS})
add_dependencies(flashcore_instrumented flashcore_tool flashcore_static)
set_target_properties(flashcore_instrumented PROPERTIES
  RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
