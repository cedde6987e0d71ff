"""The shared library exports the public API, all of it and nothing else.

    exported_symbols_test.py LIBFLASHCORE_SO
"""
import os
import re
import subprocess
import sys

INCLUDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "include")


def exported(library):
    """Unmangled names, without parameters."""
    text = subprocess.run(["nm", "-D", "--defined-only", "-C", library], check=True,
                          capture_output=True, text=True).stdout
    names = []
    for line in text.splitlines():
        name = re.sub(r"^[0-9a-f]* *\w ", "", line)
        names.append(re.sub(r"\[abi:\w+\]", "", name).split("(")[0])
    return names


def declared(mark, pattern):
    """Names that follow the export mark in the public headers."""
    found = set()
    for directory, _, files in os.walk(INCLUDE):
        for name in files:
            with open(os.path.join(directory, name), encoding="utf-8") as text:
                code = re.sub(r"^#.*$", "", text.read(), flags=re.MULTILINE)
                # The name is what stands before the first parenthesis.
                found |= set(re.findall(mark + r"\s[^(;{]*?\b(" + pattern + r")\(", code))
    return found


def main():
    names = exported(sys.argv[1])
    c_api = declared("FLASHCORE_C_API", r"flashcore_\w+")
    cxx_api = {"flashcore::" + name for name in declared("FLASHCORE_API", r"\w+")}
    if not c_api or not cxx_api:
        print("found no declaration in the public headers", file=sys.stderr)
        return 1
    strangers = [name for name in names if name not in c_api | cxx_api]
    missing = sorted((c_api | cxx_api) - set(names))
    for name in strangers:
        print(f"exported, but not part of the public API: {name}")
    for name in missing:
        print(f"part of the public API, but not exported: {name}")
    print(f"{len(names)} symbols exported, {len(c_api)} C and {len(cxx_api)} C++ names declared")
    return 1 if strangers or missing else 0


if __name__ == "__main__":
    sys.exit(main())
