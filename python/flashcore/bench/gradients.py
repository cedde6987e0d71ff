"""The gradients of a benchmark case on torch tensors: the C call, flashcore.attention_backward, their check."""

import ctypes
from typing import Any

from flashcore._attention import attention
from flashcore._backward import attention_backward
from flashcore._core import abi
from flashcore.bench.forward import Workspace, described, forward_params, plan_of, public_arguments, same_bits
from flashcore.bench.gradient_reference import compare_gradients, gradient_rows
from flashcore.bench.tolerance import Verdict, arithmetic_of, probability_dtype

NAMES = ("dq", "dk", "dv")


class Gradients:
    """Results are (dq, dk, dv). out and lse come from the planner's forward kernel."""

    def __init__(self, torch: Any, library: Any, inputs: Any, place: Any, kernel: str | None) -> None:
        self.torch, self.library, self.inputs, self.place, self.kernel = torch, library, inputs, place, kernel
        self.case = inputs.case
        self.forward = []
        place.wait()  # another stream made the inputs
        with place.on_stream(), torch.inference_mode():
            for three in zip(inputs.q, inputs.k, inputs.v):
                self.forward.append(attention(*three, return_lse=True, **public_arguments(inputs)))
        self.made = [tuple(torch.full_like(one, float("nan")) for one in three)
                     for three in zip(inputs.q, inputs.k, inputs.v)]
        self.params = [self._describe(index) for index in range(len(inputs))]
        self.plan = plan_of(library.backward_plan, self.params[0])
        self.workspace = Workspace(torch, library, place, self.plan.workspace_bytes)
        for params in self.params:
            self.workspace.put(params.call.contents, place.stream_address)
        self.references: dict[int, Any] = {}
        self.checked: dict[int, Any] = {}

    def _describe(self, index: int) -> Any:
        case, code = self.case, self.place.code
        out, lse = self.forward[index]
        call = forward_params(self.library, self.inputs, index, out, self.place, self.kernel)
        call.lse = described(lse, "f64" if case.dtype == "f64" else "f32", code)
        params = abi.BackwardParams(ctypes.sizeof(abi.BackwardParams), ctypes.pointer(call))
        for name, one in zip(("dout", *NAMES), (self.inputs.dout[index], *self.made[index])):
            setattr(params, name, described(one, case.dtype, code))
        return params

    def bare(self, index: int) -> tuple[Any, ...]:
        """The C call."""
        self.library.attention_backward(self.params[index])
        return self.made[index]

    def public(self, index: int) -> tuple[Any, ...]:
        inputs, (out, lse) = self.inputs, self.forward[index]
        return attention_backward(inputs.dout[index], inputs.q[index], inputs.k[index], inputs.v[index], out, lse,
                                  kernel=self.kernel, **public_arguments(inputs))

    def check(self) -> Verdict:
        """Runs every input set on NaN-filled gradients. Compares sampled rows of the first and last set with
        the fp64 reference, and checks all gradients for unwritten and non-finite elements."""
        for one in (tensor for made in self.made for tensor in made):
            one.fill_(float("nan"))
        self.place.wait()
        for index in range(len(self.params)):
            self.bare(index)
        self.place.wait()
        verdicts, last = [], len(self.params) - 1
        dtype = self.case.dtype
        probability = probability_dtype(self.plan.family.decode(), dtype, self.plan.kernel.decode())
        arithmetic = arithmetic_of(dtype, probability)
        for index in sorted({0, last}):
            inputs = self.inputs
            tensors = (inputs.q[index], inputs.k[index], inputs.v[index], self.forward[index][0], inputs.dout[index])
            want = gradient_rows(self.torch, self.case, tensors, arithmetic.sum_unit, seed=index + 1)
            self.references[index] = None, want
            verdicts.append(compare_gradients(dict(zip(NAMES, self.made[index])), want, arithmetic))
            self.checked[index] = tuple(one.clone() for one in self.made[index])
        self.place.wait()
        verdict = max(verdicts, key=lambda one: (not one.ok, one.worst_ratio))
        if verdict.ok and not all(bool(self.torch.isfinite(one).all()) for made in self.made for one in made):
            verdict.ok, verdict.reason = False, "an element was never written, or is not finite"
        return verdict

    def same(self, results: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
        return all(same_bits(self.torch, one, want, self.case.dtype) for one, want in zip(results, wanted))

    def current(self, index: int) -> tuple[Any, ...]:
        """The gradients of the last C call of a set."""
        return self.made[index]
