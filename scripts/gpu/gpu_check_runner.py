"""Runs the stages of scripts/gpu_check. Each stage has a time limit, and its result is written to the
result file before the next stage begins."""

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from flashcore.bench import results as bench_results

PASSED, FAILED, NOT_RUN, TIMED_OUT = bench_results.STATUSES


@dataclass
class Outcome:
    """Result of a stage. Every status except "passed" has a reason."""

    status: str
    reason: str = ""
    details: dict = field(default_factory=dict)


@dataclass
class Done:
    """A finished command. code is None if it timed out or could not start."""

    code: int | None
    timed_out: bool
    seconds: float
    output: str  # standard output
    log: Path  # standard error; standard output is in the same file with suffix .out
    shown: str  # path of the log, relative to the tree, so that result files do not depend on its path

    def last_lines(self, count=12):
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join((text + self.output).strip().splitlines()[-count:])

    def failure(self, what):
        """The reason of a failure, as a sentence."""
        if self.timed_out:
            return f"hung: {what} did not end within {self.seconds:.0f} s; see {self.shown}"
        return f"{what} ended with exit code {self.code}; see {self.shown}"


def members(session):
    """The processes of a session, in all process groups."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # the process has just ended
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


class Command:
    """A process in its own session. Its children end with it, also those in other process groups
    (children of ctest, workers of the command `flashcore`)."""

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
        """Waits for the command, and ends it after `timeout` seconds."""
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
        """Ends every command that is still running."""
        for command in list(cls._running):
            command.end()
            cls._running.discard(command)  # only this one: another thread may have started a new one

    def end(self):
        """Ends the whole session, by SIGTERM and then by SIGKILL. A process that waits for a hung GPU
        may survive both, so the wait for it is limited."""
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
            except ProcessLookupError:  # the process has just ended
                pass

    def _wait(self, patience):
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            pass


@dataclass
class Stage:
    """run(limit_s) returns an Outcome; for a group of results it returns {name: Outcome}."""

    name: str
    limit_s: float
    run: object
    may_be_missing: bool = False  # "not run" is reported, but does not fail the run
    results: tuple = ()  # names of a group's results; empty: the name of the stage
    alone: bool = False  # it measures time, or the others need it: no other stage runs meanwhile

    def passed_in(self, recorded):
        """Whether this stage passed according to the stages of a result file."""
        return all(recorded.get(name, {}).get("status") == PASSED
                   for name in self.results or (self.name,))


class Report:
    """The result file. It is rewritten after every change."""

    def __init__(self, path, header, keep=None):
        """keep: an earlier result of the same sources; its other stages and rows are retained."""
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


def waves(stages):
    """Lists of successive stages that may run side by side."""
    grouped = []
    for stage in stages:
        if not grouped or stage.alone or grouped[-1][-1].alone:
            grouped.append([])
        grouped[-1].append(stage)
    return grouped


class Runner:
    """Runs stages. A failing stage does not stop the others; the total time limit does."""

    def __init__(self, report, time_limit_s, say=print):
        self.report, self.say = report, say
        self.begin = time.monotonic()
        self.time_limit_s = time_limit_s
        self.outcomes = []  # (stage, name, outcome, seconds)
        self._interrupted = False
        self._noting = threading.Lock()

    def left(self):
        return self.time_limit_s - (time.monotonic() - self.begin)

    def run_side_by_side(self, stages, lanes):
        """Runs stages in `lanes` threads, in order. An interrupt ends those that run."""
        pool = ThreadPoolExecutor(lanes)
        running = [pool.submit(self.run, stage) for stage in stages]
        try:
            for one in running:
                one.result()
        except BaseException:
            self._interrupted = True
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(one.done() for one in running):  # a stage may start another command
                Command.end_all()
                time.sleep(0.05)
            raise
        finally:
            pool.shutdown()

    def run(self, stage):
        if self._interrupted:
            return
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
            except Exception as error:  # an error in a stage fails it; the other stages still run
                result = Outcome(FAILED, f"{type(error).__name__}: {error}")
        if self._interrupted:  # by another thread, which has ended this stage's commands
            result = Outcome(FAILED, "interrupted")
        several = result if isinstance(result, dict) else {stage.name: result}
        for name, outcome in several.items():
            self._note(stage, name, outcome, begin)

    def _note(self, stage, name, outcome, begin):
        seconds = outcome.details.pop("seconds", None) or time.monotonic() - begin
        with self._noting:
            self.outcomes.append((stage, name, outcome, seconds))
            self.report.add(name, outcome, seconds)
        self.say(f"   {name}: {outcome.status} in {seconds:.1f} s"
                 + (f"; {outcome.reason}" if outcome.reason else ""))

    def ok(self):
        """Whether every stage passed. A stage with may_be_missing may also be "not run"."""
        return bool(self.outcomes) and all(
            outcome.status == PASSED or (stage.may_be_missing and outcome.status == NOT_RUN)
            for stage, _, outcome, _ in self.outcomes)

    def summary(self):
        lines = [f"{name:<24} {outcome.status:<10} {seconds:6.1f} s  {outcome.reason}"
                 for _, name, outcome, seconds in self.outcomes]
        lines.append(f"{'total':<24} {'passed' if self.ok() else 'FAILED':<10} "
                     f"{time.monotonic() - self.begin:6.1f} s")
        return "\n".join(line.rstrip() for line in lines)
