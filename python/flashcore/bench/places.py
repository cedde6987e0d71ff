"""Where the calls of a benchmark case run: the CPU, or one stream of the GPU."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from flashcore._core import abi


class Cpu:
    device, code = "cpu", abi.CPU
    stream_address: int | None = None

    def __init__(self, threads: int = 0) -> None:
        self.threads = threads

    def on_stream(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Waits for all work of the device."""


class Gpu:
    device, code, threads = "cuda", abi.CUDA, 0

    def __init__(self, torch: Any) -> None:
        self.torch, self.stream = torch, torch.cuda.Stream()
        self.stream_address: int | None = self.stream.cuda_stream

    def on_stream(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.torch.cuda.stream(self.stream)
        return context

    def wait(self) -> None:
        self.torch.cuda.synchronize()
