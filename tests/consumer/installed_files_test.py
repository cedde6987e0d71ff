"""An installed tree is complete, and none of its files names the source tree.

    installed_files_test.py PREFIX
"""
import os
import re
import subprocess
import sys

TREE = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
PARTS = [
    "bin/flashcore",
    "include/flashcore/attention.h",
    "include/flashcore/backward.h",
    "include/flashcore/flashcore.h",
    "libflashcore.so",
    "libflashcore.a",
    "cmake/flashcore/flashcoreConfig.cmake",
    "cmake/flashcore/flashcoreConfigVersion.cmake",
    "pkgconfig/flashcore.pc",
    "pkgconfig/flashcore-static.pc",
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "numerics.md",
]


def main():
    prefix = sys.argv[1]
    files = [os.path.join(directory, name)
             for directory, _, names in os.walk(prefix) for name in names]
    wrong = [f"missing: {part}" for part in PARTS
             if not any(path.endswith("/" + part) for path in files)]
    installed = {os.path.relpath(path, os.path.join(prefix, "include"))
                 for path in files if path.startswith(os.path.join(prefix, "include") + "/")}
    for directory, _, names in os.walk(os.path.join(TREE, "include")):
        for name in names:
            path = os.path.relpath(os.path.join(directory, name), os.path.join(TREE, "include"))
            if path not in installed:
                wrong.append(f"missing header: {path}")
    for path in files:
        if path.startswith(os.path.join(prefix, "include") + "/"):
            with open(path, encoding="utf-8") as text:
                if re.search(r"python", text.read(), re.IGNORECASE):
                    wrong.append(f"{path} mentions Python; its functions belong in bindings/python")
        if path.endswith((".cmake", ".pc")):
            with open(path, encoding="utf-8") as text:
                if TREE in text.read():
                    wrong.append(f"{path} names {TREE}: the install cannot be moved")
    command = os.path.join(prefix, "bin", "flashcore")
    if os.path.exists(command):
        said = subprocess.run([command, "--version"], capture_output=True, text=True)
        with open(os.path.join(TREE, "CMakeLists.txt"), encoding="utf-8") as text:
            version = re.search(r"project\(flashcore VERSION ([\d.]+)", text.read()).group(1)
        if said.returncode != 0 or version not in said.stdout:
            wrong.append(f"flashcore --version: exit {said.returncode}: {said.stdout}{said.stderr}")
    for line in wrong:
        print(line)
    print(f"{len(files)} files installed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
