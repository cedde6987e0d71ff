"""The structs of include/flashcore/verify_c.h.

A mismatch with the library raises an error: the library checks the size of Options, and verify_call
checks the size of Call.
"""

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint64
from ctypes import c_void_p

from flashcore._core.abi import Error, Tensor


class Call(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        *[(name, POINTER(Tensor)) for name in (
            "q", "k", "v", "out", "lse", "q_scale", "k_scale", "v_scale")],
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("scale", c_double),
        ("softcap", c_double),
        ("has_scale", c_int32),
        ("causal", c_int32),
        ("num_splits", c_int32),
        ("reserved", c_int32),
        ("stream", c_void_p),
        ("message", POINTER(c_char)),
        ("message_bytes", c_size_t),
    ]


class BackwardCall(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("forward", POINTER(Call)),
        *[(name, POINTER(Tensor)) for name in ("dout", "dlse", "dq", "dk", "dv")],
    ]


# FLASHCORE_VERIFY_..._MISSHAPEN: status codes of a call whose result has the wrong shape.
OUT_MISSHAPEN, LSE_MISSHAPEN, GRADIENT_MISSHAPEN = 100, 101, 102

FUNCTION = ctypes.CFUNCTYPE(c_int32, POINTER(Call), c_void_p)
BACKWARD = ctypes.CFUNCTYPE(c_int32, POINTER(BackwardCall), c_void_p)
PROGRESS = ctypes.CFUNCTYPE(None, c_char_p, c_int32, c_int32, c_void_p)

# Capabilities that a caller can declare, in the order of the struct.
CAPABILITIES = ("gqa", "batch", "cross", "causal", "window", "scale", "softcap", "splits", "lse",
                "strides", "v_dim")
# The same for a backward pass.
BACKWARD_CAPABILITIES = ("dlse", "deterministic")


class Options(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        *[(name, c_char_p) for name in ("name", "dtype", "out_dtype", "arithmetic", "layout",
                                        "only", "causal_alignment", "lse_base")],
        ("seed", c_uint64),
        ("head_dims", c_int64 * 8),
        ("quick", c_int32),
        *[(name, c_int32) for name in CAPABILITIES],
        ("progress", PROGRESS),
        ("progress_user", c_void_p),
        ("backward", BACKWARD),
        ("backward_user", c_void_p),
        *[(name, c_int32) for name in BACKWARD_CAPABILITIES],
    ]


FUNCTIONS = {
    "flashcore_verify_options_init": (None, [POINTER(Options), c_size_t]),
    "flashcore_verify": (
        c_int32, [POINTER(Options), FUNCTION, c_void_p, POINTER(c_void_p), POINTER(Error)]),
    "flashcore_report_text": (c_char_p, [c_void_p]),
    "flashcore_report_json": (c_char_p, [c_void_p]),
    "flashcore_report_html": (c_char_p, [c_void_p]),
    "flashcore_report_free": (None, [c_void_p]),
}
