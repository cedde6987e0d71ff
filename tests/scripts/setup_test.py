"""Tests scripts/setup: it lists missing packages without installing them, and is fast if none is missing."""
import os
import shutil
import subprocess
import tempfile
import time
import unittest

TREE = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
SETUP = os.path.join(TREE, "scripts", "setup")
# Programs that the script itself needs. Every Debian system has them.
BASICS = ["bash", "basename", "cat", "dirname", "env", "grep", "head", "id", "mkdir", "nproc",
          "printf", "sed", "sort", "tail"]


class Setup(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bin = os.path.join(folder.name, "bin")
        os.mkdir(self.bin)
        for name in BASICS:
            os.symlink(shutil.which(name), os.path.join(self.bin, name))
        # A copy, so that the tree's .venv is not used.
        self.setup = os.path.join(folder.name, "scripts", "setup")
        shutil.copytree(os.path.join(TREE, "scripts"), os.path.dirname(self.setup))
        shutil.copy(os.path.join(TREE, "requirements-dev.txt"), folder.name)

    def command(self, name, text):
        path = os.path.join(self.bin, name)
        with open(path, "w", encoding="utf-8") as script:
            script.write("#!/bin/sh\n" + text)
        os.chmod(path, 0o755)

    def run_setup(self, *arguments, path=None, script=None, **variables):
        environment = {**os.environ, "NO_INSTALL": "1", "PATH": path or self.bin, "TORCH": "1",
                       **variables}
        for name in ("CXX", "LOGS", "FLASHCORE_BROWSER"):
            environment.pop(name, None)
        done = subprocess.run([script or self.setup, *arguments], capture_output=True, text=True,
                              env=environment)
        return done.returncode, done.stdout + done.stderr

    def test_a_bare_machine(self):
        code, said = self.run_setup("build")
        self.assertEqual(code, 1, said)
        for package in ("g++", "binutils", "ninja-build", "pkg-config", "cmake", "libcli11-dev",
                        "libfmt-dev", "nlohmann-json3-dev"):
            self.assertIn(" " + package, said)
        self.assertNotIn("libgtest-dev", said)
        self.assertIn("nothing is installed", said)

    def test_levels_add_up(self):
        self.assertIn("libgtest-dev", self.run_setup("test")[1])
        self.assertNotIn("clang-tidy", self.run_setup("test")[1])
        self.assertIn("clang-tidy", self.run_setup("dev")[1])

    def test_browser_comes_with_the_tests(self):
        self.assertIn(" chromium", self.run_setup("test")[1])
        self.assertNotIn("chromium", self.run_setup("test", TORCH="0")[1])
        self.command("google-chrome", "exit 0\n")
        self.assertNotIn("chromium", self.run_setup("test")[1])

    def test_mpi_comes_with_the_tests(self):
        self.assertIn(" openmpi-bin libopenmpi-dev", self.run_setup("test")[1])
        self.assertNotIn("openmpi", self.run_setup("test", TORCH="0")[1])
        self.assertNotIn("openmpi", self.run_setup("build")[1])
        for name in ("mpirun", "mpicxx"):
            self.command(name, "exit 0\n")
        self.assertNotIn("openmpi", self.run_setup("test")[1])

    def test_packages_without_a_build_are_not_asked_for_again(self):
        logs = os.path.join(os.path.dirname(os.path.dirname(self.setup)), "build", "logs")
        os.makedirs(logs)
        with open(os.path.join(logs, "not_installable"), "w", encoding="utf-8") as names:
            names.write("python.report_browser\nframeworks.jax\nmpi.ring_mpi\n")
        said = self.run_setup("test")[1]
        self.assertNotIn("chromium", said)
        self.assertNotIn("openmpi", said)
        self.assertNotIn("jax", said)
        self.assertIn("torch", said)

    def test_formatter_and_type_checker_come_with_the_tests(self):
        self.assertNotIn("clang-format", self.run_setup("build")[1])
        said = self.run_setup("test", TORCH="0")[1]
        self.assertRegex(said, r"pip into .venv: clang-format==14\.\S+ mypy==\S+")
        self.command("apt-cache", "echo '  Candidate: 1:14.0.6-12'\n")
        said = self.run_setup("test", TORCH="0")[1]
        self.assertRegex(said, r"apt-get: .*\bclang-format-14\b")
        self.assertRegex(said, r"pip into .venv: mypy==\S+")
        self.command("clang-format", "echo clang-format version 15.0.1\n")
        self.assertIn("clang-format 14", self.run_setup("test", TORCH="0")[1])
        self.command("clang-format-14", "echo Debian clang-format version 14.0.6\n")
        self.assertNotIn("clang-format 14", self.run_setup("test", TORCH="0")[1])

    def test_torch_can_be_excluded(self):
        code, said = self.run_setup("test")
        for package in ("torch", "numpy", "transformers", "scikit-build-core", "onnx",
                        "expecttest", "hypothesis", "jax"):
            self.assertRegex(said, f"pip into .venv:.* {package}")
        self.assertNotIn("torch", self.run_setup("build")[1])
        self.assertNotIn("torch", self.run_setup("test", TORCH="0")[1])

    def test_an_old_cmake_is_not_enough(self):
        self.command("cmake", "echo cmake version 3.22.1\n")
        self.assertIn("cmake >= 3.25", self.run_setup("build")[1])
        self.command("cmake", "echo cmake version 3.25.1\n")
        self.assertNotIn("cmake >= 3.25", self.run_setup("build")[1])

    def test_cmake_comes_from_pip_if_the_distribution_has_an_old_one(self):
        self.command("apt-cache", "echo '  Candidate: 3.22.1-1ubuntu1'\n")
        code, said = self.run_setup("build")
        self.assertIn("pip into .venv: cmake>=3.25", said)
        self.assertIn("python3-venv", said)

    def test_a_compiler_that_does_not_work(self):
        self.command("g++", "case $1 in -dump*) echo 12.2.0;; *) exit 1;; esac\n")
        self.assertIn("a C++20 compiler", self.run_setup("build")[1])

    def test_an_unknown_level(self):
        self.assertEqual(self.run_setup("everything")[0], 2)

    def test_fast_if_nothing_is_missing(self):
        start = time.monotonic()
        code, said = self.run_setup("build", path=os.environ["PATH"], script=SETUP)
        self.assertEqual(code, 0, said)  # this tree was built, so nothing is missing
        # The target is 2 seconds; the margin is for a loaded machine.
        self.assertLess(time.monotonic() - start, 10)


if __name__ == "__main__":
    unittest.main()
