"""One benchmark case on a GPU through torch.

The call from Python, the C call below it, and every peer are captured in CUDA graphs, which are replayed in
turns, each case's on its own stream.
"""

import time
from typing import Any

from flashcore.bench import timing
from flashcore.bench.places import Gpu
from flashcore.bench.torch_case import TorchCase

_ROTATED_BYTES = 300e6  # cold-L2 cases read this much before they reuse an input
_MAX_SETS = 512
_SAMPLE_US = 200
_SLEEP_CYCLES = 1_000_000  # half a millisecond, in which the host queues a sample
_MIN_REST_S, _MAX_REST_S = 2e-3, 0.1


class Runner:
    """A graph of `calls` calls, and its time. `result` is the result of the last call, which uses the last
    input set, because all sets are used equally often. The graph owns its memory."""

    busy_s = 0.0  # GPU time of the previous sample

    def __init__(self, torch, stream, call, calls, sets):
        self.torch, self.stream, self.calls = torch, stream, calls
        self.graph = torch.cuda.CUDAGraph()
        self.result: Any = None
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                for number in range(calls):
                    self.result = None  # the next call can reuse its memory
                    self.result = call(number % sets)
            finally:
                self.graph.capture_end()
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def replay(self):
        with self.torch.cuda.stream(self.stream):
            self.graph.replay()

    def us_per_call(self):
        """The time of one replay without idle time before it."""
        with self.torch.cuda.stream(self.stream):
            self.begin.record(self.stream)
            self.graph.replay()
            self.end.record(self.stream)
        self.stream.synchronize()
        return 1e3 * self.begin.elapsed_time(self.end) / self.calls

    def sample(self):
        """us per call after an idle time as long as a sample. Without it, the previous load would decide
        how much of the power budget is left. The replays are queued behind a short sleep kernel, so that
        they do not wait for the host. The first replay is not timed, because it is slower after idling; a
        graph that takes long needs neither it nor a longer rest."""
        time.sleep(min(max(_MIN_REST_S, self.busy_s), _MAX_REST_S))
        with self.torch.cuda.stream(self.stream):
            self.torch.cuda._sleep(_SLEEP_CYCLES)
        if self.busy_s < _MAX_REST_S:
            self.replay()
        us = self.us_per_call()
        self.busy_s = 2e-6 * us * self.calls
        return us

    def recomputed(self):
        """The result of one more replay into NaN-filled memory. It stays NaN if the work was not captured,
        for example because a call used its own stream."""
        found = self.result if isinstance(self.result, tuple) else (self.result,)
        with self.torch.cuda.stream(self.stream), self.torch.inference_mode():
            for one in found:
                if one is not None and one.is_floating_point():
                    one.fill_(float("nan"))
        self.replay()
        self.stream.synchronize()
        return self.result


class CudaCase(TorchCase):
    """A case in GPU memory."""

    def __init__(self, library: Any, case: Any, torch: Any, seed: int = 1, kernel: str | None = None,
                 peers: Any = ()) -> None:
        self.call = "flashcore.attention_backward" if case.kind == "bwd" else "flashcore.attention"
        sets = 1
        if case.cold_l2:
            sets = int(min(max(-(-_ROTATED_BYTES // case.input_bytes()), 1), _MAX_SETS))
        super().__init__(library, case, torch, Gpu(torch), sets, seed, kernel, peers)

    def close(self) -> None:
        super().close()
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()

    def _runner(self, call: Any) -> Runner:
        sets, stream = len(self.inputs), self.place.stream
        for number in range(2):
            with self.place.on_stream():
                call(number % sets)
        stream.synchronize()
        calls = timing.whole_turns(8 if self.case.flops() < 1e10 else 1, sets)
        runner = Runner(self.torch, stream, call, calls, sets)
        runner.us_per_call()
        wanted = timing.whole_turns(
            timing.calls_per_sample(runner.us_per_call(), _SAMPLE_US, sets), sets)
        if wanted <= calls:
            return runner
        return Runner(self.torch, stream, call, wanted, sets)
