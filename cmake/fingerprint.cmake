# generated/fingerprint.h: the hash of the sources of this build, written again when one of them
# changes. scripts/fingerprint alone defines the hash.
file(GLOB_RECURSE FLASHCORE_SOURCES CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/bindings/* ${PROJECT_SOURCE_DIR}/include/* ${PROJECT_SOURCE_DIR}/src/*
  ${PROJECT_SOURCE_DIR}/cmake/*)
set(FLASHCORE_FINGERPRINT ${PROJECT_BINARY_DIR}/generated/fingerprint.h)
add_custom_command(
  OUTPUT ${FLASHCORE_FINGERPRINT}
  COMMAND ${CMAKE_COMMAND} -DSCRIPT=${PROJECT_SOURCE_DIR}/scripts/fingerprint
          -DOUTPUT=${FLASHCORE_FINGERPRINT}
          -P ${PROJECT_SOURCE_DIR}/cmake/write_fingerprint.cmake
  DEPENDS ${FLASHCORE_SOURCES} ${PROJECT_SOURCE_DIR}/CMakeLists.txt
          ${PROJECT_SOURCE_DIR}/scripts/fingerprint ${PROJECT_SOURCE_DIR}/scripts/lib/families
  COMMENT "Fingerprint of the sources" VERBATIM)
