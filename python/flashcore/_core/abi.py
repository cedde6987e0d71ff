"""The structs of include/flashcore/flashcore.h and bindings/python/fastcall.h, field by field.

tests/python/test_abi.py compares every size and offset with those of a C compiler.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint8
from ctypes import c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

from flashcore._core.options_table import PARAMS

OK, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, CUDA_ERROR, INTERNAL, CANCELLED = range(7)
CPU, CUDA = 1, 2
WORKSPACE_HEADER_BYTES = 64 * 1024

# dtype name -> (code, bits): FLASHCORE_FLOAT is 2, FLASHCORE_BFLOAT 4, FLASHCORE_INT 0, BOOL 6.
DTYPES = {
    "f64": (2, 64),
    "f32": (2, 32),
    "f16": (2, 16),
    "bf16": (4, 16),
    "i32": (0, 32),
    "bool": (6, 8),
    "e4m3": (10, 8),
    "e5m2": (12, 8),
    "int8": (0, 8),
    "byte": (1, 8),
    # No call takes these. They are listed so that the library can report them.
    "int16": (0, 16),
    "int64": (0, 64),
    "uint16": (1, 16),
    "uint32": (1, 32),
    "uint64": (1, 64),
    "complex64": (5, 64),
    "complex128": (5, 128),
}


class Error(ctypes.Structure):
    _fields_ = [("code", c_int32), ("message", c_char * 1020)]


class Device(ctypes.Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class DType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", Device),
        ("ndim", c_int32),
        ("dtype", DType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


_C_TYPES: dict[str, Any] = {
    "size_t": c_size_t,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "double": c_double,
    "const char*": c_char_p,
    "void*": c_void_p,
    "const int32_t*": c_void_p,
    "const flashcore_tensor*": POINTER(Tensor),
}


class Params(ctypes.Structure):
    _fields_ = [(name, _C_TYPES[kind]) for name, kind in PARAMS]


class RawParams(ctypes.Structure):
    """Params with its pointers as addresses. It shares memory with Params and is cheaper to fill."""

    _fields_ = [(field[0], c_void_p if field[1] == POINTER(Tensor) else field[1])
                for field in Params._fields_]


class PlanInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kernel", c_char_p),
        ("family", c_char_p),
        ("workspace_bytes", c_size_t),
        ("work_items", c_int64),
        ("tile_q", c_int32),
        ("tile_k", c_int32),
        ("splits", c_int32),
        ("uses_header", c_int32),
    ]


class MergeParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("outs", POINTER(Tensor)),
        ("lses", POINTER(Tensor)),
        ("parts", c_size_t),
        ("out", POINTER(Tensor)),
        ("lse", POINTER(Tensor)),
        ("sinks", POINTER(Tensor)),
        ("stream", c_void_p),
        ("cancel", c_void_p),
    ]


class AppendParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("k_new", POINTER(Tensor)),
        ("v_new", POINTER(Tensor)),
        ("k", POINTER(Tensor)),
        ("v", POINTER(Tensor)),
        ("used_k", POINTER(Tensor)),
        ("block_table", POINTER(Tensor)),
        ("cu_seqlens_new", POINTER(Tensor)),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("stream", c_void_p),
        ("k_scale", POINTER(Tensor)),
        ("v_scale", POINTER(Tensor)),
        ("kv_scale_block", c_int64),
        ("cancel", c_void_p),
    ]


class QuantParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("from", POINTER(Tensor)),
        ("to", POINTER(Tensor)),
        ("scale", POINTER(Tensor)),
        ("saturated", POINTER(Tensor)),
        ("block_rows", c_int64),
        ("given_scale", c_int32),
        ("rotate", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("stream", c_void_p),
        ("cancel", c_void_p),
    ]


class BlockMaskParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("q_len", c_int64),
        ("kv_len", c_int64),
        ("block_q", c_int64),
        ("block_k", c_int64),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("global_tokens", c_int64),
        ("values", POINTER(Tensor)),
        ("columns", POINTER(Tensor)),
        ("pattern", c_int32),
    ]


class DistributedProblem(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("ranks", c_int32),
        ("ranks_per_node", c_int32),
        ("scheme", c_int32),
        ("sharding", c_int32),
        ("head_ranks", c_int32),
        ("causal", c_int32),
        ("reproducibility", c_int32),
        ("dtype", DType),
        ("batch", c_int64),
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("v_dim", c_int64),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("length", c_int64),
        ("q_rows", POINTER(c_int64)),
        ("k_rows", POINTER(c_int64)),
        ("documents", POINTER(c_int64)),
        ("documents_count", c_size_t),
        ("link_bandwidth", c_double),
        ("link_latency", c_double),
        ("net_bandwidth", c_double),
        ("net_latency", c_double),
        ("forward_flops", c_double),
        ("backward_flops", c_double),
        ("separate_backward", c_int32),
        ("by_heads", c_int32),
        ("memory_bandwidth", c_double),
    ]


class BackwardParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("call", POINTER(Params)),
        ("dout", POINTER(Tensor)),
        ("dlse", POINTER(Tensor)),
        ("dq", POINTER(Tensor)),
        ("dk", POINTER(Tensor)),
        ("dv", POINTER(Tensor)),
        ("dbias", POINTER(Tensor)),
        ("dsinks", POINTER(Tensor)),
        ("global_lse", c_int32),
    ]


MAX_PYTHON_ARRAYS = 24


class PythonWorkspace(ctypes.Structure):
    _fields_ = [("address", c_void_p), ("bytes", c_size_t)]


class PythonCall(ctypes.Structure):
    _fields_ = [
        ("read", c_void_p),
        ("dlpack_name", ctypes.py_object),
        ("empty_like", ctypes.py_object),
        ("params", c_void_p),
        ("cpu_workspace", c_void_p),
        ("error", c_void_p),
        ("interruptible", c_int32),
        ("swapped", c_uint32),
        ("backward", c_void_p),
        ("count", c_int64),
        ("fields", c_void_p * MAX_PYTHON_ARRAYS),
    ]


# C name -> class. tests/python/test_abi.py checks all of them.
STRUCTS = {
    "flashcore_error": Error,
    "flashcore_device": Device,
    "flashcore_dtype": DType,
    "flashcore_tensor": Tensor,
    "flashcore_params": Params,
    "flashcore_plan_info": PlanInfo,
    "flashcore_merge_params": MergeParams,
    "flashcore_append_params": AppendParams,
    "flashcore_quant_params": QuantParams,
    "flashcore_block_mask_params": BlockMaskParams,
    "flashcore_distributed_problem": DistributedProblem,
    "flashcore_backward_params": BackwardParams,
    "flashcore_python_workspace": PythonWorkspace,
    "flashcore_python_call": PythonCall,
}

# C name -> (result, arguments).
FUNCTIONS = {
    "flashcore_params_init": (None, [POINTER(Params), c_size_t]),
    "flashcore_plan": (c_int32, [POINTER(Params), POINTER(PlanInfo), POINTER(Error)]),
    "flashcore_explain": (
        c_int32,
        [POINTER(Params), POINTER(c_char), c_size_t, POINTER(c_size_t), POINTER(Error)],
    ),
    "flashcore_attention": (c_int32, [POINTER(Params), POINTER(Error)]),
    "flashcore_workspace_init": (c_int32, [c_void_p, c_size_t, Device, c_void_p, POINTER(Error)]),
    "flashcore_workspace_status": (c_int32, [c_void_p, c_size_t, Device, c_void_p, POINTER(Error)]),
    "flashcore_capture_id": (
        c_int32, [Device, c_void_p, POINTER(c_uint64), POINTER(c_int32), POINTER(Error)]),
    "flashcore_backward_plan": (
        c_int32, [POINTER(BackwardParams), POINTER(PlanInfo), POINTER(Error)]),
    "flashcore_backward_explain": (
        c_int32,
        [POINTER(BackwardParams), POINTER(c_char), c_size_t, POINTER(c_size_t), POINTER(Error)],
    ),
    "flashcore_attention_backward": (c_int32, [POINTER(BackwardParams), POINTER(Error)]),
    "flashcore_block_mask_create": (
        c_int32, [POINTER(BlockMaskParams), POINTER(c_void_p), POINTER(Error)]),
    "flashcore_block_mask_blocks": (POINTER(Tensor), [c_void_p]),
    "flashcore_block_mask_bits": (POINTER(Tensor), [c_void_p]),
    "flashcore_block_mask_free": (None, [c_void_p]),
    "flashcore_block_mask_expand": (
        c_int32, [POINTER(Tensor), POINTER(Tensor), POINTER(Tensor), POINTER(Error)]),
    "flashcore_cuda_device_count": (c_int32, [POINTER(Error)]),
    "flashcore_distributed_choose": (
        c_int32, [POINTER(DistributedProblem), POINTER(c_int32), POINTER(c_int32), POINTER(c_char),
                  c_size_t, POINTER(Error)]),
    "flashcore_distributed_plan": (
        c_int32, [POINTER(DistributedProblem), c_int32, POINTER(c_char), c_size_t, POINTER(c_size_t),
                  POINTER(Error)]),
    "flashcore_distributed_speeds": (
        c_int32, [POINTER(c_char), c_size_t, POINTER(c_size_t), POINTER(Error)]),
    "flashcore_status_name": (c_char_p, [c_int32]),
    "flashcore_version": (c_char_p, []),
    "flashcore_source_fingerprint": (c_char_p, [c_char_p]),
}


def tensor(address: int, shape: Sequence[int], dtype: str, device_type: int = CPU, device_id: int = 0,
           strides: Sequence[int] | None = None) -> Tensor:
    """A descriptor of memory that the caller owns. Without strides it is compact and row-major."""
    code, bits = DTYPES[dtype]
    count = len(shape)
    described = Tensor(
        address,
        Device(device_type, device_id),
        count,
        DType(code, bits, 1),
        (c_int64 * count)(*shape),
        None if strides is None else (c_int64 * count)(*strides),
        0,
    )
    return described
