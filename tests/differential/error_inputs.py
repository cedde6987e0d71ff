"""Invalid calls: the error inputs that OpInfo has for the op, and every sample with each of the changes
in INVALID. FlashCore must refuse every call that torch refuses. If torch accepts a call, FlashCore must
give the same result or a refusal of DELIBERATE."""

import contextlib

import common
import dense_reference
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PROMISED = (ValueError, TypeError, RuntimeError)  # NotImplementedError is a RuntimeError
AT_LEAST = 416  # with torch 2.13, whose OpInfo has no error inputs for this op
# Refusals that docs/python.md documents: {name of the count: text of the message}.
DELIBERATE = {"dropout_p": "FlashCore has no dropout"}


def _with(position, change):
    """Changes query, key or value."""
    def change_call(arguments, options):
        arguments[position] = change(arguments[position])
    return change_call


def _option(name, value):
    def change_call(arguments, options):
        options[name] = value(arguments) if callable(value) else value
    return change_call


def _mask(shape=None, dtype=torch.float32, **others):
    """Adds a mask, by default of the right shape."""
    def change_call(arguments, options):
        size = shape or (arguments[0].shape[-2], arguments[1].shape[-2])
        options.update(is_causal=False, attn_mask=torch.ones(size, dtype=dtype), **others)
    return change_call


INVALID = {
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
    "unknown argument": _option("window", 3),
    "three KV heads for four query heads": lambda arguments, options: (
        options.update(enable_gqa=True), _with(1, lambda one: one[..., :3, :, :])(arguments, options),
        _with(2, lambda one: one[..., :3, :, :])(arguments, options)),
}


def calls(op):
    """(label, arguments, options) of every call, in f32."""
    if op.error_inputs_func is not None:
        for one in op.error_inputs("cpu"):
            sample = one.sample_input
            yield f"OpInfo: {one.error_regex}", [sample.input, *sample.args], dict(sample.kwargs)
    for number, sample in enumerate(op.sample_inputs("cpu", torch.float32)):
        if sample.kwargs.get("dropout_p", 0.0) != 0.0:
            continue
        for label, change_call in INVALID.items():
            arguments, options = [sample.input, *sample.args], dict(sample.kwargs)
            change_call(arguments, options)
            yield f"sample {number}, {label}", arguments, options


def _result(function, context, arguments, options):
    try:
        with context:
            return function(*arguments, **options)
    except Exception as raised:  # noqa: BLE001: the exception is compared
        return raised


def _judge(label, theirs, ours, tally):
    if isinstance(theirs, Exception):
        if isinstance(ours, PROMISED):
            tally.right("errors")
        elif isinstance(ours, Exception):
            tally.wrong(f"{label}: raises {common.short(ours)}")
        else:
            tally.wrong(f"{label}: accepted; torch raises {common.short(theirs)}")
        return
    if not isinstance(ours, Exception):
        distance = dense_reference.error(ours.numpy(), theirs.numpy())
        # Both compute in f32, so the errors of both count.
        tally.judge("accepted by both", label, distance, 2 * dense_reference.TOLERANCE["float32"])
        return
    for reason, text in DELIBERATE.items():
        if isinstance(ours, PROMISED) and text in str(ours):
            tally.refused(reason)
            return
    tally.wrong(f"{label}: torch gives {tuple(theirs.shape)}, FlashCore raises {common.short(ours)}")


def compare(sdpa, op, tally):
    for label, arguments, options in calls(op):
        copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
        theirs = _result(torch.nn.functional.scaled_dot_product_attention,
                         sdpa_kernel(SDPBackend.MATH), arguments, options)
        ours = _result(sdpa, contextlib.nullcontext(), arguments, options)
        _judge(label, theirs, ours, tally)
        for one, before in zip(arguments, copies):
            if isinstance(one, torch.Tensor) and not one.is_sparse and not torch.equal(one, before):
                tally.wrong(f"{label}: an input has changed")
