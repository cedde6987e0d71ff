"""Runs README's Python quick start exactly as printed: `pip install .`, then the program. Checks the
installed files. Uses a new venv, offline, with the build tools of the Python that runs this.

    wheel_test.py      exit code 77: it cannot be built here
"""
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time

TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BLOCK = re.compile(r"<!-- python (file|run) ([^>]*?) -->\n```(\w+)\n(.*?)```\n", re.DOTALL)
MAX_BYTES = 25e6
SAYS = r"kernel +fwd_\w+_f32.*\n.* differs by 0\.0\n"  # output of the program
# Checks of the installed package, independent of the working folder.
CHECKS = """
import doctest, pathlib, sys
import flashcore, flashcore._attention, flashcore.cache
folder = pathlib.Path(flashcore.__file__).parent
assert sys.prefix in str(folder), folder
assert pathlib.Path(flashcore.load().path).parent == folder, flashcore.load().path
assert (folder / "py.typed").exists() and (folder / "bench" / "cases.json").exists()
for module in (flashcore._attention, flashcore.cache):
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert tried and not failed
print("bytes", sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()))
"""


def fail(words):
    raise SystemExit(f"wheel_test: {words}")


def readme_blocks(tree=TREE):
    """(install command, program, run command) as README prints them."""
    with open(os.path.join(tree, "README.md"), encoding="utf-8") as readme:
        blocks = BLOCK.findall(readme.read())
    kinds = [f"{kind} {what}" for kind, what, _, _ in blocks]
    wanted = ["run in the source tree", "file examples/quick_start.py", "run beside the file"]
    if kinds != wanted:
        fail(f"README's Python blocks are {kinds}; wanted {wanted}")
    with open(os.path.join(tree, "examples", "quick_start.py"), encoding="utf-8") as example:
        if example.read() != blocks[1][3]:
            fail("README's Python block is not examples/quick_start.py; copy it there")
    return [code for _, _, _, code in blocks]


class Installation:
    """A new venv that also sees the packages of the Python that runs this."""

    def __init__(self, home):
        self.home = home
        subprocess.run([sys.executable, "-m", "venv", os.path.join(home, "venv")], check=True)
        self.environment = {
            **os.environ,
            "HOME": home,
            "PATH": os.path.join(home, "venv", "bin") + os.pathsep + os.environ["PATH"],
            # If that is a venv with system packages, these are included.
            "PYTHONPATH": os.pathsep.join(
                path for path in sys.path if path.endswith(("site-packages", "dist-packages"))),
            "PIP_NO_BUILD_ISOLATION": "0",  # "0" makes pip use the installed build tools
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            # Other tests compile CUDA code; here it would only take time.
            "CMAKE_ARGS": "-DFLASHCORE_CUDA=OFF",
        }
        for name in ("FLASHCORE_LIBRARY", "VIRTUAL_ENV"):
            self.environment.pop(name, None)

    def run(self, script, folder):
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder, text=True,
                              env=self.environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        print(done.stdout)
        if done.returncode != 0:
            fail(f"exit {done.returncode} of:\n{script}")
        return done.stdout


def main():
    if os.environ.get("TORCH") == "0":
        print("TORCH=0 excludes Python packages, among them scikit-build-core")
        return 77
    for module in ("scikit_build_core", "numpy"):
        if importlib.util.find_spec(module) is None:
            print(f"{module} is not installed")
            return 77
    install, program, start = readme_blocks()
    with tempfile.TemporaryDirectory() as home:
        venv = Installation(home)
        begin = time.monotonic()
        venv.run(install, TREE)
        seconds = time.monotonic() - begin
        work = os.path.join(home, "work")
        os.mkdir(work)
        with open(os.path.join(work, "quick_start.py"), "w", encoding="utf-8") as file:
            file.write(program)
        said = venv.run(start, work)
        if not re.search(SAYS, said):
            fail("the quick start printed unexpected output")
        size = int(re.search(r"bytes (\d+)", venv.run(f"python3 - <<'PY'{CHECKS}PY", work)).group(1))
        command = venv.run("command -v flashcore", work).strip()
        if command != os.path.join(home, "venv", "bin", "flashcore"):
            fail(f"the command flashcore is {command}")
        venv.run("flashcore info && flashcore run --shape 1,2,64,32", work)
        size += os.path.getsize(command)
        if size > MAX_BYTES:
            fail(f"{size} bytes are installed; at most {MAX_BYTES:.0f} are allowed")
    print(f"installed in {seconds:.0f} s, {size / 1e6:.1f} MB unpacked; README's quick start ran as "
          "printed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
