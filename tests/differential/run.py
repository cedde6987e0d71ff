"""The differential suite: FlashCore against the math backend of torch, ONNX and transformers.

    python3 tests/differential/run.py [opinfo|onnx|families]...      default: all three

Each part runs in its own process and prints one line: right, refused, omitted, wrong. The exit code is 1
if a result is wrong, a count has dropped or a package of PACKAGES is missing."""

import importlib.util
import os
import subprocess
import sys

import common

PARTS = {"opinfo": "opinfo.py", "onnx": "onnx_cases.py", "families": "families.py"}
PACKAGES = {"opinfo": ("numpy", "torch", "expecttest"), "onnx": ("numpy", "onnx", "ml_dtypes"),
            "families": ("numpy", "torch", "transformers")}


def run(part):
    missing = [name for name in PACKAGES[part] if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{part}: NOT TESTED, {', '.join(missing)} not installed; scripts/setup installs it")
        return 1
    return subprocess.run([sys.executable, os.path.join(common.FOLDER, PARTS[part])]).returncode


def main(names):
    unknown = set(names) - set(PARTS)
    if unknown:
        print(f"run.py: unknown part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
        return 2
    return int(any([run(one) for one in names or PARTS]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
