"""Result files in bench/results, one per GPU, and one per CPU and number of threads.

A run updates its file after every case, so an interrupted run keeps its finished rows.
bench/results/README.md describes the fields.
"""

import datetime
import json
import math
import os
import platform
import re
import subprocess
import tempfile
from pathlib import Path

from flashcore.bench.cases import FIELDS

STATUSES = ("passed", "failed", "not run", "timed out")
TOP_FIELDS = ("fingerprint", "gpu", "driver", "cuda", "torch", "cudnn", "date", "command", "rows")
_HASH = re.compile(r"[0-9a-f]{16}")


def file_name(device_name):
    """"NVIDIA H200" -> "h200.json", "NVIDIA GeForce RTX 4090" -> "geforce-rtx-4090.json"."""
    words = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    words = re.sub(r"^(nvidia|tesla)-", "", words)
    return f"{words or 'unknown'}.json"


def cpu_name(cpuinfo=Path("/proc/cpuinfo")):
    """The CPU's model and what tells generations of one name apart: "Intel Xeon 2.50GHz model 85 stepping 4"."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    # x86-64, then aarch64.
    fields = dict(re.findall(r"^([^:\n]*[^:\s])[^\S\n]*:[^\S\n]*(.*)$", text, re.MULTILINE))
    words = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@", " ", fields.get("model name", "")).split()
    for field, word in (("model", "model"), ("stepping", "stepping"), ("CPU implementer", "implementer"),
                        ("CPU part", "part"), ("CPU variant", "variant")):
        if field in fields:
            words += [word, fields[field]]
    return " ".join(words) or platform.machine()


def cpu_file_name(cpu, threads):
    """"Intel Xeon 2.50GHz model 85", 2 threads -> "intel-xeon-2-50ghz-model-85-2-threads.json"."""
    return file_name(f"{cpu} {threads} thread{'' if threads == 1 else 's'}")


def dumps(result):
    """JSON with one field per line. A list of numbers is on one line."""
    text = json.dumps(result, indent=1, allow_nan=False)
    return re.sub(r"\[\s+([-+0-9.e,\s]+?)\s+\]",
                  lambda found: "[" + re.sub(r"\s+", " ", found.group(1)) + "]", text)


def write(path, result):
    """Replaces the file atomically, so that a reader or a kill never sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dumps(result) + "\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read(path):
    """The content of the file; None if there is no file."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def key(row):
    """The key of a row: equal keys mean the same case."""
    return tuple(row.get(name) for name in FIELDS)


def merge_rows(old, new):
    """The old rows, with rows of the same case replaced, and the other new rows appended."""
    fresh = {key(row): row for row in new}
    merged = [fresh.pop(key(row), row) for row in old]
    return merged + [row for row in new if key(row) in fresh]


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _ask(arguments, timeout=20):
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def gpu_environment():
    """Name, driver, clocks and toolkit of GPU 0. Unknown values are empty strings."""
    names = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit",
             "temperature.gpu")
    line = _ask(["nvidia-smi", "--id=0", f"--query-gpu={','.join(names)}",
                 "--format=csv,noheader,nounits"])
    values = [value.strip() for value in line.split(",")] if line else [""] * len(names)
    found = dict(zip(names, values + [""] * (len(names) - len(values))))
    release = re.search(r"release ([0-9.]+)", _ask(["nvcc", "--version"]))
    return {
        "gpu": found["name"],
        "driver": found["driver_version"],
        "cuda": release.group(1) if release else "",
        "clocks": {"sm_mhz": found["clocks.sm"], "memory_mhz": found["clocks.mem"],
                   "max_sm_mhz": found["clocks.max.sm"], "power_limit_w": found["power.limit"],
                   "temperature_c": found["temperature.gpu"]},
    }


def torch_versions(torch):
    """{"torch": ..., "cudnn": ...}; "not installed" without torch."""
    if torch is None:
        return {"torch": "not installed", "cudnn": "not installed"}
    cudnn = "not installed"
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        number = torch.backends.cudnn.version()
        cudnn = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return {"torch": str(torch.__version__), "cudnn": cudnn}


def rounded(value, digits=5):
    """Rounds all floats in a structure to `digits` significant digits. NaN and infinity become strings,
    because JSON has neither."""
    if isinstance(value, dict):
        return {name: rounded(one, digits) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one, digits) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
    return value


def _is_number(value):
    return type(value) in (int, float) and math.isfinite(value)


def problems_of_row(row):
    problems = [f"no field \"{name}\"" for name in FIELDS if name not in row]
    if not isinstance(row.get("kernel"), str) or not row["kernel"]:
        problems.append("kernel is not a name")
    if not _HASH.fullmatch(str(row.get("kernel_fingerprint"))):
        problems.append("kernel_fingerprint is not 16 hexadecimal digits")
    times = ("us", "bare_us") if "call" in row else ("us",)
    for name in (*times, "spread", "error"):
        if not _is_number(row.get(name)) or row[name] < 0 or (name in times and row[name] == 0):
            problems.append(f"{name} is {row.get(name)!r}")
    peers = row.get("peers_us")
    if not isinstance(peers, dict) or not all(_is_number(us) and us > 0 for us in peers.values()):
        problems.append("peers_us is not a table of times")
    for name in ("baselines_us", "baseline_ratios"):
        if not all(_is_number(one) and one > 0 for one in row.get(name, {}).values()):
            problems.append(f"{name} is not a table of positive numbers")
    return problems


def problems_of(result):
    """A list of all problems in a result file."""
    problems = [f"no field \"{name}\"" for name in TOP_FIELDS if name not in result]
    if not _HASH.fullmatch(str(result.get("fingerprint"))):
        problems.append("fingerprint is not 16 hexadecimal digits")
    for name, stage in result.get("stages", {}).items():
        if stage.get("status") not in STATUSES:
            problems.append(f"stage {name}: status is {stage.get('status')!r}")
        if not _is_number(stage.get("seconds")):
            problems.append(f"stage {name}: seconds is {stage.get('seconds')!r}")
        if stage.get("status") != "passed" and not stage.get("reason"):
            problems.append(f"stage {name}: is {stage.get('status')} without a reason")
    seen = set()
    for number, row in enumerate(result.get("rows", [])):
        problems += [f"row {number}: {problem}" for problem in problems_of_row(row)]
        if key(row) in seen:
            problems.append(f"row {number}: the same case as a row before")
        seen.add(key(row))
    return problems
