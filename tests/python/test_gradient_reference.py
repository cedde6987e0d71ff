"""The reference of gradients in the benchmark: its rows and bounds are those of docs/numerics.md, computed here pair
by pair."""

import math
import unittest

try:
    import torch
except ImportError:
    raise unittest.SkipTest("torch is not installed")

from flashcore.bench import gradient_reference, tolerance
from flashcore.bench.inputs import Inputs
from support import case

U = 2.0**-24


class Pairs:
    """The sums of docs/numerics.md, "Gradients", over all pairs of a case."""

    def __init__(self, one, tensors):
        self.one, self.scale = one, 1 / math.sqrt(one.head_dim)
        self.q, self.k, self.v, self.out, self.dout = (tensor.double() for tensor in tensors)
        self.group = one.q_heads // one.kv_heads

    def row(self, b, h, i):
        """{key: (P, w, pi)}, delta_i and E_i of a query."""
        one, head = self.one, h // self.group
        keys = range(one.visible_begin(b, i), one.visible_end(b, i))
        q, dout = self.q[b, h, i], self.dout[b, h, i]
        scores = {j: self.scale * float(q @ self.k[b, head, j]) for j in keys}
        lse = math.log(sum(map(math.exp, scores.values())))
        magnitude = max(self.scale * float((q * self.k[b, head, j]).abs().sum()) for j in keys)
        score_error = U * (4 + math.sqrt(one.head_dim)) * magnitude + 2 * U * abs(lse)
        walk = U * (2 + math.sqrt(one.value_dim))
        product = dout * self.out[b, h, i]
        pairs = {}
        for j in keys:
            v = self.v[b, head, j]
            w = float(dout @ v) - float(product.sum())
            pairs[j] = math.exp(scores[j] - lse), w, walk * float((dout * v).abs().sum())
        return pairs, score_error, walk * float(product.abs().sum())

    def bound(self, x, noise, error, mass, terms, a):
        walk = max(math.sqrt(noise), abs(x))
        return (2 * a.out_unit * abs(x) + 4 * (a.p_unit + U * math.sqrt(terms)) * walk + error + a.out_smallest
                + a.p_smallest * mass)

    def dq(self, b, h, i, c, a):
        """(value, bound) of an element."""
        pairs, score_error, delta_error = self.row(b, h, i)
        k = {j: float(self.k[b, h // self.group, j, c]) for j in pairs}
        s = self.scale
        error = sum((p * ((score_error + 4 * U) * abs(w) + pi)) * abs(k[j]) for j, (p, w, pi) in pairs.items())
        error += delta_error * abs(sum(p * k[j] for j, (p, _, _) in pairs.items()))
        value = s * sum(p * w * k[j] for j, (p, w, _) in pairs.items())
        noise = s * s * sum((p * w * k[j]) ** 2 for j, (p, w, _) in pairs.items())
        mass = s * sum((1 + abs(w)) * abs(k[j]) for j, (_, w, _) in pairs.items())
        return value, self.bound(value, noise, s * error, mass, len(pairs), a)

    def of_key(self, name, b, head, j, c, a):
        s, value, noise, error, walk, mass, terms = self.scale, 0.0, 0.0, 0.0, 0.0, 0.0, 0
        for h in range(head * self.group, (head + 1) * self.group):
            for i in range(self.one.q_len):
                pairs, score_error, delta_error = self.row(b, h, i)
                if j not in pairs:
                    continue
                p, w, pi = pairs[j]
                terms += 1
                if name == "dv":
                    x = float(self.dout[b, h, i, c])
                    value, noise, mass = value + p * x, noise + (p * x) ** 2, mass + abs(x)
                    error += p * score_error * abs(x)
                    continue
                x = float(self.q[b, h, i, c])
                value, noise = value + s * p * w * x, noise + (s * p * w * x) ** 2
                error += s * p * ((score_error + 4 * U) * abs(w) + pi) * abs(x)
                walk += (s * delta_error * p * x) ** 2
                mass += s * (1 + abs(w)) * abs(x)
        return value, self.bound(value, noise, error + 4 * math.sqrt(walk), mass, terms, a)


class Reference(unittest.TestCase):
    def test_rows_and_bounds(self):
        for dtype, fields in (("f32", dict(causal=True)), ("f16", dict(causal=False, q_heads=4, v_dim=3, batch=2))):
            a = tolerance.arithmetic_of(dtype, dtype)
            one = case(kind="bwd", q_len=5, kv_len=7, head_dim=4, **fields)
            inputs = Inputs(torch, one, "cpu")
            q, k, v, dout = inputs.q[0], inputs.k[0], inputs.v[0], inputs.dout[0]
            tensors = q, k, v, torch.randn(one.out_shape), dout  # D uses out as stored, whatever it is
            pairs = Pairs(one, tensors)
            rows = gradient_reference.gradient_rows(torch, one, tensors, U)
            self.assertEqual({row.name for row in rows}, {"dq", "dk", "dv"})
            for row in rows:
                bound = row.bound(a)
                self.assertEqual(row.at, list(range(5 if row.name == "dq" else 7)))
                for at in range(len(row.at)):
                    for c in range(row.value.shape[1]):
                        place = row.b, row.h, at, c
                        want, wanted_bound = pairs.dq(*place, a) if row.name == "dq" else \
                            pairs.of_key(row.name, *place, a)
                        self.assertAlmostEqual(float(row.value[at, c]), want, delta=1e-12, msg=(row.name, *place))
                        self.assertAlmostEqual(float(bound[at, c]) / wanted_bound, 1, delta=1e-9,
                                               msg=(row.name, *place))

    def test_values_are_those_of_autograd(self):
        one = case(kind="bwd", q_len=6, kv_len=6, head_dim=4, causal=True, dtype="f64")
        inputs = Inputs(torch, one, "cpu")
        q, k, v = (tensor[0].requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        wanted = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), inputs.dout[0])))
        tensors = tuple(tensor.detach() for tensor in (q, k, v, out, inputs.dout[0]))
        for row in gradient_reference.gradient_rows(torch, one, tensors, U):
            torch.testing.assert_close(row.value, wanted[row.name][row.b, row.h][row.at], rtol=0, atol=1e-12)


if __name__ == "__main__":
    unittest.main()
