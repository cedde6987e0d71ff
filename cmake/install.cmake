# cmake --install: headers, both libraries, the command, find_package and pkg-config files, docs.
# Everything is relative to the prefix, so an installed tree can be moved.
include(CMakePackageConfigHelpers)

# libflashcore.so and libflashcore.a. The shared library does not export the symbols of the static
# libraries that it links (the CUDA runtime).
set_target_properties(flashcore_static PROPERTIES OUTPUT_NAME flashcore)
target_link_options(flashcore PRIVATE LINKER:--exclude-libs,ALL)

install(TARGETS flashcore flashcore_static EXPORT flashcoreTargets)
install(DIRECTORY include/flashcore TYPE INCLUDE FILES_MATCHING PATTERN "*.h")
install(FILES README.md LICENSE CHANGELOG.md TYPE DOC)
install(DIRECTORY docs/ TYPE DOC FILES_MATCHING PATTERN "*.md" PATTERN "*.svg")

# Deferred, because the tools are configured after this file.
function(flashcore_install_tools)
  if(TARGET flashcore_cli)
    install(TARGETS flashcore_cli RUNTIME)
  endif()
endfunction()
cmake_language(DEFER CALL flashcore_install_tools)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashcore)
install(EXPORT flashcoreTargets NAMESPACE flashcore:: DESTINATION ${package_dir})
configure_package_config_file(cmake/flashcoreConfig.cmake.in generated/flashcoreConfig.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change the C++ API and ABI.
write_basic_package_version_file(generated/flashcoreConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/generated/flashcoreConfig.cmake
              ${PROJECT_BINARY_DIR}/generated/flashcoreConfigVersion.cmake
        DESTINATION ${package_dir})

# pkg-config: flashcore (shared) and flashcore-static. ${pcfiledir} makes them relocatable.
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(pc_prefix ${CMAKE_INSTALL_PREFIX})
  set(pc_libdir ${CMAKE_INSTALL_FULL_LIBDIR})
  set(pc_includedir ${CMAKE_INSTALL_FULL_INCLUDEDIR})
else()
  file(RELATIVE_PATH up "/${pc_dir}" "/")
  string(REGEX REPLACE "/$" "" up "${up}")
  set(pc_prefix "\${pcfiledir}/${up}")
  set(pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
set(pc_private "-lstdc++ -lm -pthread")
if(FLASHCORE_HAS_CUDA)
  set(pc_private "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt ${pc_private}")
endif()
foreach(package flashcore flashcore-static)
  if(package STREQUAL "flashcore")
    set(pc_libs "-L\${libdir} -lflashcore")
    set(pc_libs_private "${pc_private}")
  else()
    set(pc_libs "\${libdir}/libflashcore.a ${pc_private}")
    set(pc_libs_private "")
  endif()
  set(pc_name ${package})
  configure_file(cmake/flashcore.pc.in generated/${package}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/generated/${package}.pc DESTINATION ${pc_dir})
endforeach()
