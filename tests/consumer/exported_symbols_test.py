"""The shared library exports exactly the public API.

    exported_symbols_test.py LIBFLASHCORE_SO
"""
import os
import re
import subprocess
import sys

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
# The headers of the bindings are not installed. Their functions are exported for ctypes.
INCLUDE, BINDINGS = os.path.join(TREE, "include"), os.path.join(TREE, "bindings")


def exported(library):
    """Demangled names without parameters."""
    text = subprocess.run(["nm", "-D", "--defined-only", "-C", library], check=True,
                          capture_output=True, text=True).stdout
    names = []
    for line in text.splitlines():
        name = re.sub(r"^[0-9a-f]* *\w ", "", line)
        names.append(re.sub(r"\[abi:\w+\]", "", name).split("(")[0])
    return names


SCOPE = re.compile(r"\b(?:struct|class)\s+(?:FLASHCORE_\w+\s+)?(\w+)[^;{}()]*\{|[{}]")


def class_at(code, position):
    """The prefix "Name::" of the class around a position of a header, or an empty text."""
    scopes = []
    for token in SCOPE.finditer(code[:position]):
        if token[0] == "}":
            scopes.pop()
        else:
            scopes.append(f"{token[1]}::" if token[1] else "")
    return "".join(scopes)


def declared(mark, pattern, *folders):
    """Names that follow the export mark in the headers of the folders, with their classes."""
    found = set()
    for directory, _, files in (step for folder in folders for step in os.walk(folder)):
        for name in (name for name in files if name.endswith(".h")):
            with open(os.path.join(directory, name), encoding="utf-8") as text:
                code = re.sub(r"^#.*$|//.*$", "", text.read(), flags=re.MULTILINE)
                # The name precedes the first parenthesis.
                for match in re.finditer(mark + r"\s[^(;{]*?\b(" + pattern + r")\(", code):
                    found.add(class_at(code, match.start()) + match[1])
    return found


def main():
    names = exported(sys.argv[1])
    c_api = declared("FLASHCORE_C_API", r"flashcore_\w+", INCLUDE)
    glue = declared("FLASHCORE_C_API", r"flashcore_python_\w+", BINDINGS)
    cxx_api = {"flashcore::" + name for name in declared("FLASHCORE_API", r"\w+", INCLUDE)}
    if not c_api or not cxx_api or not glue:
        print("the headers have no declarations", file=sys.stderr)
        return 1
    if c_api & glue:
        print(f"public headers declare functions of the bindings: {', '.join(sorted(c_api & glue))}")
        return 1
    c_api |= glue
    undeclared = [name for name in names if name not in c_api | cxx_api]
    missing = sorted((c_api | cxx_api) - set(names))
    for name in undeclared:
        print(f"exported, but not part of the public API: {name}")
    for name in missing:
        print(f"part of the public API, but not exported: {name}")
    print(f"{len(names)} symbols exported, {len(c_api)} C and {len(cxx_api)} C++ names declared")
    return 1 if undeclared or missing else 0


if __name__ == "__main__":
    sys.exit(main())
