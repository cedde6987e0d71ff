"""Random calls of all public functions, with buffers that end at guard pages:

    python3 boundary_fuzz.py [--seconds 300] [--seed 1]             # new cases until the time is over
    python3 boundary_fuzz.py --seed 1 --first 4000 --case 17        # replays one case in this process

A call is valid except for a few mistakes: a type, a shape, strides, a length, a number. It must return, or
raise an exception that docs/python.md documents, with a message that names an argument. Inputs must not
change, and neither must outputs if the call raises. Child processes run a batch of cases each; a case that
kills its process is reported with its seed and arguments. In every other batch Hypothesis makes the
choices, if it is installed: it prefers extremes and minimizes a failing call. In the other batches
random.Random makes them, in a tenth of the time."""

import argparse
import os
import random
import re
import subprocess
import sys
import time
import warnings

from boundary_calls import PROMISED, Maker

try:
    import hypothesis
    import hypothesis.strategies
except ImportError:
    hypothesis = None

FOLDER = os.path.dirname(os.path.abspath(__file__))
BATCH = 4000
HYPOTHESIS_BATCH = 500  # takes about as long
# Names of arguments in messages. Every refusal must contain one of them.
NAMES = re.compile(
    r"\b(q|k|v|x|out|outs|lse|lses|sinks|alibi_slopes|bias|mask|q_start|k_start|cu_seqlens_q|"
    r"cu_seqlens_k|cu_seqlens_new|cu_seqlens|seqused_k|block_table|layout|num_splits|reproducibility|"
    r"return_lse|max_q_len|max_kv_len|partial|checked|kernel|window|window_left|window_right|causal|scale|"
    r"softcap|codes|dtype|block_rows|rotated|rotate|per|saturated|return_saturated|k_new|v_new|query|key|"
    r"value|attn_mask|dropout_p|is_causal|enable_gqa|softmax_scale|window_size|k_cache|v_cache|"
    r"cache_seqlens|max_seqlen_q|max_seqlen_k|return_attn_probs|head_dim|v_dim)\b")




def words(value):
    """A short description of an argument."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        strides = value.stride() if callable(getattr(value, "stride", None)) else value.strides
        return f"{type(value).__name__}({tuple(value.shape)}, {value.dtype}, strides {tuple(strides)})"
    if type(value).__name__ == "Quantized":
        return f"Quantized({', '.join(map(words, value))})"
    if isinstance(value, (list, tuple)) and any(hasattr(one, "shape") for one in value):
        return "[" + ", ".join(map(words, value)) + "]"
    return repr(value)[:80]


def torch_or_none():
    if os.environ.get("TORCH") == "0":
        return None
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


def unchanged(np, pairs):
    return all(np.array_equal(array.view("u1") if array.flags.c_contiguous else array,
                              before.view("u1") if array.flags.c_contiguous else before,
                              equal_nan=not array.flags.c_contiguous and array.dtype.kind in "fc")
               for array, before in pairs if array.size and array.ndim)


def run_case(choose, number, torch, say, really=True):
    """A description of a failure, or None. really=False only makes the choices."""
    maker = Maker(choose, torch)
    function, arguments, options = maker.call()
    if not really:
        return None
    say(f"{number}: {getattr(function, '__name__', function)}({', '.join(map(words, arguments))}"
        + "".join(f", {name}={words(one)}" for name, one in options.items()) + ")")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(*arguments, **options)
    except maker.promised as error:
        if "unexpected keyword" in str(error):
            return f"the fuzzer is wrong: {error}"
        if maker.promised is PROMISED and not NAMES.search(str(error)):
            return f"names no argument: {type(error).__name__}: {error}"
        if not unchanged(maker.np, maker.outputs):
            return f"wrote, and raised {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001: any other exception is a finding
        return f"raised {type(error).__name__}: {error}"
    if not unchanged(maker.np, maker.inputs):
        return "changed an input"
    return None


class BrokenPromise(Exception):
    """Tells Hypothesis to minimize the case."""


def each_case(seed, first, check, count=None):
    """Calls check(choose, number) for a batch of cases, which depend on the other arguments only. check()
    raises BrokenPromise if a case fails."""
    if hypothesis is None or first // BATCH % 2 == 1:
        for number in range(count or BATCH):
            check(random.Random(f"{seed}:{first}:{number}"), number)
        return
    numbers = iter(range(10**9))  # Hypothesis tries more cases once one has failed

    @hypothesis.seed(seed * 10**9 + first)
    @hypothesis.settings(max_examples=count or HYPOTHESIS_BATCH, database=None, deadline=None,
                         suppress_health_check=list(hypothesis.HealthCheck),
                         phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink))
    @hypothesis.given(hypothesis.strategies.randoms(use_true_random=False))
    def one(choose):
        check(choose, next(numbers))

    one()


def child(seed, first):
    """Runs a batch. Prints a line for every case and for every failure. The last failure is the smallest."""
    torch = torch_or_none()

    def say(line):
        os.write(1, (line + "\n").encode())

    def check(choose, number):
        wrong = run_case(choose, number, torch, say)
        if wrong is not None:
            say(f"WRONG {wrong}")
            raise BrokenPromise(wrong)

    try:
        each_case(seed, first, check)
    except BrokenPromise:
        pass


def replay(seed, first, number):
    """The failure of one case, or None. The other cases of its batch are drawn, but not run."""
    torch, found = torch_or_none(), []

    def check(choose, one):
        wrong = run_case(choose, one, torch, print, really=one == number)
        if wrong is not None and not found:
            found.append(wrong)

    each_case(seed, first, check)
    return found[0] if found else None


def findings_of(lines, seed, first):
    """The failures in a child's output, each with its case and the minimized case."""
    at = [number for number, line in enumerate(lines) if line.startswith("WRONG ") and number > 0]
    if not at:
        return []
    what, case, smallest = lines[at[0]][6:], lines[at[0] - 1], lines[at[-1] - 1]
    return [f"{what}\n    --seed {seed} --first {first} --case {case}"
            + (f"\n    smallest: {lines[at[-1]][6:]}: {smallest}" if len(at) > 1 else "")]


def run(seconds, seed):
    """Runs child processes until the time is over. Returns (number of cases, findings)."""
    ends, first, findings, done = time.monotonic() + seconds, 0, [], 0
    while time.monotonic() < ends and len(findings) < 20:
        left = max(ends - time.monotonic(), 1)
        command = [sys.executable, os.path.abspath(__file__), "--child", str(seed), str(first)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   errors="replace")
        try:
            out, err = process.communicate(timeout=left)
            over = False
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            over = True
        lines = out.splitlines()
        cases = [line for line in lines if not line.startswith("WRONG ")]
        done += len(cases)
        findings += [one for one in findings_of(lines, seed, first)
                     if not any(other.startswith(one.partition("\n")[0] + "\n") for other in findings)]
        if not over and process.returncode != 0:
            last = cases[-1] if cases else "before the first call"
            findings.append(f"the process ended with {process.returncode}: {err.strip()[-2000:]}\n"
                            f"    --seed {seed} --first {first} --case {last}")
        first += BATCH
    return done, findings


def main():
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(FOLDER)), "python"))
    if sys.argv[1:2] == ["--child"]:
        child(*map(int, sys.argv[2:4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the batch of a case")
    parser.add_argument("--case", type=int, help="one case of that batch")
    options = parser.parse_args()
    if options.case is not None:
        wrong = replay(options.seed, options.first, options.case)
        print(wrong or "correct")
        return 1 if wrong else 0
    done, findings = run(options.seconds, options.seed)
    print("\n".join(findings + [f"seed {options.seed}: {done} calls, {len(findings)} findings"]))
    return 1 if findings or not done else 0


if __name__ == "__main__":
    sys.exit(main())
