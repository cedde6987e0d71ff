# Unity groups and precompiled headers (FLASHCORE_UNITY) shorten the builds of the tests and of the
# sanitizers. Other builds compile every file alone and without them, so that a missing #include is an
# error there: build_cuda of make test-all is one.

# flashcore_compile_together(<target> <group> <files>): compiles all files that match the regular
# expression as one. Files with equal private names must be in different groups.
function(flashcore_compile_together target group files)
  get_target_property(directory ${target} SOURCE_DIR)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "^(${files})\\.cc$")
  list(TRANSFORM sources PREPEND ${directory}/)
  set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${group})
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

# flashcore_share_headers(<target>): precompiled standard headers, and groups of files that
# cmake/instrumented.cmake compiles a second time. No other group may contain those.
function(flashcore_share_headers target)
  target_precompile_headers(${target} PRIVATE
    <algorithm> <cmath> <cstdint> <cstdio> <cstring> <functional> <memory> <optional> <span>
    <sstream> <string> <utility> <vector>)
  flashcore_compile_together(${target} api "src/api/.*")
  flashcore_compile_together(${target} cpu
    "src/cpu/(append|backward|combine|backend|cpu_.*|thread_pool)")
endfunction()

# flashcore_use_unity(): groups and precompiled headers for the library and the command.
function(flashcore_use_unity)
  flashcore_share_headers(flashcore_objects)
  flashcore_compile_together(flashcore_objects verify_cases
    "src/verify/(discover|inputs/(call|case_pages|compare|format|lengths))")
  flashcore_compile_together(flashcore_objects verify_report
    "src/verify/(api|implementation|inputs/(call_variants|probe_inputs)|probe_sequence|run_probes|probes/score_.*|report/.*)")
  flashcore_compile_together(flashcore_objects verify_probes
    "src/verify/probes/(bounds|combine|coverage|dequant|layout|lse|mask|random|scores|softmax|uniform)")
  if(TARGET flashcore_tool)
    target_precompile_headers(flashcore_check REUSE_FROM flashcore_objects)
    target_precompile_headers(flashcore_tool PRIVATE <nlohmann/json.hpp>)
    flashcore_compile_together(flashcore_tool arguments "cli/(command_line|option_groups)")
    flashcore_compile_together(flashcore_tool check
      "bench/bench_.*|data/(cases|host_case)|check/check_.*")
    flashcore_compile_together(flashcore_tool run
      "data/(npy|problem)|commands/(bench|check|explain|explain_ranks|info|verify)")
    flashcore_compile_together(flashcore_tool system
      "data/devices|cli/(signals|terminal)|bench/timing|check/verify_.*")
  endif()
endfunction()
