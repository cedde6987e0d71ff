"""Stages of scripts/gpu_check: the commands they run and the conditions for passing."""

import json
import os
import re
import time
import xml.etree.ElementTree as ElementTree

from flashcore.bench import results as bench_results
from gpu_check_context import from_command, python_with_torch
from gpu_check_runner import FAILED, NOT_RUN, PASSED, TIMED_OUT, Outcome
from gpu_check_sanitizers import TOOLS, Sanitizer, find_tool, run_all
from kernel_build import read_kernels

_VERIFIERS = 8  # processes


def environment(context, limit_s):
    found = bench_results.gpu_environment()
    header = context.runner.report.result
    if not found["gpu"]:
        return Outcome(FAILED, "nvidia-smi shows no GPU")
    found["cuda"] = found["cuda"] or header.get("cuda", "")
    header.update(found)
    context.python = python_with_torch(context)
    versions = bench_results.torch_versions(None)
    if context.python is not None:
        done = context.run("versions", [context.python, "-c", (
            "import json, torch; from flashcore.bench import results; "
            "print(json.dumps(results.torch_versions(torch)))")], limit_s)
        if done.code == 0:
            versions = json.loads(done.output.strip().splitlines()[-1])
    header.update(versions)
    details = {"clocks": found["clocks"], "cpus": context.jobs, "machine": os.uname().machine}
    return Outcome(PASSED, "", details)


def fresh(context, limit_s):
    """None if the command was built from this tree, else the reason why it cannot be used."""
    if not context.cli.is_file():
        return f"{context.cli.relative_to(context.root)} is missing; run the stage build"
    done = context.run("stale", [context.cli, "info", "--tree", "."], limit_s)
    if done.code == 0:
        return None
    return f"the binary is stale: {done.last_lines(2)}"


def build(context, limit_s):
    steps = [["cmake", "--preset", "cuda"],
             ["cmake", "--build", "--preset", "cuda", "-j", str(context.jobs), "--target",
              "flashcore", "flashcore_cli", "flashcore_gpu_tests", "sanitizer_faults"]]
    for number, step in enumerate(steps):
        done = context.run(f"build_{number}", step, limit_s)
        if done.code != 0:
            return from_command(done, " ".join(step[:3]))
    stale = fresh(context, 60)
    if stale is not None:
        return Outcome(FAILED, stale)
    return Outcome(PASSED, "", {"fingerprint": context.runner.report.result["fingerprint"]})


def tests(context, limit_s):
    report = context.logs / "tests.xml"
    report.unlink(missing_ok=True)
    done = context.run("tests", [
        "ctest", "--test-dir", context.build, "-L", "^gpu$", "-j", str(min(context.jobs, 8)),
        "--output-on-failure", "--no-tests=error", "--output-junit", report], limit_s)
    return judge_tests(done, report)


def judge_tests(done, report):
    """Outcome of ctest. Each test has its own time limit (tests/gpu/CMakeLists.txt), so the reason
    names the tests that hang."""
    if not report.is_file():
        return from_command(done, "ctest") if done.code != 0 else Outcome(FAILED, "ctest left no report")
    suite = ElementTree.parse(report).getroot()
    skipped = [case.get("name") for case in suite.iter("testcase")
               if case.find("skipped") is not None]
    details = {"tests": int(suite.get("tests", "0")), "skipped": skipped}
    failed = dict(re.findall(r"^\t *\d+ - (\S+) \((.*)\)", done.output, re.MULTILINE))
    hung = [name for name, why in failed.items() if why == "Timeout"]
    outcome = from_command(done, "ctest", {**details, **({"failed": failed} if failed else {})})
    if hung:
        outcome.reason = f"hung: {', '.join(hung)}; {outcome.reason}"
    if outcome.status == PASSED and len(skipped) == details["tests"]:
        return Outcome(FAILED, "every test was skipped: the library finds no GPU", details)
    return outcome


def check(context, name, arguments, limit_s, least_problems, covered=(), kernels=()):
    """Runs `flashcore check --json`. Passes only if the check passed and ran enough problems, some of them on
    each of `kernels`."""
    done = context.run(name, [
        context.cli, "check", "--json", "--jobs", str(context.jobs_of_a_stage), "--seed",
        str(context.options.seed), "--time-limit", str(int(max(limit_s - 30, limit_s / 2))),
        *arguments], limit_s)  # the margin is for the deadline of a problem that hangs
    return judge_check(done, least_problems, covered, kernels)


def judge_check(done, least_problems, covered=(), kernels=()):
    """covered: the parts of the coverage that must be complete. --require-coverage does not fit here:
    it requires options that some kernel families do not support."""
    try:
        result = json.loads(done.output)
    except ValueError:
        outcome = from_command(done, "flashcore check")
        if outcome.status == PASSED:
            return Outcome(FAILED, f"flashcore check printed no JSON; see {done.shown}")
        return outcome
    details = {name: result[name] for name in ("problems", "failures", "seed") if name in result}
    counts = {}
    if isinstance(result.get("kernels"), dict):
        counts = {name: one["problems"] if isinstance(one, dict) else one
                  for name, one in result["kernels"].items()}
        details["kernels"] = len(counts)
        details["fewest_problems_of_a_kernel"] = min(counts.values(), default=0)
    if "coverage" in result:
        details["coverage"] = shortened(result["coverage"])
    if result.get("reports"):
        report = result["reports"][0]
        if "replay" in report:  # make the command independent of this tree's path
            report["replay"] = re.sub(r"^\S*/(?=build/)", "", report["replay"])
        details["first_report"] = report
    if done.timed_out:
        return from_command(done, "flashcore check", details)
    if done.code != 0 or result.get("passed") is not True or result.get("failures") != 0:
        return Outcome(FAILED, f"{result.get('failures')} failures; see {done.shown}", details)
    lacking = {part: result.get("coverage", {}).get(part, {}).get("missing", ["all"])
               for part in covered}
    if any(lacking.values()):
        return Outcome(FAILED, f"not covered: {shortened(lacking, 4)}", details)
    idle = [name for name in kernels if not counts.get(name)]
    if idle:
        return Outcome(FAILED, f"no problem ran on {', '.join(shortened(idle, 4))}", details)
    if least_problems is None:
        least_problems = result.get("planned", 1)
    if result.get("problems", 0) < least_problems:
        return Outcome(TIMED_OUT, f"{result.get('problems')} problems within the time limit; wanted "
                       f"{least_problems}", details)
    return Outcome(PASSED, "", details)


def shortened(value, most=8):
    """The value with long lists truncated, to keep result files readable."""
    if isinstance(value, dict):
        return {name: shortened(one, most) for name, one in value.items()}
    if isinstance(value, list) and len(value) > most:
        return [*value[:most], f"and {len(value) - most} more"]
    return value


def sanitizers(context, limit_s):
    program = find_tool()
    if program is None:
        return {f"sanitizer_{tool}": Outcome(NOT_RUN, "compute-sanitizer is not installed")
                for tool in TOOLS}
    gpu_tests = context.build / "tests" / "gpu"
    # racecheck follows every access to shared memory, so it gets the shortest tests.
    tests = {tool: "*Checked*:Merge.*" + ("-GpuBackward.*" if tool == "racecheck" else ":WorkspaceUse.*")
             for tool in TOOLS}

    def random_problems(operation, op):  # one of each kernel
        kernels = [kernel for kernel in read_kernels() if kernel.device == "cuda" and kernel.op == op]
        return [str(context.cli), "check", "--device", "cuda", "--op", operation, "--problems",
                str(len(kernels)), "--jobs", "1", "--json", "--deadline", "0", "--time-limit",
                str(int(limit_s - 30))]

    programs = {tool: {
        "check": random_problems("forward", "fwd"),
        "check_backward": random_problems("backward", "bwd"),
        "tests": [str(gpu_tests / "flashcore_gpu_tests"), f"--gtest_filter={tests[tool]}"],
    } for tool in TOOLS}
    return run_all([Sanitizer(tool, program, gpu_tests / "sanitizer_faults", programs[tool], context.logs,
                              context.root, context.env) for tool in TOOLS], limit_s)


def chosen_python(context):
    """The Python with torch that the first stage found. Searches now if that stage did not run."""
    return getattr(context, "python", None) or python_with_torch(context)


def python_tests(context, limit_s):
    """Runs tests/python/run.py with CUDA tensors, in the Python that has torch."""
    python = chosen_python(context)
    if python is None:
        return Outcome(NOT_RUN, "no Python here can import torch")
    done = context.run("python", [python, "tests/python/run.py"], limit_s,
                       FLASHCORE_LIBRARY=str(context.build / "libflashcore.so"))
    return judge_python(done)


def judge_python(done):
    """Fails if tests were skipped for lack of a GPU: run.py itself succeeds then."""
    last = (done.output.strip().splitlines() or [""])[-1]
    counts = re.match(r"(\d+) tests run, (\d+) failed(?:; NOT TESTED: (.*))?$", last)
    details = {}
    if counts:
        details = {"tests": int(counts[1]), "failed": int(counts[2]), "not_tested": counts[3] or ""}
    outcome = from_command(done, "tests/python/run.py", details)
    if outcome.status == PASSED and not counts:
        return Outcome(FAILED, f"tests/python/run.py printed no summary; see {done.shown}")
    skipped = re.search(r"^(\d+ tests skipped: .*GPU.*)$", done.output, re.MULTILINE)
    if outcome.status == PASSED and skipped:
        return Outcome(FAILED, skipped[1], details)
    return outcome


def verify_kernels(context, limit_s, op="forward"):
    """Runs the verifier on every CUDA kernel of an operation, in several processes at a time."""
    kernels = [kernel.id for kernel in read_kernels()
               if kernel.device == "cuda" and (kernel.op == "bwd") == (op == "backward")]
    commands = [context.start(
        f"verify_{op}_{number}", [str(context.cli), "verify", "--device", "cuda", "--quick", "--json",
                                  "--quiet", "--threads", "2", "--op", op, "--kernel",
                                  f"^({'|'.join(kernels[number::_VERIFIERS])})$"])
        for number in range(_VERIFIERS) if kernels[number::_VERIFIERS]]
    deadline = time.monotonic() + limit_s
    reports = []
    for done in [command.wait(deadline - time.monotonic()) for command in commands]:
        if done.code not in (0, 1):
            return from_command(done, "flashcore verify")
        reports += json.loads(done.output[done.output.index("{"):])["reports"]
    wrong = {r["name"]: f"{r['stage']}: {r['detail']}" for r in reports if not r["ok"]}
    values = {"kernels": len(reports), "wrong": wrong}
    if wrong or not reports:
        return Outcome(FAILED, f"{len(wrong)} of {len(reports)} kernels are wrong: {wrong}", values)
    return Outcome(PASSED, f"{len(reports)} kernels are correct", values)


def verify_torch(context, limit_s):
    """Runs the verifier on torch's flash, cuDNN, memory-efficient and math attention. It must accept
    all of them."""
    python = chosen_python(context)
    if python is None:
        return Outcome(NOT_RUN, "torch is not installed")
    done = context.run("verify_torch", [python, "-m", "flashcore._torch.verify", "--device",
                                        "cuda", "--quick", "--json"], limit_s)
    if done.code not in (0, 1):
        return from_command(done, "flashcore._torch.verify")
    found = json.loads(done.output.strip().splitlines()[-1])
    wrong = {name: verdict for name, verdict in found["verdicts"].items() if verdict != "correct"}
    if done.code != 0 or wrong:
        return Outcome(FAILED, f"rejected: {wrong}", found)
    return Outcome(PASSED, f"{len(found['verdicts'])} of torch's kernels are correct", found)
