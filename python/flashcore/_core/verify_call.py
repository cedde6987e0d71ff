"""Runs the calls of the verifier on the caller's Python function, with NumPy or torch arrays."""

import ctypes
import inspect

import numpy

from flashcore._core import verify_abi

# (code, bits) of a tensor -> NumPy dtype of its view.
_VIEWS = {(2, 64): "f8", (2, 32): "f4", (2, 16): "f2", (4, 16): "i2", (10, 8): "u1", (0, 8): "i1",
          (1, 8): "u1"}
_TORCH_VIEWS = {(4, 16): "bfloat16", (10, 8): "float8_e4m3fn"}

# The verifier's name of an option -> parameter names that functions use for it.
_NAMES = {
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "window": ("window", "window_size"),
    "softcap": ("softcap",),
    "splits": ("num_splits", "splits"),
    "return_lse": ("return_lse", "return_softmax_lse"),
    "gqa": ("enable_gqa",),
    "q_scale": ("q_scale", "q_descale"),
    "k_scale": ("k_scale", "k_descale"),
    "v_scale": ("v_scale", "v_descale"),
}
# Exceptions that mean: the function does not support this call. All others are failures.
REFUSALS = (NotImplementedError, TypeError, ValueError)


def keywords_of(function, declared=()):
    """{option: the function's parameter name}, from its signature. A function with **keywords gets only
    the declared options, under the verifier's names, because it may ignore the others. A function
    without a signature (a builtin) gets torch's names."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {"causal": "is_causal", "scale": "scale", "gqa": "enable_gqa"}
    names = {p.name for p in parameters}
    found = {}
    for option, candidates in _NAMES.items():
        for candidate in candidates:
            if candidate in names:
                found[option] = candidate
                break
        else:
            takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
            if takes_any and option in declared:
                found[option] = candidates[0]
    return found


def array_of(tensor):
    """A NumPy view of the memory of a descriptor."""
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    dtype = numpy.dtype(_VIEWS[(tensor.dtype.code, tensor.dtype.bits)])
    strides = [tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)]
    reach = sum((n - 1) * s for n, s in zip(shape, strides)) + dtype.itemsize
    memory = (ctypes.c_char * reach).from_address(tensor.data)
    return numpy.ndarray(shape, dtype, memory, 0, strides)


class Misshapen(Exception):
    """A result has the wrong shape; `code` tells the library which."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


class Adapter:
    """Calls `function` for the verifier and keeps the last exception in `raised`."""

    def __init__(self, function, framework, layout, device, keywords):
        self.function = function
        self.torch = framework
        self.layout = layout
        self.device = device
        self.keywords = keywords
        self.raised = None

    def __call__(self, pointer, _user):
        call = pointer.contents
        return self._guard(call, call, verify_abi.Call, self._run)

    def _guard(self, call, given, struct, run):
        """Runs a call and turns what it raises into the code and the message of `call`."""
        try:
            if given.struct_size != ctypes.sizeof(struct):
                raise RuntimeError(f"the library's {struct.__name__} has another size")
            run(given)
            return 0
        except REFUSALS as error:
            return self._refuse(call, error, 2)
        except Misshapen as error:
            self.raised = error
            return self._say(call, str(error), error.code)
        except Exception as error:  # noqa: BLE001: any exception is reported
            return self._refuse(call, error, 5)

    def _refuse(self, call, error, code):
        self.raised = error
        return self._say(call, f"{type(error).__name__}: {error}", code)

    def _say(self, call, message, code):
        text = message.splitlines()[0].encode()[:call.message_bytes - 1]
        ctypes.memmove(call.message, text + b"\0", len(text) + 1)
        return code

    def _options(self, call, return_lse):
        options = {}

        def give(option, value):
            if option not in self.keywords:
                raise NotImplementedError(f"it has no parameter for {option}")
            options[self.keywords[option]] = value

        if call.causal:
            give("causal", True)
        if call.has_scale:
            give("scale", call.scale)
        if call.window_left >= 0 or call.window_right >= 0:
            give("window", (call.window_left, call.window_right))
        if call.softcap > 0:
            give("softcap", call.softcap)
        if call.num_splits > 0:
            give("splits", call.num_splits)
        if return_lse and "return_lse" in self.keywords:
            give("return_lse", True)
        if "gqa" in self.keywords and call.q.contents.shape[1] != call.k.contents.shape[1]:
            give("gqa", True)
        for name in ("q_scale", "k_scale", "v_scale"):
            if getattr(call, name):
                give(name, self._wrap(getattr(call, name).contents))
        return options

    def _wrap(self, tensor):
        array = array_of(tensor)
        if tensor.ndim == 4 and self.layout == "bshd":
            array = array.transpose(0, 2, 1, 3)
        if self.torch is None:
            return array
        wrapped = self.torch.from_numpy(array)
        special = _TORCH_VIEWS.get((tensor.dtype.code, tensor.dtype.bits))
        if special is not None:
            wrapped = wrapped.view(getattr(self.torch, special))
        return wrapped.to(self.device)

    def _run(self, call):
        q, k, v = (self._wrap(t.contents) for t in (call.q, call.k, call.v))
        result = self.function(q, k, v, **self._options(call, return_lse=bool(call.lse)))
        out, lse = result if isinstance(result, (tuple, list)) else (result, None)
        if out is None:
            raise RuntimeError("it returned None")
        if call.lse and lse is None:
            raise NotImplementedError("it returns no LSE")
        self._store(out, call.out.contents, "output", verify_abi.OUT_MISSHAPEN)
        if call.lse:
            self._store(lse, call.lse.contents, "LSE", verify_abi.LSE_MISSHAPEN)

    def _store(self, values, tensor, what, code):
        """Copies a result into the verifier's memory and rounds it to that dtype."""
        into = array_of(tensor)
        if tensor.ndim == 4 and self.layout == "bshd":
            into = into.transpose(0, 2, 1, 3)
        if self.torch is not None:
            if not self.torch.is_tensor(values):
                values = self.torch.as_tensor(values)
            values = values.detach().cpu()
            if (tensor.dtype.code, tensor.dtype.bits) == (4, 16):
                values = values.to(self.torch.bfloat16).view(self.torch.int16)
            elif values.dtype == self.torch.bfloat16:
                values = values.to(self.torch.float32)
            values = values.numpy()
        values = numpy.asarray(values)
        if values.shape != into.shape:
            raise Misshapen(f"the {what}'s shape is {values.shape}; wanted {into.shape}", code)
        numpy.copyto(into, values, casting="unsafe")


class BackwardAdapter(Adapter):
    """Calls a backward function for the verifier: function(q, k, v, out, lse, dout, **options), which
    returns (dq, dk, dv). If its parameters have these names, their order does not matter."""

    TENSORS = ("q", "k", "v", "out", "lse", "dout")

    def __init__(self, function, framework, layout, device, keywords):
        super().__init__(function, framework, layout, device, keywords)
        try:
            names = set(inspect.signature(function).parameters)
        except (TypeError, ValueError):  # a builtin
            names = set()
        self.by_name = names.issuperset(self.TENSORS)
        self.takes_dlse = "dlse" in names

    def __call__(self, pointer, _user):
        call = pointer.contents
        return self._guard(call.forward.contents, call, verify_abi.BackwardCall, self._run_backward)

    def _run_backward(self, call):
        gradients = self._differentiate(call)
        if not isinstance(gradients, (tuple, list)) or len(gradients) < 3:
            raise RuntimeError("it returned no (dq, dk, dv)")
        for name, values in zip(("dq", "dk", "dv"), gradients):
            if values is None:
                raise RuntimeError(f"{name} is None")
            self._store(values, getattr(call, name).contents, name, verify_abi.GRADIENT_MISSHAPEN)

    def _differentiate(self, call):
        forward = call.forward.contents
        arrays = [self._wrap(t.contents) for t in (forward.q, forward.k, forward.v, forward.out,
                                                   forward.lse, call.dout)]
        options = self._options(forward, return_lse=False)
        if call.dlse:
            if not self.takes_dlse:
                raise NotImplementedError("it has no parameter dlse")
            options["dlse"] = self._wrap(call.dlse.contents)
        if self.by_name:
            return self.function(**dict(zip(self.TENSORS, arrays)), **options)
        return self.function(*arrays, **options)


class AutogradAdapter(BackwardAdapter):
    """Differentiates the forward function by torch's autograd."""

    def __init__(self, function, framework, layout, device, keywords):
        Adapter.__init__(self, function, framework, layout, device, keywords)

    def _differentiate(self, call):
        forward = call.forward.contents
        if call.dlse and "return_lse" not in self.keywords:
            raise NotImplementedError("it returns no LSE")
        # Leaves that are views: gradients keep their shapes, whatever the strides.
        inputs = [self._wrap(t.contents).detach().requires_grad_()
                  for t in (forward.q, forward.k, forward.v)]
        with self.torch.enable_grad():
            result = self.function(*inputs, **self._options(forward, return_lse=bool(call.dlse)))
        out, lse = result if isinstance(result, (tuple, list)) else (result, None)
        results, outer = [out], [self._wrap(call.dout.contents).to(out.dtype)]
        if call.dlse:
            if not getattr(lse, "requires_grad", False):
                raise NotImplementedError("its LSE has no gradient")
            results.append(lse)
            outer.append(self._wrap(call.dlse.contents).to(lse.dtype))
        if not getattr(out, "requires_grad", False):
            raise RuntimeError("its output has no gradient")
        return self.torch.autograd.grad(results, inputs, outer)
