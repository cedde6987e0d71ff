"""flashcore.sdpa compared with torch's math backend: random combinations of ranks, broadcast dimensions,
masks and grouped heads. Every call that torch accepts must give the same shape and values."""

import contextlib
import itertools
import random
import unittest

from torch_support import Case, on_every_device, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashcore

Q_LEN, KV_LEN, DIM, V_DIM = 3, 5, 8, 4
SEED = 7
CASES = 600  # of several hundred thousand combinations


def both(**arguments):
    """(torch's result or error, ours)."""
    results = []
    for function, context in ((scaled_dot_product_attention, sdpa_kernel(SDPBackend.MATH)),
                              (flashcore.sdpa, contextlib.nullcontext())):
        try:
            with context:
                results.append(function(**arguments))
        except Exception as error:  # noqa: BLE001: exceptions are compared
            results.append(error)
    return results


@on_every_device
class Broadcasting(Case):
    def compare(self, want, got, words):
        if isinstance(want, Exception):
            self.assertIsInstance(got, (ValueError, NotImplementedError), f"{words}: torch says {want}")
            return
        if isinstance(got, Exception):
            raise AssertionError(f"{words}: torch gives {tuple(want.shape)}") from got
        self.assertEqual(tuple(got.shape), tuple(want.shape), words)
        self.assertLessEqual(float((got - want).abs().max()) if want.numel() else 0.0, 1e-5, words)

    def leading(self, choose):
        """Random leading dimensions. Most pairs of them broadcast."""
        sizes = [choose.choice((1, size)) for size in (2, 3, 4)]
        return tuple(sizes[choose.randrange(4):])

    def case(self, choose):
        shapes = {name: self.leading(choose) for name in ("query", "key", "value")}
        gqa = choose.random() < 0.3
        if gqa and choose.random() < 0.8:
            for name in ("key", "value"):
                shapes[name] = (*shapes[name][:-1], choose.choice((1, 2, 4)))
        arguments = {name: self.draw(*leading, *last) for (name, leading), last in zip(
            shapes.items(), ((Q_LEN, DIM), (KV_LEN, DIM), (KV_LEN, V_DIM)))}
        kind = choose.choice(("none", "causal", "bool", "float", "float"))
        if kind in ("bool", "float"):
            last = choose.choice(((), (KV_LEN,), (1,), *itertools.product((1, Q_LEN), (1, KV_LEN))))
            front = self.leading(choose) if len(last) == 2 else ()
            mask = self.draw(*front, *last)
            arguments["attn_mask"] = mask > -0.5 if kind == "bool" else mask
        return dict(arguments, is_causal=kind == "causal", enable_gqa=gqa)

    def test_like_torch(self):
        choose = random.Random(SEED)
        served = 0
        for number in range(CASES):
            arguments = self.case(choose)
            words = f"case {number} of seed {SEED}: " + ", ".join(
                f"{name} {tuple(one.shape) if isinstance(one, torch.Tensor) else one}"
                for name, one in arguments.items())
            want, got = both(**arguments)
            self.compare(want, got, words)
            served += not isinstance(want, Exception)
        self.assertGreater(served, CASES // 2)

    def test_selected_cases(self):
        def draw(*shapes):
            return dict(zip(("query", "key", "value"), (self.draw(*one) for one in shapes)))

        for arguments in (
                draw((4, 3, 8), (4, 1, 6, 8), (4, 1, 6, 8)),
                dict(draw((4, 3, 8), (2, 6, 8), (2, 6, 8)), enable_gqa=True),
                dict(draw((1, 4, 3, 8), (1, 2, 6, 8), (1, 1, 6, 8)), enable_gqa=True),
                dict(draw((2, 3, 4, 3, 8), (3, 4, 6, 8), (4, 6, 8)), attn_mask=self.draw(3, 1, 3, 1)),
                dict(draw((2, 3, 4, 3, 8), (2, 3, 2, 6, 8), (2, 3, 2, 6, 8)), enable_gqa=True,
                     attn_mask=self.draw(3, 4, 3, 6)),
                dict(draw((1, 2, 3, 8), (1, 2, 6, 8), (1, 2, 6, 8)), attn_mask=torch.tensor(True)),
                draw((3, 8), (6, 8), (6, 8)), draw((1, 2, 0, 8), (1, 2, 6, 8), (1, 2, 6, 8)),
                draw((1, 2, 3, 8), (1, 2, 0, 8), (1, 2, 0, 8)),
                draw((0, 2, 3, 8), (0, 2, 6, 8), (0, 2, 6, 8)),
                draw((1, 2, 3, 8), (1, 2, 6, 8), (1, 2, 6, 0)),
                draw((1, 2, 3, 0), (1, 2, 6, 0), (1, 2, 6, 8))):
            if isinstance(arguments.get("attn_mask"), torch.Tensor):
                arguments["attn_mask"] = arguments["attn_mask"].to(self.device)
            want, got = both(**arguments)
            self.assertIsInstance(want, torch.Tensor)
            self.compare(want, got, str({name: getattr(one, "shape", one)
                                         for name, one in arguments.items()}))

    def test_gradients_of_broadcast_inputs(self):
        shapes = (2, 1, 3, 8), (4, 5, 8), (2, 4, 5, 8), (4, 1, 5)
        inputs = [self.draw(*one, grad=True) for one in shapes]
        q, k, v, mask = inputs
        results = both(query=q, key=k, value=v, attn_mask=mask)
        want, got = (torch.autograd.grad(one.square().sum(), inputs) for one in results)
        for one, other in zip(got, want):
            self.check(one, other, factor=10)

    def test_refusals_name_the_argument(self):
        q, k = self.draw(1, 2, 3, 8), self.draw(1, 2, 5, 8)
        for words, arguments in (
                ("key: head_dim is 4, query has 8", dict(query=q, key=k[..., :4], value=k)),
                ("value: kv_len is 4, key has 5", dict(query=q, key=k, value=k[:, :, :4])),
                ("key: dtype is int64", dict(query=q, key=k.long(), value=k)),
                ("key: dtype is f16", dict(query=q, key=k.half(), value=k)),
                ("query: has 1 dimensions", dict(query=q[0, 0, 0], key=k, value=k)),
                ("attn_mask: shape is", dict(query=q, key=k, value=k, attn_mask=self.draw(2, 5))),
                ("attn_mask: dtype is i32", dict(query=q, key=k, value=k, attn_mask=torch.ones(
                    3, 5, dtype=torch.int32, device=self.device))),
                ("key: has 3 heads, query has 2", dict(query=q, key=self.draw(1, 3, 5, 8), value=k,
                                                       enable_gqa=True)),
                ("dropout_p is -1", dict(query=q, key=k, value=k, dropout_p=-1.0))):
            with self.subTest(words), self.assertRaisesRegex((ValueError, NotImplementedError), words):
                flashcore.sdpa(**arguments)

    def test_flags_are_flags(self):
        q = self.draw(1, 2, 3, 8)
        for name in ("is_causal", "enable_gqa"):
            for value in ("yes", None, 0.5, [True]):
                with self.subTest(name, value=value), self.assertRaisesRegex(TypeError, name):
                    flashcore.sdpa(q, q, q, **{name: value})

    def test_compiled(self):
        q, k = self.draw(2, 1, 3, 8), self.draw(4, 5, 8)
        compiled = torch.compile(flashcore.sdpa, fullgraph=True, backend="aot_eager")
        mask = self.draw(4, 3, 1)
        self.check(compiled(q, k, k, attn_mask=mask), flashcore.sdpa(q, k, k, attn_mask=mask))


if __name__ == "__main__":
    unittest.main()
