# cmake -DSCRIPT=scripts/fingerprint -DOUTPUT=header.h -P write_fingerprint.cmake
execute_process(COMMAND ${SCRIPT} --families OUTPUT_VARIABLE lines COMMAND_ERROR_IS_FATAL ANY
                OUTPUT_STRIP_TRAILING_WHITESPACE)
string(REPLACE "\n" ";" lines "${lines}")
set(text "// Written by cmake/write_fingerprint.cmake.\n#pragma once\n")
foreach(line IN LISTS lines)
  string(REPLACE " " ";" words "${line}")
  list(GET words 0 family)
  list(GET words 1 hash)
  string(TOUPPER ${family} family)
  string(APPEND text "#define FLASHCORE_FINGERPRINT_${family} \"${hash}\"\n")
endforeach()
file(WRITE ${OUTPUT} "${text}")
