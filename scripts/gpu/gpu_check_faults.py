"""Stages of scripts/gpu_check with injected faults: a build of its own, and what each fault must lead to."""

import json
import re
import sys
import threading
import time

from gpu_check_context import from_command
from gpu_check_runner import FAILED, PASSED, Outcome
from kernel_build import fault_kernels, read_kernels

# A few kernels of each family are enough to show that the check catches faults.
_FAULT_KERNELS = fault_kernels(read_kernels())
_FREE_CORES = 4
_NEVER_ENDS = 30  # src/core/fault.h
_HUNG_KERNELS = "^fwd_simt_f32_d64_"
_HUNG_PROBLEMS = 24
_STARTING = threading.Lock()  # two stages need the same build


def start_faults_build(context):
    """Starts the build with injected faults in the background, while the benchmark uses the GPU. It leaves cores
    to the processes that are timed."""
    kernels = "|".join(_FAULT_KERNELS.values())
    script = (f"cmake --preset faults-cuda -DFLASHCORE_KERNELS='{kernels}' "
              "-DFLASHCORE_BUILD_TESTS=OFF && nice cmake --build --preset faults-cuda "
              f"-j {max(context.jobs - _FREE_CORES, 1)} --target flashcore_cli")
    context.faults = context.start("faults_build", ["sh", "-c", script])


def faulty_command(context, limit_s):
    """(command of the build with injected faults, None), or (None, Outcome of the failed build)."""
    with _STARTING:
        if not hasattr(context, "faults"):
            start_faults_build(context)
    built = context.faults.wait(limit_s)
    if built.code != 0:
        return None, from_command(built, "the build with injected faults")
    return context.faults_build / "bin" / "flashcore", None


def faults(context, limit_s):
    begin = time.monotonic()
    command, failed = faulty_command(context, limit_s)
    if failed is not None:
        return failed
    left = limit_s - (time.monotonic() - begin)
    running = {family: context.start(f"faults_{family}", faults_command(command, family, kernels, left))
               for family, kernels in _FAULT_KERNELS.items()}  # most of the time is the start of processes
    caught, failed = {}, None
    for family, one in running.items():
        outcome = judge_faults(one.wait(limit_s - (time.monotonic() - begin)), family)
        caught[family] = outcome.details.get("caught", {})
        failed = failed or (outcome if outcome.status != PASSED else None)
    return failed or Outcome(PASSED, "every injected fault was caught", {"caught": caught})


def faults_command(command, family, kernels, limit_s):
    arguments = [sys.executable, "scripts/checks/faults", command, "--device", "cuda", "--time-limit",
                 str(int(limit_s))]
    # Without --kernel, the stages are checked too; they need an f32 kernel.
    return arguments if family == "simt" else [*arguments, "--kernel", kernels]


def judge_faults(done, family):
    found = re.findall(r"^ *\d+  (\w+) +(caught|MISSED) (.*?)  ", done.output, re.MULTILINE)
    details = {verdict.lower(): {name: words.strip() for name, one, words in found if one == verdict}
               for verdict in ("caught", "MISSED")}
    outcome = from_command(done, f"scripts/checks/faults on {family}", details)
    if outcome.status == PASSED and not details["caught"]:
        return Outcome(FAILED, f"scripts/checks/faults listed no injected fault in {family}", details)
    return outcome


def deadline(context, limit_s):
    """Runs a kernel with an injected endless loop. `flashcore check` must report each problem that
    hangs within its deadline and continue with the others."""
    begin = time.monotonic()
    command, failed = faulty_command(context, limit_s)
    if failed is not None:
        return failed
    done = context.run("deadline", [
        command, "check", "--device", "cuda", "--kernel",
        _HUNG_KERNELS, "--problems", str(_HUNG_PROBLEMS), "--jobs", "4", "--deadline", "5", "--json",
        "--quiet"], limit_s - (time.monotonic() - begin), FLASHCORE_FAULT=str(_NEVER_ENDS))
    return judge_deadline(done, _HUNG_PROBLEMS)


def judge_deadline(done, problems):
    """Passes if some problems hung, each of them was reported as hung, and all others passed."""
    try:
        result = json.loads(done.output)
    except ValueError:
        return from_command(done, "flashcore check with a kernel that never ends") if done.code != 0 \
            else Outcome(FAILED, f"flashcore check printed no JSON; see {done.shown}")
    named = re.findall(r"^flashcore: (\S+): kernel \S+: it did not end within .*",
                       done.log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    details = {"problems": result["problems"], "failures": result["failures"], "hung": named}
    other = [one["reason"] for one in result["reports"] if not one.get("hung")]
    if done.code != 1 or result["failures"] == 0:
        return Outcome(FAILED, "a kernel that never ends was not reported", details)
    if other or len(set(named)) != result["failures"] or len(named) != len(set(named)):
        return Outcome(FAILED, f"{result['failures']} failures, {len(named)} named as hung; others: "
                       f"{other}", details)
    if result["problems"] != problems or result["failures"] == problems:
        return Outcome(FAILED, f"{result['problems']} of {problems} problems were done, "
                       f"{result['failures']} of them hung: the check did not continue", details)
    return Outcome(PASSED, "", details)
