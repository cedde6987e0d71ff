"""The deprecated names of 0.1 compile, and the warning names the replacement.

    deprecated_names_test.py INCLUDE_DIR

The environment variable CXX selects the compiler. The default is c++.
"""
import os
import subprocess
import sys
import tempfile

NAMES = {
    "flashcore::Partial part; return part.out.rank;": "use PartialResult",
    "return static_cast<int>(flashcore::DType::byte);": "use DType::u8",
    "return static_cast<int>(flashcore::Isa::plain);": "use Isa::generic",
}


def compile_(include, body, *flags):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "old.cc")
        with open(path, "w", encoding="utf-8") as source:
            source.write(f"#include <flashcore/attention.h>\nint old() {{ {body} }}\n")
        return subprocess.run([os.environ.get("CXX", "c++"), "-std=c++20", "-Wall", "-fsyntax-only",
                               "-I", include, *flags, path], capture_output=True, text=True)


def main():
    include, wrong = sys.argv[1], []
    clean = compile_(include, "return 0;", "-Wextra", "-Werror")
    if clean.returncode != 0:
        wrong.append(f"the header alone does not compile: {clean.stderr}")
    for body, warning in NAMES.items():
        done = compile_(include, body)
        if done.returncode != 0 or warning not in done.stderr:
            wrong.append(f"{body} exit {done.returncode}, without \"{warning}\": {done.stderr}")
    for line in wrong:
        print(line)
    print(f"{len(NAMES)} deprecated names")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
