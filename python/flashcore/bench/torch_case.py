"""One benchmark case on torch tensors: its inputs, check and peers. Subclasses time calls on a device."""

from collections.abc import Callable
from typing import Any

from flashcore.bench import peers as bench_peers, timing
from flashcore.bench.forward import Forward
from flashcore.bench.gradients import Gradients
from flashcore.bench.inputs import Inputs
from flashcore.bench.kernels import requested
from flashcore.bench.peers_base import first_line, off_by, usable
from flashcore.bench.tolerance import Verdict


class TorchCase:
    """A case in memory that can be checked and timed. `place` is where its calls run."""

    call: str | None = None  # the call that a row's `us` measures; None: the C call
    peers_note: dict[str, str]

    def __init__(self, library: Any, case: Any, torch: Any, place: Any, sets: int, seed: int,
                 kernel: str | None, peers: Any) -> None:
        """peers: keys of bench.peers.known(). kernel: instead of the one in the case's options."""
        self.library, self.case, self.torch, self.place, self.peers = library, case, torch, place, peers
        self.inputs: Any = Inputs(torch, case, place.device, sets, seed)
        make = Gradients if case.kind == "bwd" else Forward
        self.problem: Any = make(torch, library, self.inputs, place, kernel or requested(case.options.kernel))
        self.plan = self.problem.plan
        self.peers_note = {}
        self._runners: dict[str, Any] = {}
        self._others: dict[str, Any] = {}

    def close(self) -> None:
        """Frees the memory before the next case."""
        self._runners, self._others = {}, {}
        self.inputs = self.problem = None

    def check(self) -> Verdict:
        """Checks the C call, and that the public call gives its bits."""
        problem = self.problem
        verdict: Verdict = problem.check()
        for index, want in problem.checked.items() if verdict.ok else ():
            with self.place.on_stream():
                got = problem.public(index)
            self.place.wait()
            if not problem.same(got, want):
                verdict.ok = False
                verdict.reason = "the call from Python and the C call give different results"
        return verdict

    def prepare(self) -> None:
        """Sets up ours and every peer that supports the case."""
        if self.call is not None:
            self._runners[timing.OURS] = self._runner(self.problem.public)
        self._runners[timing.OURS if self.call is None else timing.BARE] = self._runner(self.problem.bare)
        known = bench_peers.known(self.place.device)
        for name in self.peers:
            if self.case.kind not in known[name].kinds:
                continue
            runner, note = self._peer(known[name])
            if runner is not None:
                self._runners[name] = runner
            if note is not None:
                self.peers_note[name] = note

    def compare_with(self, name: str, runner: Any) -> None:
        """Adds what this case is compared with to its rounds."""
        self._runners[timing.BASELINE + name] = runner

    def runner_of(self, peer: str) -> tuple[Any, str | None]:
        """(runner of ours if peer is "", or of a peer, None), or (None, reason). For other cases' rounds."""
        name = peer or timing.OURS
        if name not in self._others:
            self._others[name] = self._peer(bench_peers.known(self.place.device)[peer]) if peer else \
                (self._runner(self.problem.bare if self.call is None else self.problem.public), None)
        found: tuple[Any, str | None] = self._others[name]
        return found

    def _peer(self, peer: Any) -> tuple[Any, str | None]:
        """(runner, remark or None), or (None, reason why the peer is not timed). What the runner computes is
        also compared with the reference."""
        rows, want = self.problem.references[0]
        with self.place.on_stream():  # gradients run on the stream of their forward call
            call, note = usable(peer, self.inputs, rows, want, self._run_once)
        if call is None:
            return None, note
        try:
            runner = self._runner(call)
            rows, want = self.problem.references[len(self.inputs) - 1]
            wrong = off_by(peer, self.inputs, runner.recomputed(), rows, want)
        except Exception as error:  # a foreign library may raise anything
            return None, f"could not be captured: {first_line(error)}"
        return (runner, note) if wrong is None else (None, f"captured, {wrong}")

    def _run_once(self, call: Callable[[int], Any]) -> Any:
        self.place.wait()  # another stream made the peer's inputs
        with self.place.on_stream():
            result = call(0)
        self.place.wait()
        return result

    def _runner(self, call: Callable[[int], Any]) -> Any:
        """An object with sample(), the time of a call in us, and recomputed(), its result for the last set."""
        raise NotImplementedError

    def sample(self, reverse: bool = False) -> dict[str, float]:
        """One round: {name: us per call}."""
        return timing.one_round({name: one.sample for name, one in self._runners.items()}, reverse)

    def unchanged(self) -> bool:
        """True if the timed calls give exactly the checked bits."""
        problem, last = self.problem, len(self.inputs) - 1
        if not all(problem.same(problem.current(index), want) for index, want in problem.checked.items()):
            return False
        return bool(problem.same(self._runners[timing.OURS].recomputed(), problem.checked[last]))
