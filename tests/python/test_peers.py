"""The benchmark's peers: an adapter passes the case's problem to its library or gives a reason. A peer that
raises or is wrong has a reason instead of a time. Also flashcore.attention as the benchmark calls it."""

import importlib
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

try:
    import torch
except ImportError:
    raise unittest.SkipTest("torch is not installed")

import foreign_libraries
from flashcore._core import library
from flashcore.bench import (cases, cpu, cuda, forward, peers as bench_peers, peers_base, places, reference, timing,
                             torch_case)
from flashcore.bench.inputs import Inputs
from flashcore.bench.options import CaseOptions
from support import case

ROOT = Path(__file__).resolve().parents[2]


def shaped(**fields):
    """A case with head dims that every library supports."""
    values = dict(dtype="bf16", batch=2, q_heads=4, kv_heads=2, q_len=12, kv_len=12, head_dim=64)
    return case(**{**values, **fields})


FULL, CAUSAL = shaped(), shaped(causal=True)
DECODE = shaped(q_len=1, kv_len=48)
BOTTOM_RIGHT = shaped(q_len=3, kv_len=48, causal=True)
WINDOW = shaped(causal=True, window=4)
PACKED = shaped(q_len=9, kv_len=9, packed=(9, 5), causal=True)
RAGGED = shaped(q_len=1, kv_len=48, used_k=(48, 7))
PAGED = shaped(q_len=1, kv_len=48, page_size=16)
WIDE_PAGES = shaped(q_len=1, kv_len=512, page_size=256)
CODES = shaped(dtype="e4m3")
DECODE_CODES = shaped(dtype="e4m3", q_len=1, kv_len=48)
MIXED = shaped(dtype="bf16/e4m3", q_len=1, kv_len=48)
OTHER_V = shaped(head_dim=192, v_dim=128)


def drawn(one, sets=1):
    """(inputs, sampled rows, their reference)."""
    inputs = Inputs(torch, one, "cpu", sets)
    rows = reference.sample_rows(one)
    return inputs, rows, reference.torch_rows(torch, one, *inputs.readable(0), rows)


def offered(peer, one):
    """(function or None, note) of a peer for a case, as the benchmark gets them."""
    return peers_base.usable(peer, *drawn(one), lambda call: call(0))


class Ours(unittest.TestCase):
    def test_the_public_call_computes_the_case(self):
        for one in (FULL, CAUSAL, DECODE, BOTTOM_RIGHT, WINDOW, PACKED, RAGGED, PAGED, CODES,
                    DECODE_CODES, MIXED, OTHER_V):
            with self.subTest(one.shape_text()):
                inputs, rows, want = drawn(one)
                out = forward.public_call(inputs, 0)
                self.assertEqual(out.dtype, peers_base.torch_dtype(torch, one.out_dtype))
                self.assertLess(peers_base.relative_error(inputs, out, rows, want), 6e-3)

    def test_the_requested_kernel(self):
        inputs, _, _ = drawn(shaped(dtype="f32"))
        with self.assertRaisesRegex(ValueError, "no_such_kernel"):
            forward.public_call(inputs, 0, "no_such_kernel")

    def test_every_set_has_its_own_inputs(self):
        inputs, _, _ = drawn(FULL, sets=2)
        first, second = (forward.public_call(inputs, index) for index in range(2))
        self.assertFalse(torch.equal(first, second))
        self.assertEqual(len(inputs), 2)


class Adapters(unittest.TestCase):
    """Uses stand-ins with the libraries' signatures, and flashcore.flash_attn for FlashAttention-2."""

    def setUp(self):
        two = importlib.import_module("flashcore.flash_attn")
        patch = mock.patch.dict(sys.modules, {**foreign_libraries.modules(), "flash_attn": two})
        patch.start()
        self.addCleanup(patch.stop)
        self.peers = bench_peers.known()

    def check(self, name, takes, refuses):
        """refuses: {case: part of the reason}."""
        for one in takes:
            with self.subTest(one.shape_text()):
                call, note = offered(self.peers[name], one)
                self.assertIsNotNone(call, note)
                self.assertIsNone(note)
        for one, words in refuses.items():
            with self.subTest(one.shape_text()):
                self.assertRegex(self.peers[name].refusal(one) or "", words)

    def test_flash_attention_3(self):
        self.check("fa3", (FULL, CAUSAL, DECODE, BOTTOM_RIGHT, WINDOW, PACKED, RAGGED, PAGED, CODES,
                           DECODE_CODES, OTHER_V),
                   {MIXED: "dtype is bf16/e4m3", shaped(dtype="f32"): "dtype is f32",
                    shaped(head_dim=264): "head_dim is 264", shaped(head_dim=20): "head_dim is 20",
                    shaped(dtype="e4m3", head_dim=72): "multiples of 16",
                    shaped(head_dim=128, v_dim=64): "v_dim 64"})

    def test_flash_attention_2(self):
        self.check("flash_attn", (FULL, CAUSAL, DECODE, BOTTOM_RIGHT, WINDOW, PACKED, RAGGED,
                                  WIDE_PAGES),
                   {CODES: "dtype is e4m3", shaped(dtype="f32"): "dtype is f32",
                    PAGED: "page_size is 16", OTHER_V: "v_dim",
                    shaped(head_dim=264): "head_dim is 264"})

    def test_flashinfer(self):
        self.check("flashinfer", (FULL, CAUSAL, DECODE, BOTTOM_RIGHT, WINDOW, PACKED, PAGED),
                   {CODES: "dtype is e4m3", RAGGED: "used_k", OTHER_V: "head_dim 192",
                    shaped(head_dim=96): "head_dim 96",
                    shaped(q_len=2, kv_len=48, page_size=16): "one query"})

    def test_xformers(self):
        one_group = shaped(kv_heads=4)
        self.check("xformers", (FULL, CAUSAL, DECODE, BOTTOM_RIGHT, PACKED, one_group,
                                shaped(dtype="f32"), OTHER_V),
                   {CODES: "dtype is e4m3", RAGGED: "lengths", PAGED: "pages", WINDOW: "windows"})

    def test_torch(self):
        self.check("math", (FULL, CAUSAL, DECODE, OTHER_V, shaped(dtype="f32")),
                   {BOTTOM_RIGHT: "top-left", PACKED: "lengths", RAGGED: "lengths", PAGED: "pages",
                    WINDOW: "windows", shaped(dtype="e4m3", cold_l2=True): "8-bit",
                    shaped(batch=64, q_heads=32, q_len=4096, kv_len=4096): "137 GB"})
        call, note = offered(self.peers["math"], CODES)
        self.assertIsNotNone(call)
        self.assertEqual(note, "on the same values in f16")

    def test_gradients(self):
        """Every library with gradients computes those of the case, in the case's layout."""
        names = ("fa3", "fa3_det", "flash_attn", "math")
        for one in (shaped(kind="bwd"), shaped(kind="bwd", causal=True, kv_heads=4)):
            subject = cpu.CpuTorchCase(library.load(), one, torch, peers=())
            self.assertTrue(subject.check().ok)
            for name in names:
                with self.subTest(f"{name} {one.shape_text()}"):
                    runner, note = subject._peer(self.peers[name])
                    self.assertEqual((runner is None, note), (False, None))
        self.assertEqual([name for name, peer in self.peers.items() if "bwd" in peer.kinds],
                         ["cudnn", "fa2", "eff", "math", "fa3", "fa3_det", "flash_attn"])
        self.assertEqual(self.peers["fa3_det"].kinds, ("bwd",))

    def test_the_deterministic_mode_is_passed_on(self):
        seen = []

        def recorded(q, k, v, **options):
            seen.append(options["deterministic"])
            return foreign_libraries.modules()["flash_attn_interface"].flash_attn_func(q, k, v, **options)

        inputs = Inputs(torch, shaped(kind="bwd"), "cpu")
        with mock.patch.object(sys.modules["flash_attn_interface"], "flash_attn_func", recorded):
            for name in ("fa3", "fa3_det"):
                self.peers[name].bind_gradients(inputs)
        self.assertEqual(seen, [False, True])

    def test_wrong_gradients_are_not_timed(self):
        subject = cpu.CpuTorchCase(library.load(), shaped(kind="bwd"), torch, peers=())
        self.assertTrue(subject.check().ok)
        real = peers_base.gradients_of
        for which in range(3):
            def spoiled(*arguments):
                call = real(*arguments)
                return lambda index: tuple(1.1 * one if number == which else one
                                           for number, one in enumerate(call(index)))

            with mock.patch("flashcore.bench.peers_torch.gradients_of", spoiled):
                self.assertRegex(subject._peer(self.peers["math"])[1], r"off by 0\.1 ")

    def test_options_are_refused(self):
        for options, words in ((CaseOptions(mask="random"), "mask"), (CaseOptions(alibi=True), "alibi"),
                               (CaseOptions(batch_invariant=True), "batch_invariant"),
                               (CaseOptions(f32_out=True), "f32_out")):
            call, note = offered(self.peers["math"], shaped(options=options))
            self.assertEqual((call, note), (None, f"the adapters do not pass {words}"))

    def test_a_refused_case_is_not_passed_on(self):
        with mock.patch.object(type(self.peers["fa3"]), "bind", side_effect=AssertionError("called")):
            call, note = offered(self.peers["fa3"], MIXED)
        self.assertIsNone(call)
        self.assertIn("dtype is bf16/e4m3", note)

    def test_each_input_set_is_passed_on(self):
        for name in ("fa3", "flash_attn", "flashinfer", "xformers", "math"):
            inputs, _, _ = drawn(FULL, sets=2)
            call = self.peers[name].bind(inputs)
            for index in range(2):
                got = self.peers[name].as_ours(inputs, call(index)).float()
                want = forward.public_call(inputs, index).float()
                self.assertLess(float((got - want).norm() / want.norm()), 6e-3, name)

    def test_every_case_is_taken_or_refused_with_a_reason(self):
        for one in cases.load(ROOT / "bench" / "cases.json"):
            for name, peer in self.peers.items():
                reason = peer.refusal(one)
                self.assertTrue(reason is None or reason.strip(), (name, one))

    def test_versions(self):
        found = bench_peers.versions(["flashinfer", "xformers", "math", "fa3"])
        self.assertEqual((found["flashinfer"], found["xformers"]), ("0.3", "0.0.30"))
        self.assertEqual(found["math"], torch.__version__)
        self.assertEqual(found["fa3"], "unknown")  # the stand-in has no version


class Broken(peers_base.Peer):
    """A peer that returns the reference result changed by `spoil`."""

    module = "torch"

    def __init__(self, spoil):
        self.spoil = spoil

    def refusal(self, case):
        return None

    def bind(self, inputs):
        return lambda index: self.spoil(forward.public_call(inputs, index))


class Reasons(unittest.TestCase):
    def reason(self, spoil, one=CAUSAL):
        call, reason = offered(Broken(spoil), one)
        self.assertIsNone(call)
        return reason

    def test_a_correct_peer_is_taken(self):
        call, note = offered(Broken(lambda out: out), CAUSAL)
        self.assertEqual((call is None, note), (False, None))

    def test_a_wrong_peer(self):
        self.assertRegex(self.reason(lambda out: 1.1 * out), r"off by 0\.1 .*not timed")
        self.assertIn("off by", self.reason(lambda out: out.flip(2)))
        self.assertIn("off by nan", self.reason(lambda out: out * float("nan")))
        self.assertRegex(self.reason(lambda out: out.transpose(1, 2)), r"its result is \(2, 12, 4, 64\)")
        top_left = shaped(q_len=3, kv_len=48, causal=True)
        self.assertIn("off by", self.reason(lambda out: out.roll(1, 2), top_left))

    def test_a_wrong_peer_in_8_bits(self):
        """The tolerance of e4m3 still detects a wrong scale or mask."""
        self.assertIn("off by", self.reason(lambda out: 1.1 * out, CODES))

    def test_a_peer_that_raises(self):
        def refuse(out):
            raise AssertionError("only supports Hopper\nand more")

        self.assertEqual(self.reason(refuse), "only supports Hopper")

        def silent(out):
            raise KeyError

        self.assertEqual(self.reason(silent), "KeyError")

    def test_the_reason_comes_from_the_warning(self):
        def refuse(out):
            import warnings
            warnings.warn("Flash attention kernel not used because:")
            warnings.warn("head_dim should be below 8 (Triggered internally at x.cpp:1.)")
            raise RuntimeError("No available kernel. Aborting execution.")

        self.assertEqual(self.reason(refuse), "head_dim should be below 8")

    def test_a_library_that_is_not_installed(self):
        class Absent(Broken):
            module = "no_such_library.ops"

        self.assertEqual(offered(Absent(None), FULL), (None, "not installed"))
        with mock.patch.object(bench_peers, "known", lambda *_: {"absent": Absent(None)}):
            self.assertEqual(bench_peers.versions(["absent"]), {"absent": "not installed"})

    def test_a_library_that_does_not_load(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "flash_attn_interface.py").write_text(
                "raise ImportError('libcudart.so.13: no such file')\n")
            with mock.patch.object(sys, "path", [folder, *sys.path]):
                importlib.invalidate_caches()
                call, reason = offered(bench_peers.known()["fa3"], FULL)
        self.assertIsNone(call)
        self.assertEqual(reason, "cannot be imported: libcudart.so.13: no such file")

    def test_a_backend_that_torch_does_not_have(self):
        from flashcore.bench.peers_torch import Sdpa
        self.assertIn("SDPBackend.NEXT", offered(Sdpa("NEXT"), FULL)[1])


class Captured(unittest.TestCase):
    """Peers of a case on the CPU, where capturing a call means running it."""

    def prepared(self, peers, capture=None):
        """The names that are timed, and the notes."""
        class Subject(torch_case.TorchCase):
            call = "flashcore.attention"

            def _runner(self, call):
                runner = mock.Mock()
                runner.recomputed = lambda: (capture or (lambda result: result))(call(1))
                return runner

        with mock.patch.object(bench_peers, "known", lambda *_: peers):
            subject = Subject(library.load(), CAUSAL, torch, places.Cpu(), 2, 1, None, tuple(peers))
            self.assertTrue(subject.check().ok)
            subject.prepare()
        return list(subject._runners), subject.peers_note

    def test_timed_peers(self):
        def refuse(out):
            raise RuntimeError("no kernel")

        timed, notes = self.prepared({"good": Broken(lambda out: out), "bad": Broken(refuse),
                                      "wrong": Broken(lambda out: 2 * out),
                                      "math": bench_peers.known()["math"]})
        self.assertEqual(timed, ["ours", "bare", "good", "math"])
        self.assertEqual(notes["bad"], "no kernel")
        self.assertIn("off by 1 ", notes["wrong"])
        self.assertEqual(set(notes), {"bad", "wrong"})

    def test_an_empty_graph(self):
        timed, notes = self.prepared({"other-stream": Broken(lambda out: out)},
                                     lambda result: torch.full_like(result, float("nan")))
        self.assertEqual(timed, ["ours", "bare"])
        self.assertEqual(notes["other-stream"], "captured, its result is off by nan (relative): not timed")

    def test_a_call_that_cannot_be_captured(self):
        def refuse(result):
            raise RuntimeError("operation not permitted when stream is capturing")

        timed, notes = self.prepared({"eager": Broken(lambda out: out)}, refuse)
        self.assertEqual(timed, ["ours", "bare"])
        self.assertEqual(notes["eager"], "could not be captured: operation not permitted when stream is "
                         "capturing")


@unittest.skipUnless(torch.cuda.is_available(), "torch finds no GPU")
class OnAGpu(unittest.TestCase):
    def test_a_case_from_beginning_to_end(self):
        """A case is checked, captured and timed. Every peer has a time or a reason."""
        names = list(bench_peers.known())
        for one in (FULL, CAUSAL, shaped(q_len=1, kv_len=48, cold_l2=True), WINDOW, PACKED, RAGGED,
                    PAGED, CODES, MIXED, shaped(dtype="f32"), shaped(kind="bwd"),
                    shaped(options=CaseOptions(mask="random", softcap=2.0, f32_out=True)),
                    shaped(q_len=8, kv_len=48, options=CaseOptions(mask="tree")),
                    shaped(causal=True, options=CaseOptions(documents=2, alibi=True, bias=True))):
            with self.subTest(one.shape_text()):
                subject = cuda.CudaCase(library.load(), one, torch, peers=names)
                self.addCleanup(subject.close)
                verdict = subject.check()
                self.assertTrue(verdict.ok, verdict.reason)
                subject.prepare()
                row = timing.summarise([subject.sample(reverse=bool(number % 2)) for number in range(5)])
                self.assertTrue(subject.unchanged())
                self.assertGreater(row["us"], 0.5)
                self.assertGreater(row["bare_us"], 0.5)
                for name in (name for name, peer in bench_peers.known().items() if one.kind in peer.kinds):
                    self.assertTrue(name in row["peers_us"] or subject.peers_note[name], name)
                if one in (FULL, CAUSAL):
                    self.assertIn("math", row["peers_us"], subject.peers_note)

    def test_an_empty_graph_is_detected(self):
        """The graph of a library that launches on its own stream is empty."""
        class Elsewhere(Broken):
            def bind(self, inputs):
                once = {index: forward.public_call(inputs, index) for index in range(len(inputs))}
                return lambda index: once[index].clone() if not torch.cuda.is_current_stream_capturing() \
                    else torch.empty_like(once[index])

        subject = cuda.CudaCase(library.load(), CAUSAL, torch, peers=("elsewhere",))
        self.addCleanup(subject.close)
        self.assertTrue(subject.check().ok)
        with mock.patch.object(bench_peers, "known", lambda *_: {"elsewhere": Elsewhere(None)}):
            subject.prepare()
        self.assertNotIn("elsewhere", subject._runners)
        self.assertIn("captured", subject.peers_note["elsewhere"])


if __name__ == "__main__":
    unittest.main()
