"""Runs a list of stages in two lanes, shows progress, and lists everything that did not run.

A stage is a bash script. The lane `compile` runs the stages that keep all cores busy; the lane `test`
runs the others beside it. Within a lane, stages run in the order of the list. A stage waits for the
stages it needs, and does not run if one of them did not pass. A failing stage stops no other stage.

A stage that exits with 77 was skipped: its last line of output is the reason. A line
`NOT RUN: name: reason` says that a part of the stage was skipped. Both end up in the summary, and
with `strict` a skip that ALLOW_SKIP does not name is a failure.

Beside its wall time each stage shows its CPU seconds, those of all its processes: on a machine with
other load only they tell how long a stage takes.
"""
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build" / "logs"
COMMON = ROOT / "scripts" / "lib" / "common.sh"
SKIPPED = 77
LANES = ("compile", "test")
PROGRESS_S = 20  # between two lines about running stages
PART = re.compile(r"NOT RUN: (\S+): (.*)")
NINJA = re.compile(r"\[\d+/\d+\](?: |$)")


@dataclass(frozen=True)
class Stage:
    name: str
    script: str
    lane: str = "test"
    needs: tuple = ()  # names of stages; those that are not in the run are not waited for
    limit_s: int = 1800


@dataclass
class Result:
    stage: Stage
    status: str = "waiting"  # running, passed, FAILED, skipped, not run
    seconds: float = 0
    cpu_seconds: float = 0  # of all its processes that have ended
    note: str = ""
    parts: list = field(default_factory=list)  # (name, reason) of parts that did not run


def _bold(text, out):
    return f"\033[1m{text}\033[0m" if out.isatty() and not os.environ.get("NO_COLOR") else text


def _wait_with_usage(process):
    """(exit code, CPU seconds of the process and of its descendants that were waited for)."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # Popen must not wait for it again
    return process.returncode, usage.ru_utime + usage.ru_stime


def _times(seconds, cpu_seconds):
    return f"{seconds:6.0f} s {cpu_seconds:6.0f} CPU s"


class Run:
    """One run over `stages`. `allowed` maps names that may be skipped to nothing else."""

    def __init__(self, stages, strict=False, allowed=(), logs=None, out=sys.stdout):
        names = [stage.name for stage in stages]
        assert len(set(names)) == len(names), "two stages have one name"
        for stage in stages:
            assert stage.lane in LANES, stage
        self.results = {stage.name: Result(stage) for stage in stages}
        self.strict, self.allowed, self.out = strict, frozenset(allowed), out
        self.logs = Path(logs or LOGS)
        self.changed = threading.Condition()
        self.processes = {}
        self.begin = time.monotonic()

    def say(self, text):
        with self.changed:
            print(text, file=self.out, flush=True)

    def run(self):
        """True where every stage passed, and at least one did."""
        self.logs.mkdir(parents=True, exist_ok=True)
        lanes = [threading.Thread(target=self._lane, args=(lane,)) for lane in LANES]
        for lane in lanes:
            lane.start()
        try:
            self._show_progress(lanes)
        except KeyboardInterrupt:
            self._stop()
            for lane in lanes:
                lane.join()
            self.summary()
            raise
        return self.summary()

    def _stop(self):
        with self.changed:
            for result in self.results.values():
                if result.status == "waiting":
                    result.status, result.note = "not run", "interrupted"
            for process in self.processes.values():
                os.killpg(process.pid, signal.SIGTERM)
            self.changed.notify_all()

    def _show_progress(self, lanes):
        shown = time.monotonic()
        while any(lane.is_alive() for lane in lanes):
            lanes[0 if lanes[0].is_alive() else 1].join(0.2)
            if time.monotonic() - shown < PROGRESS_S:
                continue
            shown = time.monotonic()
            with self.changed:
                running = [f"{one.stage.name} {one.note}".rstrip() for one in self.results.values()
                           if one.status == "running"]
            self.say(f"   {shown - self.begin:5.0f} s  {'; '.join(running)}")

    def _lane(self, lane):
        for result in self.results.values():
            if result.stage.lane == lane and self._wait(result):
                self._execute(result)

    def _wait(self, result):
        """True once all needed stages have passed; False if one of them will not."""
        done = ("passed", "FAILED", "skipped", "not run")
        with self.changed:
            needed = [self.results[name] for name in result.stage.needs if name in self.results]
            self.changed.wait_for(lambda: result.status != "waiting"
                                  or all(one.status in done for one in needed))
            if result.status != "waiting":
                return False
            for one in needed:
                if one.status != "passed":
                    result.status = "not run"
                    result.note = f"it needs {one.stage.name}, which is {one.status}"
                    self.changed.notify_all()
                    return False
            result.status = "running"
            return True

    def _execute(self, result):
        name, begin = result.stage.name, time.monotonic()
        self.say(_bold(f"== {name}", self.out))
        script = f"set -euo pipefail; . '{COMMON}'; cd '{ROOT}'\n{result.stage.script}\n"
        process = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True,
                                   stderr=subprocess.STDOUT, errors="replace", start_new_session=True,
                                   env={**os.environ, "LOGS": str(self.logs)})
        with self.changed:
            self.processes[name] = process
        limit = threading.Timer(result.stage.limit_s, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        with process.stdout:
            last = self._read(result, process)
        code, result.cpu_seconds = _wait_with_usage(process)
        timed_out = not limit.is_alive()
        limit.cancel()
        self._judge(result, code, last, timed_out, time.monotonic() - begin)

    def _read(self, result, process):
        """Copies the output to the log and the screen; the last line."""
        last = ""
        with open(self.logs / f"{result.stage.name}.log", "w", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                line = line.rstrip()
                if NINJA.match(line):
                    result.note = line.split()[0]
                    continue
                if line:
                    last = line
                    self.say(f"{result.stage.name:>12} | {line}")
                part = PART.fullmatch(line)
                if part:
                    result.parts.append((part[1], part[2]))
        return last

    def _judge(self, result, code, last, timed_out, seconds):
        stage = result.stage
        log = self.logs / f"{stage.name}.log"
        with self.changed:
            self.processes.pop(stage.name)
            result.seconds, result.note = seconds, ""
            if timed_out:
                result.status, result.note = "FAILED", f"ended after its limit of {stage.limit_s} s"
            elif code == 0:
                result.status = "passed"
            elif code == SKIPPED:
                result.status, result.note = "skipped", last
            else:
                result.status, result.note = "FAILED", f"exit {code}, see {log}"
            self.changed.notify_all()
        self.say(f"-- {stage.name}: {result.status} after {seconds:.0f} s, "
                 f"{result.cpu_seconds:.0f} CPU s  {result.note}".rstrip())

    def left_out(self):
        """[(name, reason)] of everything that did not run."""
        found = []
        for one in self.results.values():
            if one.status in ("skipped", "not run"):
                found.append((one.stage.name, one.note))
            found += one.parts
        return found

    def summary(self):
        self.say("\n" + _bold("== Summary", self.out))
        for one in self.results.values():
            times = _times(one.seconds, one.cpu_seconds)
            self.say(f"{one.stage.name:14} {one.status:8} {times}  {one.note}".rstrip())
        cpu_seconds = sum(one.cpu_seconds for one in self.results.values())
        self.say(f"{'total':14} {'':8} {_times(time.monotonic() - self.begin, cpu_seconds)}")
        count = {status: sum(one.status == status for one in self.results.values())
                 for status in ("passed", "FAILED", "skipped", "not run")}
        forbidden = []
        for name, reason in self.left_out():
            allowed = name in self.allowed
            forbidden += [] if allowed or not self.strict else [name]
            self.say(f"DID NOT RUN: {name}: {reason}{' (ALLOW_SKIP)' if allowed else ''}")
        if not self.left_out():
            self.say("Everything ran.")
        if forbidden:
            self.say(f"A skip is a failure here; ALLOW_SKIP=\"{' '.join(forbidden)}\" allows it.")
        self.say(f"{count['passed']} passed, {count['FAILED']} failed, "
                 f"{count['skipped'] + count['not run']} did not run")
        return count["FAILED"] + count["not run"] + len(forbidden) == 0 and count["passed"] > 0


def select(stages, names):
    """The stages of these names, in the list's order; all of them without names."""
    known = [stage.name for stage in stages]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"there is no stage {' '.join(unknown)}; there are: {' '.join(known)}")
    return [stage for stage in stages if not names or stage.name in names]


def allowed_skips(extra=()):
    """The names in ALLOW_SKIP, those given, and the packages scripts/setup could not install."""
    listed = LOGS / "not_installable"
    failed = listed.read_text(encoding="utf-8").split() if listed.is_file() else []
    return {*os.environ.get("ALLOW_SKIP", "").replace(",", " ").split(), *extra, *failed}
