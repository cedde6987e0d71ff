"""Benchmark stages of scripts/gpu_check. Their targets are in bench/targets.json."""

import json

import gpu_check_targets
from flashcore.bench import results
from gpu_check_context import from_command, python_with_torch
from gpu_check_limits import TOLERANCE
from gpu_check_runner import FAILED, NOT_RUN, PASSED, TIMED_OUT, Outcome

# All peers except torch's math backend, which is never the fastest and takes the most time.
PEERS = "cudnn,fa2,eff,fa3,flash_attn,flashinfer,xformers"
GRADIENT_PEERS = "cudnn,fa2,fa3,fa3_det,flash_attn"


def targets_for(context):
    return gpu_check_targets.load(context.root / "bench" / "targets.json",
                               context.runner.report.result["gpu"])


def host_cost(context, limit_s):
    """Measures the host time of make_plan + run with `flashcore bench`, without Python. The target
    excludes the launch time of an empty kernel, which depends on driver and machine."""
    done = context.run("host", [context.cli, "bench", "--device", "cuda", "--suite", "simt",
                                "--json", "--time-limit", str(int(limit_s - 5))], limit_s)
    try:
        found = json.loads(done.output)
        details = {name: found[name] for name in ("host_us", "launch_us")}
    except (ValueError, KeyError):
        return from_command(done, "flashcore bench --json") if done.code != 0 else \
            Outcome(FAILED, "flashcore bench printed no host_us and launch_us")
    context.runner.report.result.update(details)
    targets = targets_for(context)
    own = details["host_us"] - details["launch_us"]
    if targets is not None and not own <= targets["host_us_above_launch"]:
        return Outcome(FAILED, f"make_plan + run take {own:.2f} us of host time more than an empty "
                       f"launch; the target is {targets['host_us_above_launch']:g}", details)
    return Outcome(PASSED, "", details)


def bench(context, limit_s):
    return timed(context, "bench", limit_s, "--suite", "anchors", "--suite", "serving", "--suite", "simt",
                 "--suite", "regression")


def bench_options(context, limit_s):
    """The cost of options: each case beside its baselines."""
    return timed(context, "bench_options", limit_s, "--suite", "options")


def bench_gradients(context, limit_s):
    return timed(context, "bench_gradients", limit_s, "--suite", "gradients", peers=GRADIENT_PEERS)


def bench_cpu(context, limit_s):
    """The gradients on the CPU that have a target."""
    return timed(context, "bench_cpu", limit_s, "--case", "cpu-bwd", device="cpu", peers="torch")


def timed(context, name, limit_s, *selected, device="cuda", peers=PEERS):
    """Runs python3 -m flashcore.bench. Without torch runs `flashcore bench`, which has neither peers nor
    baselines, for the stage bench only."""
    output = context.logs / f"{name}.json"
    output.unlink(missing_ok=True)
    python = getattr(context, "python", None) or python_with_torch(context)
    common = ["--device", device, *selected, "--output", output, "--time-limit", str(int(limit_s - 20))]
    if python is not None:
        done = context.run(name, [python, "-m", "flashcore.bench", *common, "--peers", peers, "--case-seconds", "1"],
                           limit_s)
    elif name == "bench":
        done = context.run(name, [context.cli, "bench", *common], limit_s)
    else:
        return Outcome(NOT_RUN, "no Python here can import torch")
    excused = gpu_check_targets.explained(context.root / "docs" / "performance.md")
    return take_rows(context.runner.report, output, done, targets_for(context), excused,
                     context.runner.say)


def take_rows(report, output, done, targets=None, excused=frozenset(), say=print):
    """Moves the measured rows with their targets into the report, even if the command failed. They replace rows
    of the same cases. Prints the table of targets."""
    measured = results.read(output) or {}
    rows = measured.get("rows", [])
    report.result["rows"] = results.merge_rows(report.result["rows"], rows)
    judged = gpu_check_targets.put_targets(rows, targets, report.result["rows"]) if targets is not None else []
    if "peers" in measured:
        report.result["peers"] = {**report.result.get("peers", {}), **measured["peers"]}
    measured_now = {results.key(row) for row in rows}
    report.result["skipped"] = [
        one for one in results.merge_rows(report.result.get("skipped", []), measured.get("skipped", []))
        if results.key(one) not in measured_now]
    details = {"rows": len(rows), "skipped": len(measured.get("skipped", [])),
               "failed": measured.get("failed", []), **gpu_check_targets.summary_of(judged)}
    if judged:
        say(gpu_check_targets.table(judged))
    outcome = from_command(done, "the benchmark", details)
    late = [one["name"] for one in measured.get("skipped", [])
            if "time limit" in one.get("reason", "")]
    missed = gpu_check_targets.failures(judged, excused)
    if outcome.status != PASSED:
        return outcome
    if not rows:
        return Outcome(FAILED, "no row was measured", details)
    if late:
        return Outcome(TIMED_OUT, f"{len(late)} cases were not reached", details)
    if missed:
        return Outcome(FAILED, f"{len(missed)} rows miss their bar, or {TOLERANCE:g} of their target, "
                       f"without a reason in docs/performance.md, \"{gpu_check_targets.GAPS_HEADING}"
                       f"\": {'; '.join(one.failure() for one in missed)}", details)
    return outcome
