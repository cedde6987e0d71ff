"""The header: the first message of every call. It finds ranks that disagree before any data moves.

Each rank sends its shapes, dtypes and options. Every rank compares all headers, so every rank raises the
same error. A rank whose own arguments are wrong sends its error in the header: the others raise it too.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashcore.distributed.comm import Comm

_FIELDS, _TEXT = 56, 40  # int64 numbers of the fields and of the error text
HEADER_BYTES = 8 * (_FIELDS + _TEXT)
_CALLS = ("attention", "unshard", "decode", "explain")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32,
           torch.int16, torch.int8, torch.uint8, torch.bool)


class Field(NamedTuple):
    """One number of the header. `text` says it in words; None: ranks may differ."""
    name: str
    value: int
    text: str | None = None
    show: Callable[[int], Any] = int


def number(name: str, value: float) -> Field:
    """A field for an option that is a float."""
    bits = struct.unpack("<q", struct.pack("<d", value))[0]
    return Field(name, bits, name + " is {}", lambda one: struct.unpack("<d", struct.pack("<q", one))[0])


def choice(name: str, value: Any, choices: Sequence[Any], text: str | None = None) -> Field:
    """A field for one of several choices; -1 if it is none of them."""
    index = choices.index(value) if value in choices else -1
    return Field(name, index, text or name + " is {}",
                 lambda one: "another" if one < 0 else str(choices[one]).removeprefix("torch."))


def digest(name: str, values: Sequence[int]) -> Field:
    """A field for a list of numbers, compared by a hash."""
    made = hashlib.blake2b(repr(list(values)).encode(), digest_size=8).digest()
    return Field(name, struct.unpack("<q", made)[0], name + " is another list, with hash {}",
                 lambda one: f"{one & 0xffffffff:08x}")


def call_field(call: str) -> Field:
    return choice("call", call, _CALLS, "calls {}")


def tensor_fields(name: str, one: Tensor, dims: Sequence[str], free: str) -> list[Field]:
    """Shape and dtype. The dimension `free`, which holds a rank's rows, may differ between ranks."""
    made = [Field(f"{name}.dims", one.dim(), name + " has {} dimensions"),
            choice(f"{name}.dtype", one.dtype, _DTYPES, name + " has dtype {}")]
    for i, dim in enumerate(dims):
        size = one.shape[i] if i < one.dim() else 0
        made.append(Field(f"{name}.{dim}", size, None if dim == free else f"{name} has {{}} {dim}"))
    return made


def device_of(*tensors: Any) -> torch.device:
    """Where the header must be: the device of the first argument that is a tensor."""
    return next((one.device for one in tensors if isinstance(one, Tensor)), torch.device("cpu"))


def agree(comm: Comm, fields: Sequence[Field], device: torch.device,
          error: Exception | None = None) -> list[dict[str, int]]:
    """The fields of every rank. Raises the same ValueError on all ranks if they disagree.

    `error`: this rank's arguments are wrong, and its fields are not used.
    """
    values = [len(fields) if error is None else -1] + [one.value for one in fields]
    text = str(error).encode()[:8 * _TEXT] if error is not None else b""
    values = values[:_FIELDS] + [0] * (_FIELDS - len(values))
    values += struct.unpack(f"<{_TEXT}q", text.ljust(8 * _TEXT, b"\0"))
    headers = [one.tolist() for one in comm.all_gather(
        torch.tensor(values, dtype=torch.int64, device=device))]
    for r, header in enumerate(headers):
        if header[0] < 0:
            said = struct.pack(f"<{_TEXT}q", *header[_FIELDS:]).rstrip(b"\0").decode(errors="replace")
            raise ValueError(f"rank {r}: {said}") from error
    for i, field in enumerate(fields):
        for r, header in enumerate(headers):
            if field.text is not None and header[i + 1] != headers[0][i + 1]:
                raise ValueError(
                    f"rank {r}: {field.text.format(field.show(header[i + 1]))}, rank 0 has "
                    f"{field.show(headers[0][i + 1])}; all ranks must pass the same")
    return [{field.name: header[i + 1] for i, field in enumerate(fields)} for header in headers]
