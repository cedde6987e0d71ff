"""flashcore.sdpa against the math backend of torch, over the OpInfo samples of
scaled_dot_product_attention: results, gradients, gradcheck and refused calls.

    python3 tests/differential/opinfo.py

The reference is the math backend on the same inputs in f64. The limits are those of tests/python:
dense_reference.TOLERANCE for a result, four times that for a gradient. The samples range from -9 to 9, so
most rows have one dominant key. gradient_size.py explains the error of a gradient in that case."""

import sys
import warnings

import common
import dense_reference
import error_inputs
import gradient_size
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashcore

NAME = "nn.functional.scaled_dot_product_attention"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
GRADIENT_FACTOR = 4.0
SMALL = 500  # elements; up to this number gradcheck tests each element
# With torch 2.13: 13 samples without dropout in four types, and 12 samples with dropout.
AT_LEAST = {"forward": 52, "backward": 52, "gradcheck": 13, "errors": error_inputs.AT_LEAST}


def find_op():
    """The OpInfo of the op. Its module warns about packages that only the tests of torch need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return next(one for one in op_db if one.name == NAME)


def math_path(*inputs, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*inputs, **options)


def limit(dtype):
    return dense_reference.TOLERANCE[str(dtype).removeprefix("torch.")]


def error(got, want):
    return dense_reference.error(got.detach().double().numpy(), want.detach().double().numpy())


def tensors_of(sample):
    """([q, k, v and the mask if any], the other arguments)."""
    options = dict(sample.kwargs)
    mask = options.pop("attn_mask", None)
    return [sample.input, *sample.args, *([] if mask is None else [mask])], options


def call(function, tensors, options):
    mask = {"attn_mask": tensors[3]} if len(tensors) > 3 else {}
    return function(*tensors[:3], **mask, **options)


def label_of(tensors, options):
    return f"{tensors[0].dtype} " + ", ".join(str(tuple(one.shape)) for one in tensors) + f" {options}"


def check_sample(sdpa, sample, tally):
    tensors, options = tensors_of(sample)
    label = label_of(tensors, options)
    if options.get("dropout_p", 0.0) != 0.0:
        check_refusal(sdpa, tensors, options, label, tally)
        return
    want = call(math_path, tensors, options)
    try:
        got = call(sdpa, tensors, options)
    except Exception as raised:  # noqa: BLE001: a finding
        tally.wrong(f"{label}: {common.short(raised)}")
        return
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        tally.wrong(f"{label}: gives {tuple(got.shape)} {got.dtype}, torch {tuple(want.shape)} {want.dtype}")
        return
    wide = [one.detach().double().requires_grad_(one.requires_grad) for one in tensors]
    exact = call(math_path, wide, options)
    tally.judge("forward", label, error(got, exact), limit(got.dtype))
    inputs = [one for one in tensors if one.requires_grad]
    if not inputs:
        return
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = weight.to(got.dtype)
    gradients = torch.autograd.grad(got, inputs, weight)
    exact_gradients = torch.autograd.grad(exact, [one for one in wide if one.requires_grad],
                                          weight.double())
    sizes = [size for size, one in zip(gradient_size.sizes(tensors, weight, options["is_causal"]), tensors)
             if one.requires_grad]
    worst = max(map(gradient_size.error, gradients, exact_gradients, sizes))
    tally.judge("backward", f"gradients of {label}", worst, GRADIENT_FACTOR * limit(got.dtype))
    if got.dtype == torch.float64:
        check_gradients(sdpa, tensors, options, label, tally)


def check_gradients(sdpa, tensors, options, label, tally):
    """Runs gradcheck. With many elements it tests random directions only."""
    many = sum(one.numel() for one in tensors) > SMALL
    try:
        torch.autograd.gradcheck(lambda *inputs: call(sdpa, inputs, options), tensors, fast_mode=many)
    except Exception as raised:  # noqa: BLE001: a finding
        tally.wrong(f"gradcheck of {label}: {common.short(raised)}")
    else:
        tally.right("gradcheck")


def check_refusal(sdpa, tensors, options, label, tally):
    try:
        call(sdpa, tensors, options)
    except NotImplementedError as raised:
        if "dropout_p" in str(raised):
            tally.refused("dropout_p")
        else:
            tally.wrong(f"{label}: the refusal does not name dropout_p: {common.short(raised)}")
    except Exception as raised:  # noqa: BLE001: a finding
        tally.wrong(f"{label}: {common.short(raised)}")
    else:
        tally.wrong(f"{label}: dropout was taken")


def compare(sdpa, dtypes=DTYPES):
    """Compares a function with the arguments of sdpa. Returns its Tally."""
    torch.manual_seed(0)
    op, tally = find_op(), common.Tally("opinfo", AT_LEAST)
    for dtype in dtypes:
        for sample in op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd):
            check_sample(sdpa, sample, tally)
    error_inputs.compare(sdpa, op, tally)
    return tally


if __name__ == "__main__":
    sys.exit(compare(flashcore.sdpa).finish())
