"""The plan of scripts/gpu_check: its stages in order, their limits, and those that run side by side.

What is timed runs alone, early, right after the build: the host's cost, the CPU, the benchmark. Meanwhile the
build with injected faults uses the other cores. Then LANES stages run at a time, in this order; the
sanitizers come last, because they would make the tests reach their time limits. The times of a run on an H200
with 16 cores, four stages at a time, are in bench/results/h200.json.
"""

import gpu_check_bench
import gpu_check_faults
import gpu_check_stages as stages
from gpu_check_runner import Stage
from gpu_check_sanitizers import TOOLS
from kernel_build import persistent_kernels, read_kernels

LANES = 4
_MIN_PROBLEMS = 20000
_MIN_TENSOR_CORE_PROBLEMS = 50000
_LONG = 10  # factor of --long for random problems and time limits
_CUDA = ["--device", "cuda"]


def gradient_kernels(start="bwd_"):
    return [one.id for one in read_kernels() if one.device == "cuda" and one.id.startswith(start)]


def all_stages(context):
    """All stages, in order. Without --long no limit exceeds eight minutes."""
    times = _LONG if getattr(context.options, "long", False) else 1

    def plain(name, limit, function, may_be_missing=False, results=(), alone=False):
        return Stage(name, limit * times, lambda limit_s: function(context, limit_s),
                     may_be_missing, results, alone)

    return [
        plain("environment", 90, stages.environment, alone=True),
        plain("build", 400, stages.build, alone=True),
        plain("host", 40, gpu_check_bench.host_cost, alone=True),
        plain("bench_cpu", 40, gpu_check_bench.bench_cpu, alone=True),
        plain("bench", 200, gpu_check_bench.bench, alone=True),
        plain("bench_options", 120, gpu_check_bench.bench_options, alone=True),
        plain("bench_gradients", 150, gpu_check_bench.bench_gradients, alone=True),
        plain("tests", 400, stages.tests),
        plain("verify", 300, stages.verify_kernels),
        plain("verify_backward", 240,
              lambda context, limit_s: stages.verify_kernels(context, limit_s, "backward")),
        *_checks(context, times),
        plain("faults", 400, gpu_check_faults.faults),
        plain("python", 400, stages.python_tests, may_be_missing=True),
        *_further_checks(context, times),
        plain("verify_torch", 120, stages.verify_torch),
        plain("deadline", 300, gpu_check_faults.deadline),
        plain("sanitizers", 240, stages.sanitizers, may_be_missing=True,
              results=tuple(f"sanitizer_{tool}" for tool in TOOLS)),
    ]


def _checking(context, times, name, limit, arguments, problems=0, least=None, covered=(), kernels=()):
    """A stage that runs `flashcore check`. least: problems that must run; None: all that it planned."""
    if problems:
        arguments = [*arguments, "--problems", str(problems * times)]
    return Stage(name, limit * times, lambda limit_s: stages.check(
        context, name, arguments, limit_s, least and least * times, covered, kernels))


def _checks(context, times):
    """Every kernel on random problems."""
    def checking(*arguments, **more):
        return _checking(context, times, *arguments, **more)

    gradients = [*_CUDA, "--op", "backward"]
    tensor_cores = gradient_kernels("bwd_sm")
    return [
        checking("check", 180, _CUDA, 21000, _MIN_PROBLEMS),
        checking("check_backward", 180, gradients, 20000, _MIN_PROBLEMS, ("tile_edges",), gradient_kernels()),
        *([checking("check_backward_tensor_cores", 180, [*gradients, "--kernel", "^bwd_sm"], 20000, _MIN_PROBLEMS,
                    ("tile_edges",), tensor_cores)] if tensor_cores else []),
        checking("check_tensor_cores", 180, [*_CUDA, "--kernel", "^fwd_sm80_"], 51000, _MIN_TENSOR_CORE_PROBLEMS),
        checking("check_hopper", 240, [*_CUDA, "--kernel", "^fwd_sm90_"], 51000, _MIN_TENSOR_CORE_PROBLEMS),
    ]


def _further_checks(context, times):
    """Special problems and other plans."""
    def checking(*arguments, **more):
        return _checking(context, times, *arguments, **more)

    forward = [one for one in read_kernels() if one.op == "fwd"]
    return [
        checking("keyless_tiles", 200, [*_CUDA, "--suite", "keyless-tiles", "--kernel", "^fwd_sm90_"]),
        *(checking(f"check_blocks_{family}", 150, [*_CUDA, "--kernel", kernels, "--blocks", "1,2,3,7"],
                   20000, 20000, ("tile_edges", "work_lists"))
          for family, kernels in persistent_kernels(forward).items()),
        checking("check_regression", 40, [*_CUDA, "--suite", "regression"]),
        checking("check_tuning", 60, [*_CUDA, "--suite", "tuning"]),
        checking("check_as_l4", 30, [*_CUDA, "--plan-for", "l4"], 1500, 1000),
        checking("check_as_a100", 30, [*_CUDA, "--plan-for", "a100"], 1500, 1000),
        checking("check_cpu", 60, ["--device", "cpu"], 5000, 5000),
    ]
