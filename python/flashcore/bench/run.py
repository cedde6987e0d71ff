"""One run of the benchmark.

Each case is checked against an fp64 reference before it is timed, and so is each peer. FlashCore and the
peers then run in turns. On a GPU all of them are called as a user of torch calls them, captured in CUDA
graphs; the C call below flashcore.attention has its own column. A row holds the median of the rounds and,
for each peer, the median of the rounds' ratios. The file is written after every case, so Ctrl-C keeps the
finished rows. The baselines of a case (options.py) run in the same rounds.
"""

import shlex
import time
from dataclasses import replace
from pathlib import Path

from flashcore.bench import cpu, cuda, peers, results, table, timing
from flashcore.bench.options import baseline_of


def default_output(device, gpu, root, longest=0):
    """The result file of a run without --output."""
    base = root if root is not None else Path()
    if longest:
        return base / "build" / "bench-trial.json"
    if device == "cpu":
        return base / "build" / "bench-cpu.json"
    return base / "bench" / "results" / results.file_name(gpu)


class Bench:
    """One run of the benchmark: its cases, result file and table."""

    def __init__(self, options, library, torch, root):
        self.options, self.library, self.torch = options, library, torch
        self.begin = time.monotonic()
        environment = results.gpu_environment() if options.device == "cuda" else \
            {"gpu": "", "driver": "", "cuda": ""}
        if options.device == "cuda":
            environment["gpu"] = torch.cuda.get_device_name(0)
            environment["cuda"] = environment["cuda"] or str(torch.version.cuda)
        self.output = options.output or default_output(options.device, environment["gpu"], root,
                                                       options.longest)
        if self.output.is_dir():
            self.output /= (results.file_name(environment["gpu"]) if environment["gpu"] else
                            results.cpu_file_name(results.cpu_name(), options.threads))
        self.result = {
            "fingerprint": library.fingerprint(),
            **environment,
            **results.torch_versions(torch),
            "date": results.now(),
            "command": "python3 -m flashcore.bench " + shlex.join(options.argv),
        }
        if options.device == "cpu":
            self.result["cpu"] = results.cpu_name()
            self.result["threads"] = options.threads
        else:
            self.result["peers"] = peers.versions(options.peers)
        if options.longest:
            self.result["longest"] = options.longest
        self.rows, self.skipped, self.failed = [], [], []
        self._baselines = {}  # {Case: loaded case}, of the present case

    def adopt(self, whole):
        """Keeps rows of an earlier run that has the same sources. New rows replace rows of the same case."""
        old = results.read(self.output)
        if old is None:
            self.kept = {}
        elif old.get("fingerprint") == self.result["fingerprint"]:
            self.kept = old
        elif whole:
            self.kept = {}
        else:
            raise RuntimeError(
                f"{self.output} was measured with other sources ({old.get('fingerprint')}, now "
                f"{self.result['fingerprint']}); measure all cases, or give --output")

    def save(self):
        kept = {name: value for name, value in self.kept.items() if name not in self.result}
        rows = results.merge_rows(self.kept.get("rows", []), self.rows)
        measured = {results.key(row) for row in self.rows}
        skipped = [row for row in results.merge_rows(self.kept.get("skipped", []), self.skipped)
                   if results.key(row) not in measured]
        merged = {**self.result, **kept, "rows": rows, "skipped": skipped, "failed": self.failed}
        results.write(self.output, results.rounded(merged))

    def run(self, cases):
        for name, found in self.result.get("peers", {}).items():
            print(f"peer {name}: {found}", flush=True)
        table.print_heading()
        for case in cases:
            if self.options.longest:
                case = case.shrunk(self.options.longest)
            reason = case.unsupported(self.options.device)
            if reason is None and time.monotonic() - self.begin > self.options.time_limit:
                reason = f"the time limit of {self.options.time_limit:g} s was over"
            if reason is None:
                reason = self.measure(case)
            if reason is not None:
                self.skipped.append({**case.fields(), "reason": reason})
                print(f"{case.name:<19} {case.shape_text():<30} skipped: {reason}", flush=True)
            self.save()
        self.keep_baselines(())

    def measure(self, case):
        """Checks and times one case. Returns the reason if the case was skipped, otherwise None."""
        try:
            self.keep_baselines(self.baselines_of(case).values())
            loaded = self.make(case, self.options.kernel, self.options.peers)
            try:
                self.check_and_time(case, loaded)
            finally:
                loaded.close()
        except NotImplementedError as error:
            return str(error)
        except (RuntimeError, MemoryError, ValueError) as error:  # continue with the other cases
            self.fail(case, f"{type(error).__name__}: {error}")
        return None

    def check_and_time(self, case, loaded):
        verdict = loaded.check()
        if not verdict.ok:
            self.fail(case, f"{verdict.reason}; {verdict.worst}", loaded)
            return
        row = self.time(case, loaded, verdict)
        if not loaded.unchanged():
            self.fail(case, "the timed calls gave a result that differs from the checked one", loaded)
            return
        self.rows.append(row)
        table.print_row(case, row)

    def fail(self, case, reason, loaded=None):
        kernel = loaded.plan.kernel.decode() if loaded is not None else ""
        self.failed.append({**case.fields(), "kernel": kernel, "reason": reason})
        print(f"{case.name:<19} {case.shape_text():<30} FAILED: {reason}", flush=True)

    def make(self, case, kernel=None, peers=()):
        options = self.options
        if options.device == "cuda":
            return cuda.CudaCase(self.library, case, self.torch, options.seed, kernel, peers)
        if self.torch is None:
            return cpu.CpuCase(self.library, case, options.threads, options.seed, kernel)
        return cpu.CpuTorchCase(self.library, case, self.torch, options.threads, options.seed, kernel, peers)

    @staticmethod
    def baselines_of(case):
        """{entry of case.baselines: the case that it is}."""
        return {name: baseline_of(case, name.partition("@")[0]) for name in case.baselines}

    def keep_baselines(self, wanted):
        """Frees the baselines of earlier cases that are not among `wanted`. Names do not count."""
        wanted = {replace(one, name="") for one in wanted}
        for one in [one for one in self._baselines if one not in wanted]:
            self._baselines.pop(one).close()

    def checked_baseline(self, case):
        loaded = self.make(case)
        verdict = loaded.check()
        if not verdict.ok:
            loaded.close()
            raise RuntimeError(f"{case.name}: {verdict.reason}; {verdict.worst}")
        return loaded

    def add_baselines(self, case, loaded):
        """Checks what a case is compared with and adds it to its rounds. Returns {name: reason} of the others."""
        notes = {}
        for name, other in self.baselines_of(case).items():
            key = replace(other, name="")
            if key not in self._baselines:
                self._baselines[key] = self.checked_baseline(other)
            runner, note = self._baselines[key].runner_of(name.partition("@")[2])
            if runner is not None:
                loaded.compare_with(name, runner)
            if note is not None:
                notes[name] = note
        return notes

    def time(self, case, loaded, verdict):
        loaded.prepare()
        notes = self.add_baselines(case, loaded)
        begin = time.monotonic()
        loaded.sample()  # discarded; it only measures how long a round takes
        count, note = timing.sample_count(self.options.samples, time.monotonic() - begin,
                                          self.options.case_seconds)
        rounds = [loaded.sample(reverse=number % 2 == 1) for number in range(count)]
        family = loaded.plan.family.decode()
        row = {
            **case.fields(),
            "kernel": loaded.plan.kernel.decode(),
            "kernel_fingerprint": self.library.fingerprint(family),
            "splits": loaded.plan.splits,
            "error": verdict.relative_error,
            "error_to_bound": verdict.worst_ratio,
            **timing.summarise(rounds),
            "peers_note": loaded.peers_note,
        }
        if loaded.call is not None:
            row["call"] = loaded.call
        else:
            row["threads"] = self.options.threads
        if notes:
            row["baselines_note"] = notes
        row["tflops"] = case.flops() / row["us"] / 1e6
        row["kv_gbs"] = case.kv_bytes() / row["us"] / 1e3
        if note is not None:
            row["note"] = note
        return row
