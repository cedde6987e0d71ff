"""Command line of python3 -m flashcore.bench."""

import argparse
import os
import sys
import time
from pathlib import Path

from flashcore._core import library as core_library
from flashcore.bench import (cases as bench_cases, cpu, overhead, peers, report, results, speed_chart,
                             table)
from flashcore.bench.run import Bench

_DESCRIPTION = "Times FlashCore against every installed attention library, in one process."

_EXAMPLES = """examples:
  python3 -m flashcore.bench                             all GPU cases, into bench/results/<gpu>.json
  python3 -m flashcore.bench --suite options --suite gradients
                                                         what options cost, and gradients beside peers
  python3 -m flashcore.bench --list                      the cases by suite
  python3 -m flashcore.bench --device cpu --suite options --longest 128
                                                         tries the GPU suites, on small shapes
  python3 -m flashcore.bench --device cpu --threads 2    suite "cpu" against torch on the CPU
  python3 -m flashcore.bench --case prefill-b1-s512 --kernel fwd_simt_f16_d64_q16 --output /tmp/one.json
  python3 -m flashcore.bench --show bench/results/h200.json   the table of docs/benchmarks.md
  python3 -m flashcore.bench --report bench/results/h200.json CSV and HTML page with plots
  python3 -m flashcore.bench --chart docs/images/speed_h200.svg --results bench/results/h200.json
                                                         bars of our speed relative to the best peer
  python3 -m flashcore.bench --overhead --device cpu     overhead of a call from Python

Run it with the package installed, or in the source tree with PYTHONPATH=python. Exit codes: 0 all cases
were measured, 1 a case failed its check, 2 the benchmark could not run, 130 interrupted (finished rows
are written)."""


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python3 -m flashcore.bench", description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--cases", type=Path, help="file of cases (default: bench/cases.json)")
    add("--suite", action="append", default=[], type=bench_cases.current_suite, help="only this suite; may be repeated")
    add("--case", action="append", default=[], help="only cases of this name; may be repeated")
    add("--kernel", help="use exactly this kernel; cases that it does not support are skipped")
    add("--peers", default=None,
        help="libraries and torch backends, separated by commas; \"\" for none (default: all)")
    add("--samples", type=int, default=20, help="rounds per case (default 20)")
    add("--case-seconds", type=float, default=2.0,
        help="time limit of a case; a slow case gets fewer rounds, at least 5 (default 2)")
    add("--time-limit", type=float, default=float("inf"), metavar="SECONDS",
        help="start no further case after this time")
    add("--threads", type=int, default=0, help="CPU threads of FlashCore and torch (default: all)")
    add("--seed", type=int, default=1)
    add("--longest", type=int, default=0, metavar="KEYS",
        help="try the benchmark: shrink every case to so many keys, on any device")
    add("--list", action="store_true", help="print the cases by suite, with their baselines, and measure nothing")
    add("--output", type=Path, help="result file, or a folder for <gpu>.json or <cpu>-<n>-threads.json (default: "
        "bench/results for a GPU, build/bench-cpu.json with --device cpu)")
    add("--report", type=Path, metavar="FILE",
        help="write the CSV and HTML page of FILE next to it, and measure nothing")
    add("--chart", type=Path, metavar="OUT.svg",
        help="draw our speed relative to the best peer, one bar per case, and measure nothing; "
        f"--suite and --case select cases (default: all suites but {', '.join(speed_chart.DIAGNOSTIC_SUITES)})")
    add("--results", type=Path, metavar="FILE",
        help="result file that --chart draws (default: the only one of a GPU in bench/results)")
    add("--overhead", action="store_true", help="measure only the overhead of a call on a tiny shape")
    add("--show", type=Path, metavar="FILE", help="print a result file as a table, and measure nothing")
    options = parser.parse_args(argv)
    known = list(peers.known() if options.device == "cuda" else cpu.PEERS)
    options.peers = known if options.peers is None else [
        name for name in options.peers.split(",") if name]
    for name in options.peers:
        if name not in known:
            parser.error(f"--peers: \"{name}\" is not one of {', '.join(known)}")
    if options.samples < 1:
        parser.error(f"--samples is {options.samples}; wanted at least 1")
    if options.results is not None and options.chart is None:
        parser.error("--results is the file that --chart draws; it needs --chart OUT.svg")
    return options


def import_torch(device):
    """torch; None on a CPU without torch. A GPU needs torch for memory and graphs."""
    try:
        import torch
    except ImportError as error:
        if device == "cpu":
            return None
        raise RuntimeError(
            f"torch cannot be imported ({error}); a GPU benchmark with peers needs it. To time "
            "FlashCore alone: flashcore bench --device cuda") from error
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no usable GPU; try --device cpu")
    return torch


def default_cases(root):
    """The cases of the source tree, or the file that pip installs next to this module."""
    return root / "bench" / "cases.json" if root else Path(__file__).with_name("cases.json")


def default_results(root):
    """The only result file of a GPU in the source tree."""
    found = sorted((root / "bench" / "results").glob("*.json")) if root else []
    found = [path for path in found if (results.read(path) or {}).get("gpu")]
    if len(found) != 1:
        raise ValueError(f"--results: wanted a result file; bench/results has {len(found)} of GPUs")
    return found[0]


def from_file(path, use):
    """Reads a result file and passes it to use(). Returns the exit code: 0, or 2 if there is no file."""
    try:
        result = results.read(path)
    except (OSError, ValueError) as error:
        print(f"flashcore.bench: {path}: {error}", file=sys.stderr)
        return 2
    if result is None:
        print(f"flashcore.bench: there is no file {path}", file=sys.stderr)
        return 2
    use(result)
    return 0


def write_report(result, path):
    print("written:", *report.write(result, path))


def write_chart(result, options):
    print("written:", speed_chart.write(result, options.chart, options.suite, options.case))


def list_cases(options, root):
    """Prints the selected cases. Returns the exit code: 0, or 2 on an error."""
    try:
        cases = bench_cases.load(options.cases or default_cases(root))
        chosen = bench_cases.select(cases, options.device, options.suite, options.case)
    except (OSError, ValueError) as error:
        print(f"flashcore.bench: {error}", file=sys.stderr)
        return 2
    print(table.listing(chosen))
    return 0


def chart(options):
    """Draws a result file. Returns the exit code: 0, or 2 on an error."""
    try:
        path = options.results or default_results(core_library.tree_root())
        return from_file(path, lambda result: write_chart(result, options))
    except (OSError, ValueError) as error:
        print(f"flashcore.bench: {error}", file=sys.stderr)
        return 2


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    options = parse_arguments(argv)
    if options.show is not None:
        return from_file(options.show, lambda result: print(table.markdown(result)))
    if options.report is not None:
        return from_file(options.report, lambda result: write_report(result, options.report))
    if options.chart is not None:
        return chart(options)
    options.argv = list(argv)
    if options.threads == 0:
        options.threads = len(os.sched_getaffinity(0))
    root = core_library.tree_root()
    if options.list:
        return list_cases(options, root)
    try:
        library = core_library.load()
        if options.device == "cuda":
            count, why = library.cuda_device_count()
            if count == 0:
                stale = "".join(f"; {path} is stale" for path in library.stale_paths)
                raise RuntimeError(f"{library.path} cannot use a GPU: {why}{stale}")
        torch = import_torch(options.device)
        if options.overhead:
            return overhead.main(options.device, torch)
        cases = bench_cases.load(options.cases or default_cases(root))
        chosen = bench_cases.select(cases, options.device, options.suite, options.case)
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
    write_report(results.read(bench.output), bench.output)
    print(f"{len(bench.rows)} rows, {len(bench.skipped)} skipped, {len(bench.failed)} failed, "
          f"{time.monotonic() - bench.begin:.0f} s; written to {bench.output}")
    return 1 if bench.failed else 0

