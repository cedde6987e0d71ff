"""Runs test modules of this folder: python3 run.py [MODULE...]. The default is all modules of the package.
`torch` means all of test_torch_*.py.

Without arguments every module runs in its own process, several at a time. A module raises SkipTest on
import if its framework is not installed; the last line lists such modules. Exit codes: 0 passed, 1 failed,
77 everything was skipped. It uses the tree's package, and the library of $FLASHCORE_LIBRARY or of build/.
--not-tested only prints the missing frameworks. TORCH=0 excludes torch and all tests that need it."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(FOLDER))
# Slowest first, so that the others run in parallel with them.
PACKAGE_TESTS = ("transformers_families", "torch_op", "torch_gradients", "transformers", "drop_ins",
                 "torch_values", "torch_sdpa", "differential", "torch_boundary", "torch_direct",
                 "torch_cuda", "torch_graphs", "distributed_ranks",
                 "distributed_torch", "distributed_failures", "distributed", "distributed_placement",
                 "distributed_explain", "distributed_step", "peers", "examples", "readme", "attention", "backward", "quant",
                 "boundary_fuzz", "boundary", "interrupt", "jax", "cupy")
ALONE = ("overhead",)  # measures time
FRAMEWORKS = ("numpy", "torch", "transformers", "jax", "cupy")
MAX_AT_ONCE = 8
# The tensors are tiny: threads that wait, or processes that compile, would only take longer.
FEW_THREADS = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
LAST_LINE = re.compile(r"(\d+) tests run, (\d+) failed(?:; NOT TESTED: (.*))?")


def not_tested():
    """Frameworks that are not installed, as the last line prints them."""
    without_torch = os.environ.get("TORCH") == "0"
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None
            or (without_torch and name in ("torch", "transformers"))]


def modules_of(name):
    """test_NAME, or all of test_NAME_*."""
    name = "test_" + name.removeprefix("test_")
    if os.path.exists(os.path.join(FOLDER, name + ".py")):
        return [name]
    found = sorted(path.stem for path in Path(FOLDER).glob(name + "_*.py"))
    if not found:
        raise SystemExit(f"run.py: there is no {name}.py and no {name}_*.py in {FOLDER}")
    return found


def load(names):
    """(suite, {module: reason why it is skipped})."""
    suite, skipped = unittest.TestSuite(), {}
    for name in names:
        try:
            module = importlib.import_module(name)
        except unittest.SkipTest as reason:
            skipped[name] = str(reason)
            continue
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
    return suite, skipped


def last_line(done, failed, skipped):
    words = [f"{name.removeprefix('test_')} ({why})" for name, why in skipped.items()]
    return (f"{done} tests run, {failed} failed"
            + (f"; NOT TESTED: {', '.join(words)}" if words else ""))


def run_here(names):
    sys.path[:0] = [FOLDER, os.path.join(TREE, "python"), os.path.join(TREE, "scripts", "gpu"), os.path.join(TREE, "scripts", "lib")]
    suite, skipped = load(names)
    if suite.countTestCases() == 0:
        print(last_line(0, 0, skipped) if skipped else "there are no tests")
        return 77 if skipped else 1
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    reasons = {}
    for test, why in result.skipped:
        reasons.setdefault(why, []).append(test)
    for why, tests in reasons.items():
        print(f"{len(tests)} tests skipped: {why}")
    done = result.testsRun - len(result.skipped)
    print(last_line(done, len(result.failures) + len(result.errors), skipped))
    if not result.wasSuccessful():
        return 1
    return 0 if done else 77


def run_in_process(name):
    """Runs one module in its own process. Returns (name, exit code, output)."""
    done = subprocess.run([sys.executable, os.path.abspath(__file__), name], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return name, done.returncode, done.stdout


def run_package():
    """Runs all modules of the package, several at a time, at most one per two cores."""
    at_once = min(MAX_AT_ONCE, max(1, len(os.sched_getaffinity(0)) // 2))
    tests, failed, skipped, broken = 0, 0, [], []
    with ThreadPoolExecutor(at_once) as pool:
        results = [*pool.map(run_in_process, PACKAGE_TESTS)]
    results += [run_in_process(name) for name in ALONE]
    for name, code, output in results:
        print(f"--- {name}\n{output.rstrip()}", flush=True)
        counts = LAST_LINE.fullmatch(output.rstrip().rpartition("\n")[2])
        if counts is None or code not in (0, 1, 77) or (code == 1 and counts[2] == "0"):
            broken.append(f"{name} ended with exit code {code}")
            continue
        tests, failed = tests + int(counts[1]), failed + int(counts[2])
        skipped += [counts[3]] if counts[3] else []
    for one in broken:
        print(one)
    failed += len(broken)
    print(f"{tests} tests run, {failed} failed"
          + (f"; NOT TESTED: {', '.join(skipped)}" if skipped else ""))
    if failed:
        return 1
    return 0 if tests else 77


def main(arguments):
    if arguments == ["--not-tested"]:
        missing = not_tested()
        if missing:
            print("NOT TESTED: " + ", ".join(missing))
        return 0
    for name, value in FEW_THREADS.items():
        os.environ.setdefault(name, value)
    if not arguments:
        return run_package()
    return run_here([module for one in arguments for module in modules_of(one)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
