"""Runs the commands of the quick starts in docs/c_and_cpp.md: install, compile, run.

    readme_test.py TREE BUILD_DIR

A comment marks each block: "file PATH" (the block equals PATH; it is saved under that name), "run in the
source tree" or "run beside the files". scripts/checks/doc_links checks the links.
"""
import os
import re
import subprocess
import sys
import tempfile

DOCUMENT = os.path.join("docs", "c_and_cpp.md")
BLOCK = re.compile(r"<!-- (file|run) ([^>]*?) -->\n```(\w+)\n(.*?)```\n", re.DOTALL)


def run(script, folder, home, build):
    environment = {**os.environ, "HOME": home}
    # Test the library of this build folder, which exists already.
    environment["PRESET"] = os.path.basename(build)
    environment["FLASHCORE_BUILD_TESTS"] = "ON"
    for name in ("MAKEFLAGS", "MFLAGS", "PKG_CONFIG_PATH", "LD_LIBRARY_PATH", "DESTDIR"):
        environment.pop(name, None)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    if done.returncode != 0:
        raise SystemExit(f"{DOCUMENT}: commands failed (exit {done.returncode}):\n{script}")
    return done.stdout


def main():
    tree, build = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    if os.path.dirname(build) != os.path.join(tree, "build"):
        print(f"not run: the commands need the build folder of a preset, not {build}")
        sys.exit(77)
    with open(os.path.join(tree, DOCUMENT), encoding="utf-8") as source:
        text = source.read()
    blocks = BLOCK.findall(text)
    kinds = [kind + " " + what.split()[0] for kind, what, _, _ in blocks]
    if sorted(kinds) != sorted(["run in", "file examples/quick_start.c",
                                "file examples/quick_start.cc", "run beside"]):
        raise SystemExit(f"{DOCUMENT}: unexpected marked blocks: {kinds}")
    with tempfile.TemporaryDirectory() as home:
        work = os.path.join(home, "work")
        os.mkdir(work)
        for kind, what, _, code in blocks:
            if kind == "file":
                with open(os.path.join(tree, what), encoding="utf-8") as example:
                    if example.read() != code:
                        raise SystemExit(f"{DOCUMENT}: a block differs from {what}; copy {what} into it")
                with open(os.path.join(work, os.path.basename(what)), "w",
                          encoding="utf-8") as out:
                    out.write(code)
        for kind, what, _, code in blocks:
            if kind == "run":
                said = run(code, tree if what == "in the source tree" else work, home, build)
    for line in ("query 0 sees key 0 alone", "query 511 averages keys 0 to 511: 255.50"):
        if line not in said:
            raise SystemExit(f"the quick starts did not print: {line}")
    out, v = re.search(r"out (\S+), v (\S+)", said).groups()
    if out != v:
        raise SystemExit(f"the C quick start computed {out}, expected {v}")
    print(f"{DOCUMENT}: two quick starts installed, compiled and run")


if __name__ == "__main__":
    main()
