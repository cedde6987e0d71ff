# What `pip install .` puts into the wheel (pyproject.toml): the library and the benchmark's cases beside
# the Python files, the command among the scripts.
add_custom_target(flashcore_wheel DEPENDS flashcore)
install(FILES $<TARGET_FILE:flashcore> DESTINATION flashcore RENAME libflashcore.so COMPONENT python)
install(FILES ${PROJECT_SOURCE_DIR}/bench/cases.json DESTINATION flashcore COMPONENT python)
target_link_options(flashcore PRIVATE LINKER:--strip-all)

# Whoever has only a compiler gets the library without the command.
find_package(CLI11 QUIET)
find_package(fmt QUIET)
find_package(nlohmann_json QUIET)
if(CLI11_FOUND AND fmt_FOUND AND nlohmann_json_FOUND)
  # The command is configured after this file.
  function(flashcore_wheel_command)
    add_dependencies(flashcore_wheel flashcore_cli)
    target_link_options(flashcore_cli PRIVATE LINKER:--strip-all)
    install(PROGRAMS $<TARGET_FILE:flashcore_cli> DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python)
  endfunction()
  cmake_language(DEFER CALL flashcore_wheel_command)
else()
  message(WARNING "The command `flashcore` is left out: it needs CLI11, fmt and nlohmann-json "
                  "(libcli11-dev, libfmt-dev, nlohmann-json3-dev)")
  set(FLASHCORE_BUILD_TOOLS OFF)
endif()
