"""Measures and plots the error of attention in each dtype against f64. The script is split into cells.

    python3 examples/error_by_dtype.py [PLOT.svg]
"""
# %% Inputs: unit variance, rounded to the dtype, so that input rounding does not count as error.
import sys

import torch

import flashcore

LENGTHS = (128, 512, 2048)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def relative_error(dtype, length):
    torch.manual_seed(length)
    q, k, v = (torch.randn(1, 4, length, 64).to(dtype) for _ in range(3))
    want = flashcore.attention(q.double(), k.double(), v.double(), causal=True)
    got = flashcore.attention(q, k, v, causal=True).double()
    return float((got - want).norm() / want.norm())


# %% Measure. The reference is f64 attention on the CPU.
errors = {dtype: [relative_error(dtype, length) for length in LENGTHS] for dtype in DTYPES}
print(f"{'type':<10}" + "".join(f"{length:>10}" for length in LENGTHS))
for dtype, row in errors.items():
    name = str(dtype).removeprefix("torch.")
    print(f"{name:<10}" + "".join(f"{error:>10.1e}" for error in row))

# %% Plot.
try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("matplotlib is not installed: no plot")
for dtype, row in errors.items():
    plt.loglog(LENGTHS, row, marker="o", label=str(dtype).removeprefix("torch."))
plt.xlabel("length")
plt.ylabel("relative error against f64")
plt.legend()
path = sys.argv[1] if len(sys.argv) > 1 else "error_by_dtype.svg"
plt.savefig(path)
print("plot:", path)
