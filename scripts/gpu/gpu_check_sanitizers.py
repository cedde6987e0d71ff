"""Runs compute-sanitizer on a small set of problems. A tool counts only after it has found a fault
injected for it (tests/gpu/sanitizer_faults.cu) and nothing in a clean program. Otherwise, for example
on a machine that refuses the tool, the result is "not run", never "passed"."""

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

from gpu_check_runner import FAILED, NOT_RUN, PASSED, Command, Outcome

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_FOUND_CODE = 99  # exit code of a run with findings
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_PROOF_LIMIT_S = 40
# The error that each tool must report for its injected fault. Another error proves nothing.
_FAULT_WORDS = {
    "memcheck": re.compile(r"Invalid __global__ write"),
    "racecheck": re.compile(r"[Rr]ace|hazard"),
    "initcheck": re.compile(r"[Uu]ninitialized"),
    "synccheck": re.compile(r"[Bb]arrier|[Dd]ivergent"),
}


def find_tool():
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer")


def errors_found(output):
    """Number of errors the tool counted; None if it printed no summary and so did not finish."""
    counts = _SUMMARY.findall(output)
    return sum(map(int, counts)) if counts else None


def reason_in(output):
    """The tool's message about its failure."""
    lines = [line.strip("= \t") for line in output.splitlines() if line.startswith("=====")]
    lines = [line for line in lines if line and "COMPUTE-SANITIZER" not in line
             and "SUMMARY" not in line]
    return lines[0] if lines else "it printed no summary"


class Sanitizer:
    """One tool. `programs` maps names to command lines in which the tool must find nothing."""

    def __init__(self, tool, program, faults, programs, logs, cwd, env=None):
        self.tool, self.program, self.faults = tool, program, faults
        self.programs, self.logs, self.cwd, self.env = programs, logs, cwd, env

    def start(self, name, arguments):
        return Command(
            [self.program, "--tool", self.tool, "--error-exitcode", str(_FOUND_CODE),
             "--launch-timeout", "60", "--print-limit", "5", *arguments],
            self.logs / f"sanitizer_{self.tool}_{name}.log", self.cwd, self.env)

    def outcome(self, limit_s):
        begin = time.monotonic()
        result = self._outcome(begin + limit_s)
        result.details["seconds"] = round(time.monotonic() - begin, 1)
        return result

    def _outcome(self, deadline):
        refused = self._prove(deadline)
        if refused is not None:
            return Outcome(NOT_RUN, refused)
        details = {"proved_on_an_injected_fault": True}
        for name, arguments in self.programs.items():
            done = self.start(name, arguments).wait(deadline - time.monotonic())
            errors = errors_found(done.output)
            details[name] = {"errors": errors, **_problems(done.output)}
            if done.timed_out:
                return Outcome(NOT_RUN, done.failure(f"{name} under {self.tool}"), details)
            if errors:
                return Outcome(FAILED, f"{errors} errors in {name}: {reason_in(done.output)}; see "
                               f"{done.shown} and .out", details)
            if errors is None:
                return Outcome(NOT_RUN, f"{name}: {reason_in(done.output)}", details)
            if done.code != 0:
                return Outcome(FAILED, done.failure(f"{name} under {self.tool}"), details)
        return Outcome(PASSED, "", details)

    def _prove(self, deadline):
        """None if the tool finds its injected fault and nothing in a clean program, else a reason."""
        for fault, wanted in ((self.tool, True), ("none", False)):
            limit = min(_PROOF_LIMIT_S, deadline - time.monotonic())
            done = self.start(f"proof_{fault}", [str(self.faults), fault]).wait(limit)
            errors = errors_found(done.output)
            if done.timed_out:
                return done.failure(f"the proof on sanitizer_faults {fault}")
            if errors is None:
                return f"{self.tool} does not work here: {reason_in(done.output)}"
            if wanted and errors == 0:
                return f"{self.tool} did not find the fault injected for it"
            if wanted and _FAULT_WORDS[self.tool].search(_without_summary(done.output)) is None:
                return f"{self.tool} found something else: {reason_in(done.output)}"
            if not wanted and errors > 0:
                return f"{self.tool} finds {errors} errors in a program that has none"
            if not wanted and done.code != 0:
                return done.failure("the clean program")
        return None


def _without_summary(output):
    return "\n".join(line for line in output.splitlines() if "SUMMARY" not in line)


def _problems(output):
    """{"problems": n} if the program was `flashcore check --json`, else {}. Lines of the tool start
    with "="; all others are the program's JSON."""
    text = "\n".join(line for line in output.splitlines() if not line.startswith("="))
    try:
        return {"problems": json.loads(text)["problems"]}
    except (ValueError, KeyError, TypeError):
        return {}


def run_all(sanitizers, limit_s):
    """Runs all tools concurrently. Returns {stage name: Outcome}."""
    with ThreadPoolExecutor(len(sanitizers)) as pool:
        futures = {f"sanitizer_{one.tool}": pool.submit(one.outcome, limit_s)
                   for one in sanitizers}
        try:
            return {name: future.result() for name, future in futures.items()}
        except BaseException:
            Command.end_all()  # otherwise leaving the pool waits for them
            raise
