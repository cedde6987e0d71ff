"""Runs test modules of this folder: python3 run.py [MODULE...], default those of the package.

A module that needs a framework which is not installed raises SkipTest when imported; its reason is
printed, and named in the last line. Exit codes: 0 passed, 1 failed, 77 everything was skipped. Needs
no installation: the package is the tree's, the library that of $FLASHCORE_LIBRARY or of build/.
--not-tested only says which frameworks are missing. TORCH=0 leaves out torch and what needs it."""

import importlib
import importlib.util
import os
import sys
import unittest

FOLDER = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(FOLDER))
PACKAGE_TESTS = ("attention", "torch", "drop_ins", "transformers", "jax", "cupy", "examples",
                 "overhead", "quant")
FRAMEWORKS = ("numpy", "torch", "transformers", "jax", "cupy")


def not_tested():
    """Frameworks whose tests cannot run here."""
    without_torch = os.environ.get("TORCH") == "0"
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None
            or (without_torch and name in ("torch", "transformers"))]


def load(names):
    """(suite, {module: why it was left out})."""
    suite, left_out = unittest.TestSuite(), {}
    for name in names:
        try:
            module = importlib.import_module(name)
        except unittest.SkipTest as reason:
            left_out[name] = str(reason)
            continue
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
    return suite, left_out


def main(arguments):
    if arguments == ["--not-tested"]:
        missing = not_tested()
        if missing:
            print("NOT TESTED: " + ", ".join(missing))
        return 0
    sys.path[:0] = [FOLDER, os.path.join(TREE, "python"), os.path.join(TREE, "scripts")]
    names = ["test_" + one.removeprefix("test_") for one in arguments or PACKAGE_TESTS]
    suite, left_out = load(names)
    if suite.countTestCases() == 0:
        print("; ".join(f"{name}: {why}" for name, why in left_out.items()) or "there are no tests")
        return 77 if left_out else 1
    result = unittest.TextTestRunner(verbosity=2 if arguments else 1).run(suite)
    reasons = {}
    for test, why in result.skipped:
        reasons.setdefault(why, []).append(test)
    for why, tests in reasons.items():
        print(f"{len(tests)} tests skipped: {why}")
    done = result.testsRun - len(result.skipped)
    words = [f"{name.removeprefix('test_')} ({why})" for name, why in left_out.items()]
    print(f"{done} tests run, {len(result.failures) + len(result.errors)} failed"
          + (f"; NOT TESTED: {', '.join(words)}" if words else ""))
    if not result.wasSuccessful():
        return 1
    return 0 if done else 77


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
