"""Runs the stages of scripts/gpu_check: each with a time limit of its own, each result written to
the result file before the next stage begins."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from flashcore.bench import results as bench_results

PASSED, FAILED, NOT_RUN, TIMED_OUT = bench_results.STATUSES


@dataclass
class Outcome:
    """What a stage came to. Everything but "passed" has a reason."""

    status: str
    reason: str = ""
    details: dict = field(default_factory=dict)


@dataclass
class Done:
    """A command that ended, or was ended. code is None where it timed out or could not start."""

    code: int | None
    timed_out: bool
    seconds: float
    output: str  # standard output
    log: Path  # standard error; standard output is in the same file with suffix .out
    shown: str  # the log as seen from the tree: results are the same wherever the tree lies

    def last_lines(self, count=12):
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join((text + self.output).strip().splitlines()[-count:])

    def failure(self, what):
        """A sentence on why this was no success."""
        if self.timed_out:
            return f"hung: {what} did not end within {self.seconds:.0f} s; see {self.shown}"
        return f"{what} ended with exit code {self.code}; see {self.shown}"


def members(session):
    """The processes of a session, whatever their process groups."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


class Command:
    """A process in a session of its own, so that its children end with it, also those that are in
    process groups of their own (ctest's, and the workers of the command `flashcore`)."""

    _running = set()

    def __init__(self, arguments, log, cwd, env=None):
        self.log, self.begin = Path(log), time.monotonic()
        self._shown = os.path.relpath(log, cwd)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._out_path = self.log.with_suffix(".out")
        with open(self.log, "wb") as errors, open(self._out_path, "wb") as output:
            try:
                self._process = subprocess.Popen(
                    [str(one) for one in arguments], stdin=subprocess.DEVNULL, stdout=output,
                    stderr=errors, cwd=cwd, env=env, start_new_session=True)
                Command._running.add(self)
            except OSError as error:
                errors.write(f"{error}\n".encode())
                self._process = None

    def wait(self, timeout):
        """Waits, at most `timeout` seconds from now; a command still running then is ended."""
        code, timed_out = None, False
        if self._process is not None:
            try:
                code = self._process.wait(max(timeout, 0.01))
            except subprocess.TimeoutExpired:
                timed_out = True
                self.end()
            Command._running.discard(self)
        output = self._out_path.read_text(encoding="utf-8", errors="replace")
        return Done(code, timed_out, time.monotonic() - self.begin, output, self.log,
                    self._shown)

    @classmethod
    def end_all(cls):
        """Ends every command that is still running: nothing outlives the run."""
        for command in list(cls._running):
            command.end()
        cls._running.clear()

    def end(self):
        """Ends the whole session: asked first, then forced. A process that waits for a GPU that
        hangs may outlive even that; nobody waits for it."""
        if self._process is None or self._process.poll() is not None:
            return
        self._signal([self._process.pid], os.killpg, signal.SIGTERM)
        self._wait(5)
        self._signal([self._process.pid], os.killpg, signal.SIGKILL)
        self._signal(members(self._process.pid), os.kill, signal.SIGKILL)
        self._wait(10)

    @staticmethod
    def _signal(pids, kill, number):
        for pid in pids:
            try:
                kill(pid, number)
            except ProcessLookupError:  # it has just ended
                pass

    def _wait(self, patience):
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            pass


@dataclass
class Stage:
    """run(limit_s) returns an Outcome, or several by name where a stage is a group."""

    name: str
    limit_s: float
    run: object
    may_be_missing: bool = False  # "not run" is reported, and is no failure
    results: tuple = ()  # the names of a group's outcomes; empty: the stage's own

    def passed_in(self, recorded):
        """Whether the stages of a result file say that this one passed."""
        return all(recorded.get(name, {}).get("status") == PASSED
                   for name in self.results or (self.name,))


class Report:
    """The result file, written again after every change."""

    def __init__(self, path, header, keep=None):
        """keep: an earlier result of the same sources, whose other stages and rows stay."""
        self.path = Path(path)
        kept = keep or {}
        self.result = {**kept, **header, "stages": dict(kept.get("stages", {})),
                       "rows": list(kept.get("rows", []))}

    def add(self, name, outcome, seconds):
        entry = {"status": outcome.status, "seconds": round(seconds, 1)}
        if outcome.reason:
            entry["reason"] = outcome.reason
        entry["details"] = outcome.details
        self.result["stages"][name] = entry
        self.save()

    def save(self):
        bench_results.write(self.path, bench_results.rounded(self.result))


class Runner:
    """Runs stages in order. A failing stage does not stop the others; the total time limit does."""

    def __init__(self, report, time_limit_s, say=print):
        self.report, self.say = report, say
        self.begin = time.monotonic()
        self.time_limit_s = time_limit_s
        self.outcomes = []  # (stage, name, outcome, seconds)

    def left(self):
        return self.time_limit_s - (time.monotonic() - self.begin)

    def run(self, stage):
        begin = time.monotonic()
        limit = min(stage.limit_s, self.left())
        self.say(f"== {stage.name}")
        if limit <= 0:
            result = Outcome(TIMED_OUT, f"the total time limit of {self.time_limit_s:.0f} s was "
                             "over before this stage began")
        else:
            try:
                result = stage.run(limit)
            except KeyboardInterrupt:
                self._note(stage, stage.name, Outcome(FAILED, "interrupted"), begin)
                raise
            except Exception as error:  # a broken stage is a failed one, and the rest still runs
                result = Outcome(FAILED, f"{type(error).__name__}: {error}")
        several = result if isinstance(result, dict) else {stage.name: result}
        for name, outcome in several.items():
            self._note(stage, name, outcome, begin)

    def _note(self, stage, name, outcome, begin):
        seconds = outcome.details.pop("seconds", None) or time.monotonic() - begin
        self.outcomes.append((stage, name, outcome, seconds))
        self.report.add(name, outcome, seconds)
        self.say(f"   {name}: {outcome.status} in {seconds:.1f} s"
                 + (f"; {outcome.reason}" if outcome.reason else ""))

    def ok(self):
        """Whether every stage passed; one that may be missing may also be "not run"."""
        return bool(self.outcomes) and all(
            outcome.status == PASSED or (stage.may_be_missing and outcome.status == NOT_RUN)
            for stage, _, outcome, _ in self.outcomes)

    def summary(self):
        lines = [f"{name:<24} {outcome.status:<10} {seconds:6.1f} s  {outcome.reason}"
                 for _, name, outcome, seconds in self.outcomes]
        lines.append(f"{'total':<24} {'passed' if self.ok() else 'FAILED':<10} "
                     f"{time.monotonic() - self.begin:6.1f} s")
        return "\n".join(line.rstrip() for line in lines)
