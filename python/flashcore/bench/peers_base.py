"""Base class of the attention libraries that FlashCore is timed against, and the check of their results.

A peer rejects cases that its library does not support, converts a case's inputs to the library's layout,
and calls its public function. Its result is compared with the reference before it is timed.
"""

import importlib
import importlib.util
import warnings
from importlib import metadata
from typing import Any

from flashcore.bench.gradient_reference import relative_errors
from flashcore.bench.gradients import NAMES
from flashcore.bench.inputs import DTYPES

# Largest relative Euclidean error against the fp64 reference, by the operand format. A larger error means
# that the peer computes another problem. e4m3: rounding P changes each weight by up to 2^-4.
TOLERANCE = {"f64": 2e-3, "f32": 2e-3, "f16": 1e-2, "bf16": 3e-2, "e4m3": 6.25e-2}
_MAX_REASON = 160


class Peer:
    """One library, or one backend of it."""

    module = ""  # the module to import
    distribution = ""  # the distribution that has the version
    kinds: tuple[str, ...] = ("fwd",)  # kinds of cases; of others it is not even refused

    def missing(self) -> str | None:
        """The reason why the library cannot be used at all; None if it can."""
        try:
            if importlib.util.find_spec(self.module.split(".")[0]) is None:
                return "not installed"
            importlib.import_module(self.module)
        except Exception as error:  # a foreign library may raise anything while it loads
            return f"cannot be imported: {first_line(error)}"
        return None

    def version(self) -> str:
        found = getattr(importlib.import_module(self.module), "__version__", None)
        try:
            return str(found or metadata.version(self.distribution))
        except metadata.PackageNotFoundError:
            return "unknown"

    def refusal(self, case: Any) -> str | None:
        """The reason why the library or this class does not support a case; None if it does."""
        raise NotImplementedError

    def computes_in(self, case: Any) -> str:
        return str(case.q_dtype)

    def note(self, case: Any) -> str | None:
        """A remark on its time for the reader."""
        return None

    def bind(self, inputs: Any) -> Any:
        """A function that takes the index of an input set, calls the library and returns its result.
        bind() makes copies and plans, so that the calls do not."""
        raise NotImplementedError

    def bind_gradients(self, inputs: Any) -> Any:
        """The same for (dq, dk, dv) of a case of kind bwd. Its forward call runs once, here."""
        raise NotImplementedError

    def as_ours(self, inputs: Any, result: Any) -> Any:
        """The library's result, viewed in the case's out_shape; for gradients, one of the three."""
        return result


def refusal_of(peer: Peer, case: Any) -> str | None:
    """The reason why a peer does not take a case: that of its library, or that no adapter passes an option."""
    options = case.options.score_options() + [
        name for name in ("batch_invariant", "f32_out") if getattr(case.options, name)]
    if options:
        return f"the adapters do not pass {', '.join(options)}"
    return peer.refusal(case)


def gradients_of(function: Any, inputs: Any, leaves: Any, douts: Any) -> Any:
    """bind_gradients() of a differentiable function of q, k and v. leaves and douts: per set of inputs, in the
    library's layout."""
    torch = inputs.torch
    with torch.enable_grad():
        wanted = [[one.detach().requires_grad_() for one in three] for three in leaves]
        outs = [function(*three) for three in wanted]
    outs = [out[0] if isinstance(out, tuple) else out for out in outs]

    def call(index: int) -> Any:
        return torch.autograd.grad(outs[index], wanted[index], douts[index], retain_graph=True)

    return call


def relative_error(inputs: Any, out: Any, rows: Any, want: Any) -> float:
    """|out - want| / |want| over sampled rows. `want` has their ReferenceRows."""
    torch = inputs.torch
    if tuple(out.shape) != inputs.case.out_shape:
        raise ValueError(f"its result is {tuple(out.shape)}, wanted {inputs.case.out_shape}")
    wanted = torch.tensor([row.out for row in want], device=inputs.device, dtype=torch.float64)
    return float((inputs.rows_of(out, rows) - wanted).norm() / wanted.norm())


def off_by(peer: Peer, inputs: Any, result: Any, rows: Any, want: Any) -> str | None:
    """The reason why a result is wrong; None if it matches the reference."""
    if inputs.case.kind == "bwd":
        off = relative_errors({name: peer.as_ours(inputs, one) for name, one in zip(NAMES, result)}, want)
    else:
        off = relative_error(inputs, peer.as_ours(inputs, result), rows, want)
    if not off < TOLERANCE[peer.computes_in(inputs.case)]:
        return f"its result is off by {off:.2g} (relative): not timed"
    return None


def usable(peer: Peer, inputs: Any, rows: Any, want: Any, run: Any) -> tuple[Any, str | None]:
    """(the peer's function of an input set's index, remark or None), or (None, reason why it is not timed).
    run(function) returns the function's result for set 0, after the device has computed it."""
    reason = peer.missing() or refusal_of(peer, inputs.case)
    if reason is not None:
        return None, reason
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call = peer.bind_gradients(inputs) if inputs.case.kind == "bwd" else peer.bind(inputs)
            wrong = off_by(peer, inputs, run(call), rows, want)
        except Exception as error:  # a foreign library may raise anything
            return None, _refusal(error, caught)
    return (None, wrong) if wrong is not None else (call, peer.note(inputs.case))


def _refusal(error: BaseException, caught: Any) -> str:
    """The reason of an error. torch warns with the reason and then raises a general error."""
    for warning in caught:
        text = first_line(warning.message).split(" (Triggered internally")[0]
        if issubclass(warning.category, UserWarning) and "not used because" not in text:
            return text
    return first_line(error)


def first_line(message: Any) -> str:
    lines = str(message).strip().splitlines() or [type(message).__name__]
    return lines[0][:_MAX_REASON]


def torch_dtype(torch: Any, name: str) -> Any:
    return getattr(torch, DTYPES[name])
