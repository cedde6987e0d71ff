"""The benchmark that owns the peers: FlashCore against every attention library that is installed, in
one process.

Each case is checked against fp64 first and is not timed unless it passes; the same goes for a peer.
Then ours and each peer run in turns. On a GPU all are called as a user of torch calls them, captured in
CUDA graphs; the C call under ours has a column of its own. A row has the median of the rounds and, for
each peer, the median of the rounds' ratios. Rows are written after every case, so Ctrl-C keeps what is
done.
"""

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from flashcore import (_bench_cpu, _bench_cuda, _bench_overhead, _cases, _library, _peers, _report, _results,
                       _speed_chart, _table, _timing)

_EXAMPLES = """examples:
  python3 -m flashcore.bench                             all GPU cases, into bench/results/<gpu>.json
  python3 -m flashcore.bench --suite lineage
  python3 -m flashcore.bench --device cpu --threads 2    suite "cpu" against torch on the CPU
  python3 -m flashcore.bench --case mission --kernel fwd_simt_f16_d64_q16 --output /tmp/one.json
  python3 -m flashcore.bench --show bench/results/h200.json   the table of docs/benchmarks.md
  python3 -m flashcore.bench --report bench/results/h200.json its CSV and HTML page with plots
  python3 -m flashcore.bench --chart docs/images/speed_h200.svg --results bench/results/h200.json
                                                         bars of our speed relative to the best peer
  python3 -m flashcore.bench --overhead --device cpu     what a call from Python costs

Run it where the package is installed, or in the source tree with PYTHONPATH=python. Exit codes: 0 all cases measured, 1 a case failed
its check, 2 it could not run, 130 interrupted (what was done is written)."""


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python3 -m flashcore.bench", description=__doc__.split("\n\n")[0], epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--cases", type=Path, help="the file of cases (default: bench/cases.json)")
    add("--suite", action="append", default=[], help="only this suite; may be repeated")
    add("--case", action="append", default=[], help="only cases of this name; may be repeated")
    add("--kernel", help="use exactly this kernel; cases it cannot take are skipped")
    add("--peers", default=None,
        help="libraries and backends of torch, by comma; \"\" for none (default: all known ones)")
    add("--samples", type=int, default=20, help="rounds per case (default 20)")
    add("--case-seconds", type=float, default=2.0,
        help="a case whose rounds would take longer gets fewer, at least 5 (default 2)")
    add("--time-limit", type=float, default=float("inf"), metavar="SECONDS",
        help="start no further case after this long")
    add("--threads", type=int, default=0, help="CPU threads, for ours and torch (default: all)")
    add("--seed", type=int, default=1)
    add("--output", type=Path, help="result file (default: bench/results/<gpu>.json; with "
        "--device cpu build/bench-cpu.json)")
    add("--report", type=Path, metavar="FILE",
        help="write FILE's CSV and HTML page beside it, measure nothing")
    add("--chart", type=Path, metavar="OUT.svg",
        help="draw our speed relative to the best peer, a bar per case, and measure nothing; --suite and --case "
        f"choose cases (default: all suites but {' and '.join(_speed_chart.DIAGNOSTIC_SUITES)})")
    add("--results", type=Path, metavar="FILE",
        help="the result file that --chart draws (default: the only one in bench/results)")
    add("--overhead", action="store_true", help="measure only what a call costs on a tiny shape")
    add("--show", type=Path, metavar="FILE", help="print a result file as a table, measure nothing")
    options = parser.parse_args(argv)
    known = list(_peers.known() if options.device == "cuda" else _bench_cpu.PEERS)
    options.peers = known if options.peers is None else [
        name for name in options.peers.split(",") if name]
    for name in options.peers:
        if name not in known:
            parser.error(f"--peers: \"{name}\" is none of {', '.join(known)}")
    if options.samples < 1:
        parser.error(f"--samples is {options.samples}; wanted at least 1")
    if options.results is not None and options.chart is None:
        parser.error("--results is the file that --chart draws; wanted --chart OUT.svg with it")
    return options


def import_torch(device):
    """torch, or None on a CPU without it. A GPU needs it for memory and graphs."""
    try:
        import torch
    except ImportError as error:
        if device == "cpu":
            return None
        raise RuntimeError(
            f"torch cannot be imported ({error}); a GPU benchmark with peers needs it. Ours alone: "
            "flashcore bench --device cuda") from error
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU it can use; try --device cpu")
    return torch


class Bench:
    """One run: its cases, its result file, its table."""

    def __init__(self, options, library, torch, root):
        self.options, self.library, self.torch = options, library, torch
        self.begin = time.monotonic()
        environment = _results.gpu_environment() if options.device == "cuda" else \
            {"gpu": "", "driver": "", "cuda": ""}
        if options.device == "cuda":
            environment["gpu"] = torch.cuda.get_device_name(0)
            environment["cuda"] = environment["cuda"] or str(torch.version.cuda)
        self.output = options.output or default_output(options.device, environment["gpu"], root)
        self.result = {
            "fingerprint": library.fingerprint(),
            **environment,
            **_results.torch_versions(torch),
            "date": _results.now(),
            "command": "python3 -m flashcore.bench " + shlex.join(options.argv),
        }
        if options.device == "cpu":
            self.result["threads"] = options.threads
        else:
            self.result["peers"] = _peers.versions(options.peers)
        self.rows, self.skipped, self.failed = [], [], []

    def adopt(self, whole):
        """Rows of an earlier run stay, if they are of the same sources and not measured now."""
        old = _results.read(self.output)
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
        rows = _results.merge_rows(self.kept.get("rows", []), self.rows)
        measured = {_results.key(row) for row in self.rows}
        skipped = [row for row in _results.merge_rows(self.kept.get("skipped", []), self.skipped)
                   if _results.key(row) not in measured]
        merged = {**self.result, **kept, "rows": rows, "skipped": skipped, "failed": self.failed}
        _results.write(self.output, _results.rounded(merged))

    def run(self, cases):
        for name, found in self.result.get("peers", {}).items():
            print(f"peer {name}: {found}", flush=True)
        _table.print_heading()
        for case in cases:
            reason = case.unsupported(self.options.device)
            if reason is None and time.monotonic() - self.begin > self.options.time_limit:
                reason = f"the time limit of {self.options.time_limit:g} s was over"
            if reason is None:
                reason = self.measure(case)
            if reason is not None:
                self.skipped.append({**case.fields(), "reason": reason})
                print(f"{case.name:<16} {case.shape_text():<30} skipped: {reason}", flush=True)
            self.save()

    def measure(self, case):
        """Checks and times one case; returns why it was skipped, or None."""
        try:
            subject = self.make(case)
            try:
                self.check_and_time(case, subject)
            finally:
                subject.close()
        except NotImplementedError as error:
            return str(error)
        except (RuntimeError, MemoryError, ValueError) as error:  # other cases may still work
            self.fail(case, f"{type(error).__name__}: {error}")
        return None

    def check_and_time(self, case, subject):
        verdict = subject.check()
        if not verdict.ok:
            self.fail(case, f"{verdict.reason}; {verdict.worst}", subject)
            return
        row = self.time(case, subject, verdict)
        if not subject.unchanged():
            self.fail(case, "the timed calls gave another result than the one checked", subject)
            return
        self.rows.append(row)
        _table.print_row(case, row)

    def fail(self, case, reason, subject=None):
        kernel = subject.plan.kernel.decode() if subject is not None else ""
        self.failed.append({**case.fields(), "kernel": kernel, "reason": reason})
        print(f"{case.name:<16} {case.shape_text():<30} FAILED: {reason}", flush=True)

    def make(self, case):
        options = self.options
        if options.device == "cpu":
            return _bench_cpu.CpuCase(self.library, case, self.torch, options.threads, options.seed,
                                      options.kernel, options.peers)
        return _bench_cuda.CudaCase(self.library, case, self.torch, options.seed, options.kernel, options.peers)

    def time(self, case, subject, verdict):
        subject.prepare()
        begin = time.monotonic()
        subject.sample()  # not counted: it shows how long a round takes
        count, note = _timing.sample_count(self.options.samples, time.monotonic() - begin,
                                           self.options.case_seconds)
        rounds = [subject.sample(reverse=number % 2 == 1) for number in range(count)]
        family = subject.plan.family.decode()
        row = {
            **case.fields(),
            "kernel": subject.plan.kernel.decode(),
            "kernel_fingerprint": self.library.fingerprint(family),
            "splits": subject.plan.splits,
            "error": verdict.relative_error,
            "error_to_bound": verdict.worst_ratio,
            **_timing.summarise(rounds),
            "peers_note": subject.peers_note,
        }
        if subject.call is not None:
            row["call"] = subject.call
        row["tflops"] = case.flops() / row["us"] / 1e6
        row["kv_gbs"] = case.kv_bytes() / row["us"] / 1e3
        if note is not None:
            row["note"] = note
        return row


def default_cases(root):
    """The tree's, or those that pip put beside this file."""
    return root / "bench" / "cases.json" if root else Path(__file__).with_name("cases.json")


def default_output(device, gpu, root):
    base = root if root is not None else Path()
    if device == "cpu":
        return base / "build" / "bench-cpu.json"
    return base / "bench" / "results" / _results.file_name(gpu)


def default_results(root):
    """The only result file of the tree."""
    found = sorted((root / "bench" / "results").glob("*.json")) if root else []
    if len(found) != 1:
        raise ValueError(f"--results: wanted a result file; bench/results has {len(found)}")
    return found[0]


def from_file(path, use):
    """Reads a result file and uses it; 0, or 2 where there is none."""
    try:
        result = _results.read(path)
    except (OSError, ValueError) as error:
        print(f"flashcore.bench: {path}: {error}", file=sys.stderr)
        return 2
    if result is None:
        print(f"flashcore.bench: there is no file {path}", file=sys.stderr)
        return 2
    use(result)
    return 0


def write_report(result, path):
    print("written:", *_report.write(result, path))


def write_chart(result, options):
    print("written:", _speed_chart.write(result, options.chart, options.suite, options.case))


def chart(options):
    """Draws a result file; 0, or 2 where that cannot be done."""
    try:
        path = options.results or default_results(_library.tree_root())
        return from_file(path, lambda result: write_chart(result, options))
    except (OSError, ValueError) as error:
        print(f"flashcore.bench: {error}", file=sys.stderr)
        return 2


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    options = parse_arguments(argv)
    if options.show is not None:
        return from_file(options.show, lambda result: print(_table.markdown(result)))
    if options.report is not None:
        return from_file(options.report, lambda result: write_report(result, options.report))
    if options.chart is not None:
        return chart(options)
    options.argv = list(argv)
    if options.threads == 0:
        options.threads = len(os.sched_getaffinity(0))
    root = _library.tree_root()
    try:
        library = _library.load()
        if options.device == "cuda":
            count, why = library.cuda_device_count()
            if count == 0:
                stale = "".join(f"; {path} is stale" for path in library.stale_paths)
                raise RuntimeError(f"{library.path} cannot use a GPU: {why}{stale}")
        torch = import_torch(options.device)
        if options.overhead:
            return _bench_overhead.main(options.device, torch)
        cases = _cases.load(options.cases or default_cases(root))
        chosen = _cases.select(cases, options.device, options.suite, options.case)
        bench = Bench(options, library, torch, root)
        bench.adopt(whole=not options.suite and not options.case and not options.kernel)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"flashcore.bench: {error}", file=sys.stderr)
        return 2
    try:
        bench.run(chosen)
    except KeyboardInterrupt:
        bench.save()
        print(f"interrupted; {len(bench.rows)} rows are in {bench.output}", file=sys.stderr)
        return 130
    write_report(_results.read(bench.output), bench.output)
    print(f"{len(bench.rows)} rows, {len(bench.skipped)} skipped, {len(bench.failed)} failed, "
          f"{time.monotonic() - bench.begin:.0f} s; written to {bench.output}")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
