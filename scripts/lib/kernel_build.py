"""Shared code of `make kernel` and `make profile`: the lists of kernels, a build with one kernel only,
and the bench cases of a kernel's size."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build" / "logs"
_MOST_CASES = 5
_MOST_ELEMENTS = 1.4e8  # in q, k and v; drawing more takes the host longer than the kernel takes
_PROXY_ARCHITECTURE = "90"  # target of a machine without a GPU


class Failure(Exception):
    """An error with a message for the user."""


@dataclass(frozen=True)
class Kernel:
    id: str
    op: str  # "fwd" or "bwd"
    device: str  # "cuda" or "cpu"
    family: str  # a name of src/plan/kernel_traits.h
    dtype: str
    head_dim: int = 576
    tile_q: int = 64
    inputs: str = "native"  # "kv8": 8-bit k and v; "fp8": e4m3 q, k and v
    isa: str = ""  # CPU kernels only
    shape: tuple = ()  # CUDA kernels only: the numbers of the template arguments


def read_kernels(root=ROOT):
    """All kernels of src/cuda/kernels.def and src/cpu/kernels.def."""
    gpu = (root / "src" / "cuda" / "kernels.def").read_text(encoding="utf-8")
    cpu = (root / "src" / "cpu" / "kernels.def").read_text(encoding="utf-8")
    found = []
    for row in re.findall(r"^FLASHCORE_KERNEL\((.*)\)$", gpu, re.MULTILINE):
        id_, op, family, inputs, dtype, head_dim, _, *shape, _, _ = row.split(", ")
        found.append(Kernel(id_, op, "cuda", family, dtype, int(head_dim), int(shape[0]), inputs,
                            shape=(int(head_dim), *map(int, shape))))
    for op, isa, dtype in re.findall(r"^FLASHCORE_CPU_KERNEL\((\w+), (\w+), (\w+)\)$", cpu, re.MULTILINE):
        found.append(Kernel(f"{op}_{isa}_{dtype}", op, "cpu", "cpu", dtype, isa=isa))
    for op, isa, dtype in re.findall(r"^FLASHCORE_CPU_ROWS_KERNEL\((\w+), (\w+), (\w+)\)$", cpu, re.MULTILINE):
        found.append(Kernel(f"{op}_{isa}_{dtype}_q16", op, "cpu", "cpu", dtype, tile_q=16, isa=isa))
    return found


def cuda_groups(kernels, root=ROOT):
    """(printed name, row of kFamilies as text, kernels) of each CUDA family and kind of inputs."""
    table = (root / "src" / "plan" / "kernel_traits.h").read_text(encoding="utf-8")
    for row in re.findall(r"\{\.family = .*?\.source_dirs", table, re.DOTALL):
        names = re.search(r"\.names = \{(.*)\}", row)[1].split(", ")
        family = names[0].strip('"')
        for name, inputs in zip(names, ("native", "kv8", "fp8"), strict=True):
            found = [one for one in kernels
                     if (one.device, one.family, one.inputs) == ("cuda", family, inputs)]
            if found:
                yield name.strip('"'), row, found


def only(kernels):
    """A regular expression that matches the ids of these kernels and no others."""
    return f"^({'|'.join(one.id for one in kernels)})$"


def persistent_kernels(kernels, root=ROOT):
    """{printed family name: regular expression of kernel ids} of the persistent families."""
    return {name: only(found) for name, row, found in cuda_groups(kernels, root)
            if ".persistent = true" in row}


def fault_kernels(kernels, root=ROOT):
    """{printed family name: regular expression of kernel ids} for fault injection. Each family gives the
    last kernel of each operation and tile_q, with head_dim 64. A family with f32 kernels gives them in all
    dtypes, the others in bf16."""
    groups = {}
    for name, _, found in cuda_groups(kernels, root):
        every_dtype = any(one.dtype == "f32" for one in found)
        last = {(one.op, one.dtype, one.tile_q): one for one in found
                if one.head_dim == 64 and (every_dtype or one.dtype == "bf16")}
        groups[name] = only(last.values())
    return groups


def find_kernel(id_, kernels):
    for kernel in kernels:
        if kernel.id == id_:
            return kernel
    alike = [kernel.id for kernel in kernels if id_ and id_ in kernel.id]
    known = alike or [kernel.id for kernel in kernels]
    raise Failure(f"there is no kernel \"{id_}\"; {'some like it' if alike else 'there'} are "
                  f"{', '.join(known)}")


def case_dtype(kernel):
    """The dtype of a case for this kernel. A dtype after a slash is that of K and V."""
    return f"{kernel.dtype}/e4m3" if kernel.inputs == "kv8" else kernel.dtype


def cases_for(kernel, kernels, cases):
    """The cases of a kernel's size class in its dtype, smallest first. They have enough rows to fill the
    kernel's tiles; those of the smallest tile have few rows. If no case has a suitable head dim, the
    cases of head dim 128 are used with the kernel's."""
    if kernel.device == "cpu":
        wanted = [case for case in cases if case["suite"] == "cpu" and case["kind"] == "fwd"]
        return distinct({**case, "dtype": kernel.dtype} for case in wanted)
    family = [one for one in kernels if (one.family, one.inputs, one.dtype)
              == (kernel.family, kernel.inputs, kernel.dtype)]
    smaller = max((one.head_dim for one in family if one.head_dim < kernel.head_dim), default=0)
    tiles = sorted(one.tile_q for one in family if one.head_dim == kernel.head_dim)
    gpu = [case for case in cases if case["kind"] == "fwd" and case["suite"] in ("anchors", "simt")
           and "e4m3" not in case["dtype"] and elements_of(case) <= _MOST_ELEMENTS]
    sized = [case for case in gpu if smaller < case["head_dim"] <= kernel.head_dim] or \
        [{**case, "head_dim": kernel.head_dim} for case in gpu if case["head_dim"] == 128]

    def rows(case):
        return case["q_len"] * case["q_heads"] // case["kv_heads"]

    if kernel.tile_q > tiles[0]:
        sized = [case for case in sized if 2 * rows(case) > kernel.tile_q]
    elif len(tiles) > 1:
        sized = [case for case in sized if rows(case) < 2 * tiles[1]] or sized
    return distinct({**case, "dtype": case_dtype(kernel)} for case in sized)


def elements_of(case):
    rows = case["q_heads"] * case["q_len"] + 2 * case["kv_heads"] * case["kv_len"]
    return case["batch"] * rows * case["head_dim"]


def distinct(cases):
    """Cases without duplicates, sorted by work, at most _MOST_CASES, evenly sampled."""
    by_work = sorted(cases, key=lambda case: case["batch"] * case["q_heads"] * case["q_len"]
                     * case["kv_len"] * case["head_dim"])
    chosen = []
    for case in by_work:
        one = {**case, "suite": "kernel"}
        if one not in chosen:
            chosen.append(one)
    if len(chosen) <= _MOST_CASES:
        return chosen
    step = (len(chosen) - 1) / (_MOST_CASES - 1)
    return [chosen[round(i * step)] for i in range(_MOST_CASES)]


def load_cases(root=ROOT):
    return json.loads((root / "bench" / "cases.json").read_text(encoding="utf-8"))["cases"]


# ptxas -v prints one such paragraph per kernel and architecture.
_PTXAS = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers", re.DOTALL)


def ptxas_lines(log):
    """One line with registers, spills and stack for each attention kernel in a build log."""
    return [f"sm_{one['arch']}: {one['registers']} registers, spills {one['stores']} bytes stored "
            f"and {one['loads']} loaded, stack {one['stack']} bytes"
            for one in _PTXAS.finditer(log) if "attention" in one["name"]]


def gpu_architecture():
    """The compute capability of GPU 0 without its point, like "90"; "" without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = subprocess.run(["nvidia-smi", "--id=0", "--query-gpu=compute_cap",
                            "--format=csv,noheader"], capture_output=True, text=True)
    found = re.fullmatch(r"(\d+)\.(\d+)", asked.stdout.strip())
    return found.group(1) + found.group(2) if asked.returncode == 0 and found else ""


def environment():
    """The environment with .venv first on the PATH and the usual folder of nvcc last."""
    folders = [str(ROOT / ".venv" / "bin"), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return {**os.environ, "PATH": os.pathsep.join(folders)}


def run_logged(arguments, log):
    """Runs a command with its output in a log. Returns the output; a Failure holds the end of it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run([str(one) for one in arguments], stdout=file,
                              stderr=subprocess.STDOUT, cwd=ROOT, env=environment())
    text = log.read_text(encoding="utf-8", errors="replace")
    if done.returncode != 0:
        tail = "\n".join(text.splitlines()[-30:])
        raise Failure(f"{tail}\n{' '.join(str(one) for one in arguments[:3])} failed; full output: "
                      f"{log.relative_to(ROOT)}")
    return text


def build(kernel, jobs):
    """Builds the command with this kernel only. Returns (path, ptxas_lines)."""
    folder = ROOT / "build" / ("kernel-cpu" if kernel.device == "cpu" else "kernel")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DFLASHCORE_BUILD_TESTS=OFF"]
    if kernel.device == "cpu":
        options += ["-DFLASHCORE_CUDA=OFF"]
    else:
        architecture = gpu_architecture() or _PROXY_ARCHITECTURE
        options += ["-DFLASHCORE_CUDA=ON", f"-DFLASHCORE_KERNELS=^{kernel.id}$",
                    f"-DFLASHCORE_ONLY_ARCHITECTURE={architecture}"]
    run_logged(["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *options],
               LOGS / "configure-kernel.log")
    text = run_logged(["cmake", "--build", folder, "-j", str(jobs), "--target", "flashcore_cli"],
                      LOGS / "build-kernel.log")
    # ptxas prints nothing if the kernel was up to date, so keep the lines of the last compilation.
    remembered = folder / f"ptxas-{kernel.id}.txt"
    lines = ptxas_lines(text)
    if lines:
        remembered.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif remembered.is_file():
        lines = remembered.read_text(encoding="utf-8").splitlines()
    return folder / "bin" / "flashcore", lines
