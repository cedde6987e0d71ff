"""One run of the benchmark.

Each case is checked against an fp64 reference before it is timed, and so is each peer. FlashCore and the
peers then run in turns. On a GPU all of them are called as a user of torch calls them, captured in CUDA
graphs; the C call below flashcore.attention has its own column. A row holds the median of the rounds and,
for each peer, the median of the rounds' ratios. The file is written after every case, so Ctrl-C keeps the
finished rows.
"""

import shlex
import time
from pathlib import Path

from flashcore.bench import cpu, cuda, peers, results, table, timing


def default_output(device, gpu, root):
    """The result file of a run without --output."""
    base = root if root is not None else Path()
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
        self.output = options.output or default_output(options.device, environment["gpu"], root)
        self.result = {
            "fingerprint": library.fingerprint(),
            **environment,
            **results.torch_versions(torch),
            "date": results.now(),
            "command": "python3 -m flashcore.bench " + shlex.join(options.argv),
        }
        if options.device == "cpu":
            self.result["threads"] = options.threads
        else:
            self.result["peers"] = peers.versions(options.peers)
        self.rows, self.skipped, self.failed = [], [], []

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
            reason = case.unsupported(self.options.device)
            if reason is None and time.monotonic() - self.begin > self.options.time_limit:
                reason = f"the time limit of {self.options.time_limit:g} s was over"
            if reason is None:
                reason = self.measure(case)
            if reason is not None:
                self.skipped.append({**case.fields(), "reason": reason})
                print(f"{case.name:<19} {case.shape_text():<30} skipped: {reason}", flush=True)
            self.save()

    def measure(self, case):
        """Checks and times one case. Returns the reason if the case was skipped, otherwise None."""
        try:
            loaded = self.make(case)
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

    def make(self, case):
        options = self.options
        if options.device == "cpu":
            return cpu.CpuCase(self.library, case, self.torch, options.threads, options.seed,
                               options.kernel, options.peers)
        return cuda.CudaCase(self.library, case, self.torch, options.seed, options.kernel,
                             options.peers)

    def time(self, case, loaded, verdict):
        loaded.prepare()
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
        row["tflops"] = case.flops() / row["us"] / 1e6
        row["kv_gbs"] = case.kv_bytes() / row["us"] / 1e3
        if note is not None:
            row["note"] = note
        return row
