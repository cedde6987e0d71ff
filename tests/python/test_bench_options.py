"""The benchmark of options and gradients on the CPU, with small shapes: from the cases to the verdict of
scripts/gpu_check. A wrong result, a missed bar and a missing kernel are reported."""

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

try:
    import torch
except ImportError:
    raise unittest.SkipTest("torch is not installed")

import gpu_check_bench
import gpu_check_targets as targets
from flashcore._core import library as core_library
from flashcore.bench import cases, command, forward, gradients, kernels, report, results, run, score_options
from flashcore.bench.cpu import CpuTorchCase
from flashcore.bench.options import CaseOptions, baseline_of
from gpu_check_runner import Command, Report
from support import case

ROOT = Path(__file__).resolve().parents[2]
ALL = cases.load(ROOT / "bench" / "cases.json")


def shaped(**fields):
    values = dict(name="one", dtype="bf16", batch=2, q_heads=4, kv_heads=2, q_len=32, kv_len=32, head_dim=16,
                  causal=True)
    return case(**{**values, **fields})


def optioned(**options):
    return shaped(options=CaseOptions(**options))


SCORED = (optioned(mask="padding"), optioned(mask="random"), optioned(bias=True), optioned(alibi=True),
          optioned(softcap=2.0), shaped(q_len=16, causal=False, options=CaseOptions(mask="tree")),
          optioned(documents=4))
UNSCORED = (optioned(batch_invariant=True), optioned(f32_out=True), shaped(page_size=4, requires="pages"),
            shaped(window=5), shaped(q_len=3, page_size=8), shaped(kv_heads=4, v_dim=8))


class WithFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.output = self.folder / "trial.json"

    def bench(self, *arguments, chosen=None):
        """(exit code, standard output, result file)."""
        if chosen is not None:
            file = self.folder / "cases.json"
            file.write_text(json.dumps([one.fields() for one in chosen]))
            arguments = ("--cases", str(file), *arguments)
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = command.main(["--device", "cpu", "--threads", "1", "--samples", "5", "--case-seconds", "0.02",
                                 "--output", str(self.output), *arguments])
        self.assertEqual(err.getvalue(), "")
        return code, out.getvalue(), results.read(self.output)


class Trial(WithFolder):
    """The suites `options` and `gradients` of bench/cases.json, on at most 32 keys."""

    def judge(self, rows, *wanted):
        """The outcome of the stage `bench` of gpu_check for measured rows and these targets."""
        results.write(self.output, {"rows": rows})
        done = Command(["true"], self.folder / "x.log", self.folder).wait(5)
        said = []
        content = {"gpu": "X", "targets": [{"bar": True, **one} for one in wanted]}
        outcome = gpu_check_bench.take_rows(Report(self.folder / "x.json", {}), self.output, done, content,
                                            frozenset(), said.append)
        return outcome, said[-1]

    def test_from_the_cases_to_the_verdict(self):
        code, out, result = self.bench("--suite", "options", "--suite", "gradients", "--longest", "32",
                                       "--peers", "torch")
        self.assertEqual((code, result["failed"]), (0, []), out)
        self.assertEqual(result["longest"], 32)
        self.assertEqual(results.problems_of({**result, "gpu": "X"}), [])
        rows = {row["name"]: row for row in result["rows"]}
        wanted = {one.name for one in ALL if one.suite in ("options", "gradients")}
        skipped = {one["name"]: one["reason"] for one in result["skipped"]}
        self.assertEqual(set(rows) | set(skipped), wanted)
        self.assertTrue(all("sm80" in name for name in skipped), skipped)
        for name, row in rows.items():
            with self.subTest(name):
                self.assertLess(row["error_to_bound"], 1)
                self.assertRegex(row["kernel_fingerprint"], r"\A[0-9a-f]{16}\Z")
                self.assertEqual(set(row.get("baseline_ratios", {})), set(cases.Case.of(row).baselines))
                self.assertEqual(row["kernel"][:3], row["kind"])
        self.assertIn("torch", rows["bwd"]["peers_us"])
        self.assertIn("torch", rows["decode-few"]["peers_us"])
        self.assertIn("bwd_sm80_bf16_d128", skipped["bwd-sm80"])
        self.assertIn("fwd_sm80_bf16_d128_q128", skipped["sm80"])
        self.assertRegex(out, r"documents +\S+ bf16 causal 8 documents .* of varlen, .* of plain")
        for path in report.write(result, self.output):
            self.assertIn("documents", path.read_text())

        easy = [{"name": "softcap", "baseline": "plain", "time_share": 1e6}, {"name": "bwd", "tflops": 1e-9},
                {"name": "documents", "baseline": "varlen", "speedup": 1e-6},
                {"name": "window-1024", "baseline": "full", "rate_share": 1e-6}]
        outcome, table = self.judge(result["rows"], *easy)
        self.assertEqual((outcome.status, outcome.reason), ("passed", ""))
        self.assertNotIn("MISSED", table)
        hard = [{"name": "softcap", "baseline": "plain", "time_share": 1e-6}, {"name": "bwd-sm80", "tflops": 1.0},
                {"name": "bwd", "peer": "fa3_det", "speedup": 1.0}]
        outcome, table = self.judge(result["rows"], *easy[1:], *hard)
        self.assertEqual(outcome.status, "failed")
        self.assertRegex(outcome.reason, r"1 rows miss their bar.*: softcap \S+ bf16 causal softcap 50 at 0\.00: "
                         r"\S+ of the time of plain, wanted 1e-06")
        self.assertEqual(table.count("MISSED"), 1)
        self.assertIn("not judged: no time of fa3_det", table)
        self.assertIn("no time of fa3_det", str(outcome.details["targets"]["not judged"]))


class Checks(unittest.TestCase):
    """A result that ignores an option fails the check of its case."""

    def verdict(self, one):
        return CpuTorchCase(core_library.load(), one, torch, 1).check()

    def test_correct_results_pass(self):
        for one in (*SCORED, *UNSCORED, shaped(used_k=(32, 7)), shaped(packed=(32, 9)),
                    shaped(kind="bwd"), shaped(kind="bwd", causal=False, kv_heads=1, q_len=20, v_dim=8, dtype="f32")):
            with self.subTest(one.shape_text()):
                verdict = self.verdict(one)
                self.assertTrue(verdict.ok, f"{verdict.reason}; {verdict.worst}")
                self.assertGreater(verdict.worst_ratio, 0)

    def test_an_option_that_is_ignored(self):
        """The C call gets no option of the scores."""
        for one in SCORED:
            with self.subTest(one.shape_text()), \
                    mock.patch.object(score_options.ScoreOptions, "tensors", lambda *_: {}):
                real = forward.forward_params

                def without(*arguments):
                    params = real(*arguments)
                    params.softcap = 0.0
                    return params

                with mock.patch.object(forward, "forward_params", without):
                    self.assertFalse(self.verdict(one).ok)

    def test_a_public_call_that_ignores_an_option(self):
        with mock.patch.object(score_options.ScoreOptions, "arguments", lambda *_: {}):
            verdict = self.verdict(SCORED[1])
        self.assertIn("the call from Python and the C call", verdict.reason)

    def test_wrong_gradients(self):
        real = core_library.Library.attention_backward
        made = {}

        def broken(library, params):
            real(library, params)
            tensor = made["of"].made[0][made["which"]]
            made["spoil"](tensor)

        def one_element(tensor):
            tensor[-1, -1, -1, -1] += 0.25

        def whole(tensor):
            tensor *= 1.05

        def unwritten(tensor):
            tensor[0, 0, 11, 0] = float("nan")

        for spoil in (one_element, whole, unwritten):
            for which, name in enumerate(gradients.NAMES):
                made.update(spoil=spoil, which=which)
                subject = CpuTorchCase(core_library.load(), shaped(kind="bwd"), torch, 1)
                made["of"] = subject.problem
                with self.subTest(f"{spoil.__name__} {name}"), \
                        mock.patch.object(core_library.Library, "attention_backward", broken):
                    verdict = subject.check()
                    self.assertFalse(verdict.ok)
                    self.assertIn(name if spoil is not unwritten else "", verdict.worst)


class Baselines(WithFolder):
    def test_the_case_that_each_is(self):
        one = shaped(page_size=4, requires="pages", options=CaseOptions(documents=4), baselines=("plain",))
        plain, full = baseline_of(one, "plain"), baseline_of(one, "full")
        self.assertEqual((plain.page_size, plain.options, plain.baselines, plain.causal, full.causal),
                         (0, CaseOptions(), (), True, False))
        packed = baseline_of(one, "varlen")
        self.assertEqual((packed.packed, packed.batch, packed.q_len, packed.causal), ((8,) * 8, 8, 8, True))
        self.assertEqual(packed.flops(), one.flops())
        self.assertIsNone(packed.mistake())
        tree = shaped(q_len=4, causal=False, options=CaseOptions(mask="tree"))
        self.assertTrue(baseline_of(tree, "causal").causal)
        codes = shaped(dtype="f16/int8", baselines=("wide",))
        wide = baseline_of(codes, "wide")
        self.assertEqual((wide.dtype, wide.shape_text()), ("f16", codes.shape_text().replace("/int8", "")))
        self.assertEqual(wide.kv_bytes(), 2 * codes.kv_bytes())

    def test_int8_keys_are_checked_and_compared_with_wider_ones(self):
        one = shaped(name="codes", dtype="f16/int8", q_len=1, causal=False, baselines=("wide",))
        code, out, result = self.bench("--peers", "torch", chosen=[one])
        self.assertEqual((code, len(result["rows"])), (0, 1), out)
        row = result["rows"][0]
        self.assertEqual(set(row["baselines_us"]), {"wide"})
        self.assertLess(row["error_to_bound"], 1)
        self.assertIn("on the same values in f16", row["peers_note"]["torch"])

    def test_a_wrong_baseline_fails_its_case(self):
        chosen = [shaped(name=name, options=CaseOptions(softcap=3.0), baselines=("plain",)) for name in ("one", "two")]
        real = CpuTorchCase.check

        def check(self):
            verdict = real(self)
            if "/" in self.case.name:
                verdict.ok, verdict.reason = False, "wrong"
            return verdict

        with mock.patch.object(CpuTorchCase, "check", check):
            code, _, result = self.bench("--peers", "", chosen=chosen)
        self.assertEqual((code, result["rows"]), (1, []))
        for name, failed in zip(("one", "two"), result["failed"], strict=True):  # nor is it used for the next case
            self.assertIn(f"{name}/plain: wrong", failed["reason"])

    def test_a_baseline_is_made_once(self):
        chosen = [shaped(name=name, options=CaseOptions(softcap=cap), baselines=("plain",))
                  for name, cap in (("a", 3.0), ("b", 4.0))]
        made, real = [], run.Bench.make

        def make(self, one, *arguments):
            made.append(one.name)
            return real(self, one, *arguments)

        with mock.patch.object(run.Bench, "make", make):
            _, _, result = self.bench("--peers", "", chosen=chosen)
        self.assertEqual(made, ["a", "a/plain", "b"])
        self.assertEqual([set(row["baseline_ratios"]) for row in result["rows"]], [{"plain"}] * 2)

    def test_a_peer_as_a_baseline(self):
        one = shaped(baselines=("plain@torch", "plain@math"), options=CaseOptions(batch_invariant=True))
        wide = shaped(name="wide", kv_heads=1, v_dim=8, q_len=3, baselines=("plain@torch",),
                      options=CaseOptions(f32_out=True))
        _, _, result = self.bench("--peers", "", chosen=[one, wide])
        self.assertEqual(set(result["rows"][0]["baselines_us"]), {"plain@torch", "plain@math"})
        self.assertEqual(result["rows"][1].get("baselines_us"), None)
        self.assertIn("top-left", result["rows"][1]["baselines_note"]["plain@torch"])


class Kernels(WithFolder):
    def test_a_kernel_that_does_not_exist(self):
        """Its case is skipped: by its id, by the start of ids, forward and backward."""
        chosen = [shaped(name=f"{kind}-{number}", kind=kind, options=CaseOptions(kernel=f"{kind}_wings_{end}"))
                  for kind in ("fwd", "bwd") for number, end in enumerate(("d128", "*"))]
        code, _, result = self.bench("--peers", "", chosen=chosen)
        self.assertEqual((code, result["rows"], result["failed"]), (0, [], []))
        for one, skipped in zip(chosen, result["skipped"], strict=True):
            self.assertIn(one.options.kernel, skipped["reason"])
            self.assertIn("no kernel", skipped["reason"])

    def test_the_start_of_an_id(self):
        self.assertEqual(kernels.requested("bwd_simt_bf16_d128*"), "bwd_simt_bf16_d128")
        self.assertEqual(kernels.requested("any id"), "any id")
        self.assertIsNone(kernels.requested(""))


class Fields(unittest.TestCase):
    def test_mistakes(self):
        good = shaped().fields()
        for fields, words in (({"options": {"wings": True}}, "wings is not one of"),
                              ({"options": {"softcap": 1}}, "softcap is 1"),
                              ({"options": {"bias": False}}, "bias is False"),
                              ({"options": {"mask": "holes"}}, "mask is 'holes'"),
                              ({"options": {"mask": "tree"}}, "it takes no causal"),
                              ({"options": {"documents": 5}}, "documents are"),
                              ({"options": {"bias": True}, "packed": [32, 4]}, "without varlen"),
                              ({"options": {"softcap": 2.0}, "kind": "bwd"}, "with kernel only"),
                              ({"baselines": ["fast"]}, "'fast'; wanted plain"),
                              ({"baselines": ["plain@"]}, "'plain@'"),
                              ({"baselines": ["varlen"]}, "varlen is for"),
                              ({"baselines": ["wide"]}, "wide is for")):
            with self.subTest(words), self.assertRaisesRegex(ValueError, f"x: case 0: .*{words}"):
                cases.parse(json.dumps([{**good, **fields}]), "x")

    def test_a_row_has_the_fields_of_the_file(self):
        for row, one in zip(json.loads((ROOT / "bench" / "cases.json").read_text())["cases"], ALL):
            given = {name: value for name, value in row.items() if name not in ("part", "earlier_error")}
            self.assertEqual(one.fields(), given)
            self.assertEqual(cases.Case.of(one.fields()), one)

    def test_shapes_that_are_shrunk_are_valid(self):
        for one in ALL:
            for longest in (32, 128):
                small = one.shrunk(longest)
                self.assertIsNone(small.mistake(), one)
                self.assertLessEqual(max(small.q_len, small.kv_len), max(longest, small.page_size), one)

    def test_flops(self):
        one = shaped(kind="bwd", batch=1, q_heads=2, kv_heads=2, q_len=8, kv_len=8, causal=False)
        self.assertEqual(one.flops(), 10 * 2 * 8 * 8 * 16)
        self.assertEqual(shaped(batch=1, kv_heads=4, options=CaseOptions(documents=4)).visible_pairs(), 4 * 36)

    def test_every_option_row_and_gradient_has_a_bar(self):
        content = targets.load(ROOT / "bench" / "targets.json", "NVIDIA H200")
        for one in ALL:
            found = [target for target in content["targets"] if targets.matches(target, one.fields())]
            if one.suite in ("options", "gradients"):
                self.assertTrue(found and all(target.get("bar") for target in found), one)
                judged = {target["baseline"] for target in found if "baseline" in target}
                self.assertEqual(judged, set(one.baselines), one)


if __name__ == "__main__":
    unittest.main()
