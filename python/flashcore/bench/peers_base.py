"""The attention libraries that FlashCore is timed beside: which there are, which are installed, and
whether one computes a case rightly.

An adapter refuses what its library cannot do, makes the library's own inputs from a case's (its layout,
its lengths), and calls its public function. None is timed before its result has been compared with
the reference."""

import importlib
import importlib.util
import warnings
from importlib import metadata
from typing import Any

from flashcore.bench.inputs import DTYPES

# How far a result may be from the fp64 reference (relative, Euclidean) before it is another problem's;
# by the format its products are computed in. e4m3: P is rounded to it, by up to 2^-4 of each weight.
TOLERANCE = {"f32": 2e-3, "f16": 1e-2, "bf16": 3e-2, "e4m3": 6.25e-2}
_MAX_REASON = 160


class Peer:
    """One library, or one backend of it."""

    module = ""  # what is imported
    distribution = ""  # whose version is asked for

    def missing(self) -> str | None:
        """Why it cannot be used at all; None where it can."""
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
        """Why the library, or this adapter, does not take a case; None where it does."""
        raise NotImplementedError

    def computes_in(self, case: Any) -> str:
        return str(case.q_dtype)

    def note(self, case: Any) -> str | None:
        """What a reader of its time must know."""
        return None

    def bind(self, inputs: Any) -> Any:
        """A function of an input set's number that calls the library and gives what it returns. Copies
        and plans are made here, not in the calls."""
        raise NotImplementedError

    def as_ours(self, inputs: Any, result: Any) -> Any:
        """What the library returned, viewed in the case's out_shape."""
        return result


def relative_error(inputs: Any, out: Any, rows: Any, want: Any) -> float:
    """|out - want| / |want| over sampled rows; want: their ReferenceRows."""
    torch = inputs.torch
    if tuple(out.shape) != inputs.case.out_shape:
        raise ValueError(f"its result is {tuple(out.shape)}, wanted {inputs.case.out_shape}")
    wanted = torch.tensor([row.out for row in want], device=inputs.device, dtype=torch.float64)
    return float((inputs.rows_of(out, rows) - wanted).norm() / wanted.norm())


def off_by(peer: Peer, inputs: Any, result: Any, rows: Any, want: Any) -> str | None:
    """What is wrong with a result; None where it is the reference's."""
    off = relative_error(inputs, peer.as_ours(inputs, result), rows, want)
    if not off < TOLERANCE[peer.computes_in(inputs.case)]:
        return f"its result is off by {off:.2g} (relative): not timed"
    return None


def usable(peer: Peer, inputs: Any, rows: Any, want: Any, run: Any) -> tuple[Any, str | None]:
    """(the peer's function of a set's number, what to know about it), or (None, why it is not timed).
    run(function): what the function gives for set 0, once the device has computed it."""
    reason = peer.missing() or peer.refusal(inputs.case)
    if reason is not None:
        return None, reason
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call = peer.bind(inputs)
            wrong = off_by(peer, inputs, run(call), rows, want)
        except Exception as error:  # whatever a foreign library raises is its answer
            return None, _refusal(error, caught)
    return (None, wrong) if wrong is not None else (call, peer.note(inputs.case))


def _refusal(error: BaseException, caught: Any) -> str:
    """torch warns with its reason and then raises something general."""
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
