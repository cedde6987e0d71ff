"""Gradients of calls that torch need not see as an op: one torch.autograd.Function.

torch.library's own gradients of an op dispatch three times and fill in every default argument in Python,
which takes longer than a small call. dispatch.route() and library.only_for_gradients() decide which calls
this function records instead.
"""

from collections.abc import Sequence
from typing import Any

import torch

from flashcore._core.backward_call import PreparedBackward, run_backward
from flashcore._core.call_cache import PreparedCall, thread_state
from flashcore._core.execute import run
from flashcore._core.options import (NONE, OPTIONAL, OPTIONS, Options, are_exact, normalize_options)
from flashcore._core.options_table import ARRAYS, SCORE_OPTIONS, from_schema, to_schema
from flashcore._torch.arrays import ADAPTER
from flashcore._torch.library import DEFAULTS, RECORDERS, are_plain, op_backward

# Score options that the gradients know, and all options of flashcore::attention_backward.
_KNOWN = ("causal", "window_left", "window_right", "scale", "softcap")
BACKWARD_OPTIONS = (*_KNOWN, "layout", "partial")
FIELDS = tuple(field for field, _ in ARRAYS)  # names of the optional tensors in C
_MAX_RECORDS = 1024
_ALL = (False, True, True, True)  # needs_input_grad of a call of q, k and v alone
_F32, _F64 = torch.float32, torch.float64


def through_op(dout: Any, dlse: Any, saved: Sequence[Any], tensors: Sequence[Any],
               options: dict[str, Any], wants: dict[str, bool]) -> dict[str, Any]:
    """The wanted gradients by name, through flashcore::attention_backward. saved: q, k, v, out, lse;
    tensors: the optional ones or None, in the order of FIELDS."""
    if wants.get("alibi_slopes"):
        raise NotImplementedError("alibi_slopes: requires grad; gradients are computed for q, k, v, "
                                  "sinks and bias")
    for name in SCORE_OPTIONS:
        if name not in _KNOWN and options[name] != DEFAULTS[name]:
            raise NotImplementedError(f"{name}: gradients with this option are not supported")
    names = ("q", "k", "v", "sinks", "bias")
    wanted = [wants.get(name, False) for name in names]
    made = op_backward(dout, dlse, *saved, *tensors, wanted=wanted,
                       **{name: options[name] for name in BACKWARD_OPTIONS})
    return {name: one for name, one, want in zip(names, made, wanted) if want}


class _Record:
    """What calls with the same options have in common. Caches use it as a key, by its identity."""

    def __init__(self, options: Options, names: tuple[str, ...], to_rows: bool) -> None:
        """options: normalized; names: of the optional tensors; to_rows: q, k and v are [batch, heads, len,
        dim] and the result is [batch, len, heads, dim]."""
        given = dict(zip(OPTIONS, options))
        self.returns_lse = given["return_lse"] or given["partial"]
        self.given_options = options
        self.options = normalize_options(**{**given, "return_lse": True})
        self.names, self.to_rows = names, to_rows
        self.heads_last = given["layout"] == "bshd"
        self.is_usual = not (names or given["partial"] or given["checked"])
        self.op_options = to_schema(options) | {"partial": given["partial"]}
        self._backward_options = from_schema(
            **{name: self.op_options[name] for name in BACKWARD_OPTIONS})

    def forward_call(self, with_lse: bool) -> PreparedCall:
        """The prepared call of q, k and v, one per thread."""
        key = self, with_lse
        call: PreparedCall | None = thread_state.calls.get(key)
        if call is None:
            call = PreparedCall(ADAPTER, self.options if with_lse else self.given_options, (),
                                self.to_rows)
            thread_state.remember(key, call)
        return call

    def backward_call(self, wants: tuple[bool, ...], has_dlse: bool) -> PreparedBackward:
        """The prepared call of the wanted gradients, one per thread. wants: see backward()."""
        key = self, wants, has_dlse
        call: PreparedBackward | None = thread_state.calls.get(key)
        if call is None:
            names = [name for name, want in zip(("q", "k", "v", *self.names), wants[1:]) if want]
            call = PreparedBackward(ADAPTER, self._backward_options, self.names, names, has_dlse,
                                    swaps_out=self.to_rows)
            thread_state.remember(key, call)
        return call

    def optional(self, tensors: tuple[Any, ...]) -> Options:
        """The tensors in the order of OPTIONAL."""
        if not tensors:
            return NONE
        given = dict(zip(self.names, tensors))
        return tuple(given.get(name) for name in OPTIONAL)


_records: dict[Any, _Record] = {}


def _record_of(options: Options, names: tuple[str, ...], to_rows: bool = False) -> _Record:
    try:
        found = _records.get((options, names, to_rows))
        if found is not None and are_exact(options):
            return found
    except TypeError:  # not hashable
        pass
    options = normalize_options(*options)  # keys must hold no arrays, because arrays can change
    found = _records.get((options, names, to_rows))
    if found is None:
        if len(_records) >= _MAX_RECORDS:
            _records.clear()
        found = _records[options, names, to_rows] = _Record(options, names, to_rows)
    return found


class FlashCoreAttention(torch.autograd.Function):  # type: ignore[misc]
    """apply(record, q, k, v, *optional tensors): out, or (out, lse)."""

    @staticmethod
    def forward(ctx: Any, record: _Record, q: Any, k: Any, v: Any, *tensors: Any) -> Any:
        made = _run_usual(record, q, k, v) if record.is_usual else None
        if made is not None:
            out, lse = made
        elif record.to_rows:
            out, lse = _to_rows(q, k, v, record.options)
        else:
            out, lse = run(ADAPTER, q, k, v, record.options, record.optional(tensors), None)
        ctx.record = record
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return (out, lse) if record.returns_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
        wants = ctx.needs_input_grad  # one flag per argument of apply()
        if dout is None and dlse is None:
            return (None,) * len(wants)
        record = ctx.record
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        arrays = (q, k, v, out, lse, dout, *tensors) if dlse is None else (q, k, v, out, lse, dout, *tensors, dlse)
        if not torch.is_grad_enabled() and are_plain(arrays):
            made = _run_prepared(record, arrays, wants, dlse is not None)
            if made is not None:
                return made
        if record.to_rows:
            out, dout = out.transpose(1, 2), dout.transpose(1, 2)
        given = dict(zip(record.names, tensors))
        grads = through_op(dout, dlse, (q, k, v, out, lse), [given.get(name) for name in FIELDS],
                           record.op_options, dict(zip(("q", "k", "v", *record.names), wants[1:])))
        return None, *(grads.get(name) for name in ("q", "k", "v", *record.names))


_apply = super(torch.autograd.Function, FlashCoreAttention).apply  # without the checks for functorch


def _run_usual(record: _Record, q: Any, k: Any, v: Any, with_lse: bool = True) -> Any:
    """(out, lse or None) of q, k and v alone. None if the general path must run, or report an error."""
    call, shape = record.forward_call(with_lse), q.shape
    if call.busy or len(shape) != 4 or shape[3] != v.shape[-1]:
        return None
    batch, heads, rows, dim = shape
    if record.heads_last:
        heads, rows = rows, heads
    lse = q.new_empty((batch, heads, rows), dtype=_F64 if q.dtype is _F64 else _F32) if with_lse else None
    if record.to_rows:
        out = q.new_empty((batch, rows, heads, dim))
    else:
        out = torch.empty_like(q)
    # Nothing that may call Python, as an allocation may, is between these two.
    if not call.has_workspace(ADAPTER, q.get_device()):
        return None
    arrays = (q, k, v, out, lse) if with_lse else (q, k, v, out)
    return (out, lse) if call.run_fast(*arrays) == 0 else None


def record(q: Any, k: Any, v: Any, options: Options, names: tuple[str, ...] = (),
           tensors: Sequence[Any] = ()) -> Any:
    """attention() with gradients. names: params fields of the optional tensors."""
    return _apply(_record_of(options, names), q, k, v, *tensors)


def record_to_rows(q: Any, k: Any, v: Any, options: Options) -> Any:
    """attention() with gradients, of [batch, heads, len, dim] to [batch, len, heads, dim]."""
    return _apply(_record_of(options, (), to_rows=True), q, k, v)


def run_to_rows(q: Any, k: Any, v: Any, options: Options) -> Any:
    """record_to_rows() without gradients."""
    made = _run_usual(_record_of(options, (), to_rows=True), q, k, v, with_lse=False)
    return _to_rows(q, k, v, options) if made is None else made[0]


def _to_rows(q: Any, k: Any, v: Any, options: Options) -> Any:
    """The general path: out, or (out, lse) if the options ask for it."""
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1]))
    made = run(ADAPTER, q, k, v, options, NONE, out.transpose(1, 2))
    return (out, made[1]) if isinstance(made, tuple) else out


def _recorder(returns_lse: bool) -> Any:
    """record() with the arguments of an op."""
    def record_op(q: Any, k: Any, v: Any, tensors: Sequence[Any], options: dict[str, Any]) -> Any:
        given = [(name, one) for name, one in zip(FIELDS, tensors) if one is not None]
        return record(q, k, v, from_schema(**options, return_lse=returns_lse),
                      tuple(name for name, _ in given), [one for _, one in given])
    return record_op


RECORDERS.update({"attention": _recorder(False), "attention.options": _recorder(False),
                  "attention_lse": _recorder(True)})


def _run_prepared(record: _Record, arrays: tuple[Any, ...], wants: tuple[bool, ...],
                  has_dlse: bool) -> Any:
    """The gradients of all arguments of apply(). None if the general path must compute them, or report an
    error."""
    if wants == _ALL:
        made = run_backward(record.backward_call(wants, has_dlse), ADAPTER, arrays, arrays[:3])
        return None if made is None else (None, *made)
    if any(want and name != "sinks" for name, want in zip(record.names, wants[4:])):
        return None
    inputs = (None, *arrays[:3], *arrays[6:6 + len(record.names)])
    made = run_backward(record.backward_call(wants, has_dlse), ADAPTER, arrays,
                        [one for one, want in zip(inputs, wants) if want])
    if made is None:
        return None
    left = iter(made)
    return tuple(next(left) if want else None for want in wants)
