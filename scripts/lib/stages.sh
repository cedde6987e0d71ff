# A list of stages, each run to its end whatever the ones before it did. Source after common.sh.
#
#   stage NAME FUNCTION   runs the function with a heading; its output also goes to build/logs/NAME.log
#   summary               the table of results; returns 1 if a stage failed or none ran
#
# A function that returns 77 skips its stage: its last line of output must be the reason.
# ONLY, where it is set, lists the names of the stages to run.
# shellcheck shell=bash

stage_lines=() stage_names=' ' stages_passed=0 stages_failed=0 stages_skipped=0 stages_started=$SECONDS

stage() {
  local name=$1 function=$2 start=$SECONDS code log=$LOGS/$1.log result note=''
  stage_names+="$name "
  if [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" $name "* ]]; then return 0; fi
  mkdir -p "$LOGS"
  heading "$name"
  # In a subshell, so that a stage can neither end the run nor change the next one's folder.
  (set -euo pipefail && cd "$ROOT" && "$function") 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  case $code in
    0)
      result="${GREEN}passed${PLAIN} "
      stages_passed=$((stages_passed + 1))
      ;;
    77)
      result='skipped'
      note=$(tail -1 "$log")
      stages_skipped=$((stages_skipped + 1))
      ;;
    *)
      result="${RED}FAILED${PLAIN} "
      note="exit $code, see ${log#"$ROOT"/}"
      stages_failed=$((stages_failed + 1))
      ;;
  esac
  printf -- '-- %s: %s after %d s\n' "$name" "$result" $((SECONDS - start))
  stage_lines+=("$(printf '%-13s %s %5d s  %s' "$name" "$result" $((SECONDS - start)) "$note")")
}

summary() {
  heading "Summary"
  [ ${#stage_lines[@]} -eq 0 ] || printf '%s\n' "${stage_lines[@]}"
  printf '%-13s         %5d s\n' total $((SECONDS - stages_started))
  local name
  for name in ${ONLY:-}; do
    [[ $stage_names == *" $name "* ]] && continue
    echo "there is no stage $name; there are:$stage_names"
    stages_failed=$((stages_failed + 1))
  done
  echo "$stages_passed passed, $stages_failed failed, $stages_skipped skipped"
  [ $stages_failed -eq 0 ] && [ $stages_passed -gt 0 ]
}

# quietly LOG COMMAND...: only the log sees the output, unless the command fails.
quietly() {
  local log=$LOGS/$1
  shift
  mkdir -p "$LOGS"
  "$@" >"$log" 2>&1 && return 0
  local code=$?
  tail -60 "$log"
  echo "failed: $* (all of its output: ${log#"$ROOT"/})"
  return $code
}
