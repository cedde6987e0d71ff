"""The stages of scripts/gpu_check that measure, and the bars their figures must reach."""

import json

from flashcore import _results
from flashcore._cases import FIELDS, Case
from gpu_check_context import from_command, python_with_torch
from gpu_check_runner import FAILED, PASSED, TIMED_OUT, Outcome

# What the plain kernel and the host code must reach on an H200: (row or figure, limit).
_BARS = {"NVIDIA H200": {"simt-small": ("us", 25.0), "simt-f32": ("tflops", 12.0),
                         "own_host_us": ("us", 1.0)}}


def host_cost(context, limit_s):
    """Host time of make_plan + run, from the command's own bench: no Python in between. Judged is
    what it adds to the launch of an empty kernel, which is the driver's and the machine's."""
    done = context.run("host", [context.cli, "bench", "--device", "cuda", "--suite", "simt",
                                "--json", "--time-limit", str(int(limit_s - 5))], limit_s)
    try:
        found = json.loads(done.output)
        details = {name: found[name] for name in ("host_us", "launch_us")}
    except (ValueError, KeyError):
        return from_command(done, "flashcore bench --json") if done.code else \
            Outcome(FAILED, "flashcore bench printed no host_us and launch_us")
    context.runner.report.result.update(details)
    bar = _BARS.get(context.runner.report.result["gpu"], {}).get("own_host_us")
    own = details["host_us"] - details["launch_us"]
    if bar is not None and not own <= bar[1]:
        return Outcome(FAILED, f"make_plan + run take {own:.2f} us of host time more than an empty "
                       f"launch; the bar is {bar[1]:g}", details)
    return Outcome(PASSED, "", details)


def bench(context, limit_s):
    """python/flashcore/bench.py, or where torch is missing the command's bench, without peers."""
    output = context.logs / "bench.json"
    output.unlink(missing_ok=True)
    python = getattr(context, "python", None) or python_with_torch(context)
    time_limit = str(int(limit_s - 20))
    if python is not None:
        done = context.run("bench", [python, "-m", "flashcore.bench", "--output", output,
                                     "--case-seconds", "1", "--time-limit", time_limit], limit_s)
    else:
        done = context.run("bench", [context.cli, "bench", "--device", "cuda", "--output", output,
                                     "--time-limit", time_limit], limit_s)
    return take_rows(context.runner.report, output, done)


def take_rows(report, output, done):
    """Moves the rows measured so far into the report, however the command ended."""
    measured = _results.read(output) or {}
    rows = measured.get("rows", [])
    report.result["rows"] = rows or report.result["rows"]
    report.result["skipped"] = measured.get("skipped", [])
    details = {"rows": len(rows), "skipped": len(measured.get("skipped", [])),
               "failed": measured.get("failed", []),
               "bars": bars_of(report.result["gpu"], rows)}
    outcome = from_command(done, "the benchmark", details)
    late = [one["name"] for one in measured.get("skipped", [])
            if "time limit" in one.get("reason", "")]
    missed = [name for name, bar in details["bars"].items() if not bar["met"]]
    if outcome.status != PASSED:
        return outcome
    if not rows:
        return Outcome(FAILED, "no row was measured", details)
    if late:
        return Outcome(TIMED_OUT, f"{len(late)} cases were not reached", details)
    if missed:
        return Outcome(FAILED, f"below the bar: {', '.join(missed)}", details)
    return outcome


def tflops_of(row):
    return Case(**{name: row[name] for name in FIELDS}).flops() / row["us"] / 1e6


def bars_of(gpu, rows):
    bars = {}
    for name, (figure, limit) in _BARS.get(gpu, {}).items():
        row = next((one for one in rows if one["name"] == name), None)
        if row is None:
            continue
        got = row[figure] if figure in row else tflops_of(row)
        met = got <= limit if figure == "us" else got >= limit
        bars[name] = {"figure": figure, "limit": limit, "got": got, "met": met}
    return bars
