# cmake -DSCRIPT=scripts/fingerprint -DOUTPUT=header.h -P write_fingerprint.cmake
execute_process(COMMAND ${SCRIPT} --families OUTPUT_VARIABLE lines COMMAND_ERROR_IS_FATAL ANY
                OUTPUT_STRIP_TRAILING_WHITESPACE)
string(REPLACE "\n" ";" lines "${lines}")
set(rows "")
foreach(line IN LISTS lines)
  string(REPLACE " " ";" words "${line}")
  list(GET words 0 family)
  list(GET words 1 hash)
  string(APPEND rows " \\\n  {\"${family}\", \"${hash}\"},")
endforeach()
file(WRITE ${OUTPUT} "// Written by cmake/write_fingerprint.cmake.
#pragma once
#define FLASHCORE_FINGERPRINTS${rows}
")
