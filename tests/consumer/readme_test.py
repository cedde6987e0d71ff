"""Runs the quick starts of docs/c_and_cpp.md as printed: installs, compiles and runs them.

    readme_test.py TREE BUILD_DIR

A comment marks each block: "file PATH" (the block equals PATH and is saved under its name), "run in
the source tree" or "run beside the files". scripts/checks/doc_links checks the links.
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
    # The library under test is the one this test belongs to, built already.
    environment["PRESET"] = os.path.basename(build)
    environment["FLASHCORE_BUILD_TESTS"] = "ON"
    for name in ("MAKEFLAGS", "MFLAGS", "PKG_CONFIG_PATH", "LD_LIBRARY_PATH", "DESTDIR"):
        environment.pop(name, None)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    if done.returncode != 0:
        raise SystemExit(f"{DOCUMENT}: its commands failed (exit {done.returncode}):\n{script}")
    return done.stdout


def main():
    tree, build = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    if os.path.dirname(build) != os.path.join(tree, "build"):
        print(f"not run: {build} is not a preset's folder, which the commands use")
        sys.exit(77)
    with open(os.path.join(tree, DOCUMENT), encoding="utf-8") as source:
        text = source.read()
    blocks = BLOCK.findall(text)
    kinds = [kind + " " + what.split()[0] for kind, what, _, _ in blocks]
    if sorted(kinds) != sorted(["run in", "file examples/quick_start.c",
                                "file examples/quick_start.cc", "run beside"]):
        raise SystemExit(f"{DOCUMENT} has other marked blocks than expected: {kinds}")
    with tempfile.TemporaryDirectory() as home:
        work = os.path.join(home, "work")
        os.mkdir(work)
        for kind, what, _, code in blocks:
            if kind == "file":
                with open(os.path.join(tree, what), encoding="utf-8") as example:
                    if example.read() != code:
                        raise SystemExit(f"{DOCUMENT}: a block is not {what}; copy it there")
                with open(os.path.join(work, os.path.basename(what)), "w",
                          encoding="utf-8") as out:
                    out.write(code)
        for kind, what, _, code in blocks:
            if kind == "run":
                said = run(code, tree if what == "in the source tree" else work, home, build)
    for words in ("query 0 sees key 0 alone", "query 511 averages keys 0 to 511: 255.50"):
        if words not in said:
            raise SystemExit(f"the quick starts did not say: {words}")
    out, v = re.search(r"out (\S+), v (\S+)", said).groups()
    if out != v:
        raise SystemExit(f"the C quick start computed {out}, wanted {v}")
    print(f"{DOCUMENT}: two quick starts installed, compiled and run as printed")


if __name__ == "__main__":
    main()
