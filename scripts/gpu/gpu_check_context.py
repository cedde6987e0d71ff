"""Paths and environment of the commands that scripts/gpu_check runs."""

import os
import shutil
import sys
from pathlib import Path

from gpu_check_runner import FAILED, PASSED, Command, Outcome


class Context:
    """Paths, options and environment of a run."""

    def __init__(self, root, options):
        self.root, self.options = Path(root), options
        self.runner = None  # set once there is a report
        self.build = self.root / "build" / "cuda"
        self.faults_build = self.root / "build" / "faults-cuda"
        self.cli = self.build / "bin" / "flashcore"
        self.logs = self.root / "build" / "gpu-check"
        self.env = command_environment(self.root)
        self.jobs = options.jobs or len(os.sched_getaffinity(0))
        self.jobs_of_a_stage = self.jobs  # fewer while several stages run

    def start(self, name, arguments, **extra_env):
        return Command(arguments, self.logs / f"{name}.log", self.root, {**self.env, **extra_env})

    def run(self, name, arguments, limit_s, **extra_env):
        return self.start(name, arguments, **extra_env).wait(limit_s)


def command_environment(root):
    """The caller's environment with .venv first on the PATH and the usual folder of nvcc last."""
    env = dict(os.environ)
    folders = [str(root / ".venv" / "bin"), env.get("PATH", ""), "/usr/local/cuda/bin"]
    env["PATH"] = os.pathsep.join(folder for folder in folders if folder)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root / "python"),
                                                      env.get("PYTHONPATH", "")]))
    env["PYTHONUNBUFFERED"] = "1"
    env.pop("FLASHCORE_LIBRARY", None)  # measure the build of this tree
    return env


def from_command(done, what, details=None):
    """Passed if the command succeeded."""
    if done.code == 0:
        return Outcome(PASSED, "", details or {})
    return Outcome(FAILED, done.failure(what), {**(details or {}), "output": done.last_lines()})


def python_with_torch(context):
    """The first Python that can import torch, or None."""
    candidates = [os.environ.get("FLASHCORE_PYTHON"), sys.executable, shutil.which("python3"),
                  shutil.which("python3", path=context.env["PATH"])]
    for number, python in enumerate(dict.fromkeys(filter(None, candidates))):
        if context.run(f"torch_{number}", [python, "-c", "import torch"], 60).code == 0:
            return python
    return None
