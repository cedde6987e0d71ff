"""Calls that torch refuses: OpInfo's error inputs of the op where this torch has some, and every sample
spoilt in each of the ways below. What torch refuses, FlashCore must refuse. Where torch takes a spoilt
call, FlashCore must give its result or one of the refusals of DELIBERATE."""

import contextlib

import common
import dense_reference
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PROMISED = (ValueError, TypeError, RuntimeError)  # NotImplementedError is a RuntimeError
AT_LEAST = 416  # with torch 2.13, whose OpInfo has none of its own for this op
# Words of refusals that docs/python.md states, by the reason they are counted under.
DELIBERATE = {"dropout_p": "FlashCore has no dropout"}


def _with(position, change):
    """Spoils one of query, key and value."""
    def spoil(arguments, options):
        arguments[position] = change(arguments[position])
    return spoil


def _option(name, value):
    def spoil(arguments, options):
        options[name] = value(arguments) if callable(value) else value
    return spoil


def _mask(shape=None, dtype=torch.float32, **others):
    """A mask, by default of the right shape."""
    def spoil(arguments, options):
        size = shape or (arguments[0].shape[-2], arguments[1].shape[-2])
        options.update(is_causal=False, attn_mask=torch.ones(size, dtype=dtype), **others)
    return spoil


SPOILT = {
    "query of rank 1": _with(0, lambda one: one.flatten()),
    "query of another width": _with(0, lambda one: one[..., :5]),
    "key of another width": _with(1, lambda one: one[..., :5]),
    "key shorter than value": _with(1, lambda one: one[..., :4, :]),
    "value of another length": _with(2, lambda one: one[..., :4, :]),
    "key of another batch": _with(1, lambda one: one[:3]),
    "value of another batch": _with(2, lambda one: one[:3]),
    "key in f64": _with(1, lambda one: one.double()),
    "value in f16": _with(2, lambda one: one.half()),
    "query of integers": _with(0, lambda one: one.long()),
    "key of booleans": _with(1, lambda one: one > 0),
    "value of complex numbers": _with(2, lambda one: one.to(torch.complex64)),
    "query is None": _with(0, lambda one: None),
    "key is a list": _with(1, lambda one: one.tolist()),
    "value is a number": _with(2, lambda one: 3.0),
    "sparse value": _with(2, lambda one: one.to_sparse()),
    "mask of another length": _mask((3, 5)),
    "mask with more rows": _mask((4, 6)),
    "mask of rank 6": _mask((1, 1, 1, 1, 3, 6)),
    "mask of integers": _mask(dtype=torch.int32),
    "mask of complex numbers": _mask(dtype=torch.complex64),
    "mask in f64": _mask(dtype=torch.float64),
    "mask is a list": _option("attn_mask", [[True]]),
    "mask and is_causal": lambda arguments, options: (_mask()(arguments, options),
                                                      options.update(is_causal=True)),
    "dropout_p is -1": _option("dropout_p", -1.0),
    "dropout_p is 1.5": _option("dropout_p", 1.5),
    "dropout_p is a word": _option("dropout_p", "0"),
    "scale is a word": _option("scale", "1"),
    "scale is a list": _option("scale", [1.0]),
    "is_causal is a word": _option("is_causal", "yes"),
    "enable_gqa is a word": _option("enable_gqa", "yes"),
    "an argument nobody knows": _option("window", 3),
    "three heads for four": lambda arguments, options: (
        options.update(enable_gqa=True), _with(1, lambda one: one[..., :3, :, :])(arguments, options),
        _with(2, lambda one: one[..., :3, :, :])(arguments, options)),
}


def calls(op):
    """(words, arguments, options) of every call, in f32."""
    if op.error_inputs_func is not None:
        for one in op.error_inputs("cpu"):
            sample = one.sample_input
            yield f"OpInfo: {one.error_regex}", [sample.input, *sample.args], dict(sample.kwargs)
    for number, sample in enumerate(op.sample_inputs("cpu", torch.float32)):
        if sample.kwargs.get("dropout_p", 0.0) != 0.0:
            continue
        for words, spoil in SPOILT.items():
            arguments, options = [sample.input, *sample.args], dict(sample.kwargs)
            spoil(arguments, options)
            yield f"sample {number}, {words}", arguments, options


def _result(function, context, arguments, options):
    try:
        with context:
            return function(*arguments, **options)
    except Exception as raised:  # noqa: BLE001: what it raises is compared
        return raised


def _judge(words, theirs, ours, tally):
    if isinstance(theirs, Exception):
        if isinstance(ours, PROMISED):
            tally.right("errors")
        elif isinstance(ours, Exception):
            tally.wrong(f"{words}: raises {common.short(ours)}")
        else:
            tally.wrong(f"{words}: taken; torch says {common.short(theirs)}")
        return
    if not isinstance(ours, Exception):
        distance = dense_reference.error(ours.numpy(), theirs.numpy())
        # Both compute in f32, so both may be as far from the truth.
        tally.judge("taken by both", words, distance, 2 * dense_reference.TOLERANCE["float32"])
        return
    for reason, text in DELIBERATE.items():
        if isinstance(ours, PROMISED) and text in str(ours):
            tally.refused(reason)
            return
    tally.wrong(f"{words}: torch gives {tuple(theirs.shape)}, FlashCore {common.short(ours)}")


def compare(sdpa, op, tally):
    for words, arguments, options in calls(op):
        kept = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
        theirs = _result(torch.nn.functional.scaled_dot_product_attention,
                         sdpa_kernel(SDPBackend.MATH), arguments, options)
        ours = _result(sdpa, contextlib.nullcontext(), arguments, options)
        _judge(words, theirs, ours, tally)
        for one, before in zip(arguments, kept):
            if isinstance(one, torch.Tensor) and not one.is_sparse and not torch.equal(one, before):
                tally.wrong(f"{words}: changed an input")
