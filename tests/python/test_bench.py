"""The benchmark on the CPU: a tiny case from beginning to end, with and without torch. A case that fails
its check is not timed, and finished rows are kept."""

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from flashcore._core import library as core_library
from flashcore.bench import cases as bench_cases, command, cuda, results
from flashcore.bench.cpu import CpuCase
from support import case

try:
    import torch
except ImportError:
    torch = None


class Bench(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.output = Path(self.folder.name) / "result.json"
        self.with_torch = False

    def run_bench(self, cases, *arguments):
        """(exit code, standard output, standard error)."""
        file = Path(self.folder.name) / "cases.json"
        file.write_text(json.dumps({"cases": [one.fields() for one in cases]}))
        out, err = io.StringIO(), io.StringIO()
        without = {} if self.with_torch else {"torch": None}  # hides an installed torch
        with mock.patch.dict(sys.modules, without), contextlib.redirect_stdout(out), \
                contextlib.redirect_stderr(err):
            code = command.main(["--device", "cpu", "--cases", str(file), "--output",
                               str(self.output), "--samples", "5", "--threads", "1", *arguments])
        return code, out.getvalue(), err.getvalue()

    def result(self):
        return json.loads(self.output.read_text())

    def test_every_format_without_torch(self):
        cases = [case(name=dtype, dtype=dtype, causal=True) for dtype in ("f32", "f64", "f16", "bf16")]
        code, out, err = self.run_bench(cases)
        self.assertEqual(code, 0, err)
        result = self.result()
        self.assertEqual(results.problems_of(result), [])
        self.assertEqual(result["fingerprint"], core_library.load().fingerprint())
        self.assertEqual([row["name"] for row in result["rows"]], ["f32", "f64", "f16", "bf16"])
        for row in result["rows"]:
            self.assertEqual(len(row["samples"]), 5)
            self.assertLess(row["error_to_bound"], 1)
            self.assertEqual(row["peers_note"], {"torch": "torch is not installed"})
            self.assertIn(row["kernel"], out)

    def test_a_folder_gets_a_file_named_after_the_cpu(self):
        folder = self.output = self.output.parent / "results"
        folder.mkdir()
        code, out, err = self.run_bench([case(name="f32")])
        self.assertEqual(code, 0, err)
        self.output = folder / results.cpu_file_name(results.cpu_name(), 1)
        self.assertIn(str(self.output), out)
        self.assertEqual((self.result()["cpu"], self.result()["threads"]), (results.cpu_name(), 1))

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_torch_is_measured_in_the_same_run(self):
        self.with_torch = True
        code, out, err = self.run_bench([case(q_len=9), case(name="top-left", causal=True),
                                         case(name="causal", q_len=9, causal=True)])
        self.assertEqual(code, 0, err)
        same, other, causal = self.result()["rows"]
        for row in (same, causal):
            self.assertGreater(row["peers_us"]["torch"], 0)
            self.assertGreater(row["ratios"]["torch"], 0)
        self.assertIn("not the same problem", other["peers_note"]["torch"])
        self.assertEqual(other["peers_us"], {})

    def test_a_case_that_fails_its_check_is_not_timed(self):
        real = core_library.Library.attention

        def broken(library, params):
            real(library, params)
            values = params.out.contents.data
            import ctypes
            ctypes.cast(values, ctypes.POINTER(ctypes.c_float))[3] += 0.01

        with mock.patch.object(core_library.Library, "attention", broken), \
                mock.patch.object(CpuCase, "sample", side_effect=AssertionError("timed")):
            code, out, err = self.run_bench([case(q_len=2)])
        self.assertEqual(code, 1)
        self.assertIn("FAILED: errors exceed their bounds", out)
        result = self.result()
        self.assertEqual(result["rows"], [])
        self.assertIn("c=3", result["failed"][0]["reason"])

    def test_an_unwritten_element_is_found(self):
        with mock.patch.object(core_library.Library, "attention", lambda *_: None):
            code, _, _ = self.run_bench([case()])
        self.assertEqual(code, 1)
        self.assertEqual(self.result()["rows"], [])

    def test_a_result_that_changes_later_is_found(self):
        real = CpuCase.sample

        def sample(self, reverse=False):
            times = real(self, reverse)
            self.out.data[0] += 1
            return times

        with mock.patch.object(CpuCase, "sample", sample):
            code, _, _ = self.run_bench([case()])
        self.assertEqual(code, 1)
        self.assertIn("differs from the checked one", self.result()["failed"][0]["reason"])

    def test_a_case_that_breaks_does_not_stop_the_others(self):
        real = CpuCase.prepare

        def prepare(self):
            if self.case.name == "broken":
                raise RuntimeError("out of memory")
            real(self)

        with mock.patch.object(CpuCase, "prepare", prepare):
            code, _, _ = self.run_bench([case(name="broken"), case(name="next")])
        self.assertEqual(code, 1)
        self.assertIn("out of memory", self.result()["failed"][0]["reason"])
        self.assertEqual([row["name"] for row in self.result()["rows"]], ["next"])

    def test_unsupported_cases_are_skipped_with_a_reason(self):
        code, out, _ = self.run_bench([case(dtype="e4m3"), case(name="both", dtype="f16/e4m3"),
                                       case(name="back", kind="bwd"),
                                       case(name="ragged", used_k=(3,)),
                                       case(name="paged", page_size=3, requires="pages"),
                                       case(name="good")])
        self.assertEqual(code, 0)
        result = self.result()
        self.assertEqual([row["name"] for row in result["rows"]], ["good"])
        self.assertEqual([one["name"] for one in result["skipped"]], ["tiny", "both", "back", "ragged", "paged"])
        self.assertTrue(all(one["reason"] for one in result["skipped"]))
        self.assertEqual(out.count("skipped: "), 5)

    def test_a_kernel_by_name(self):
        code, _, _ = self.run_bench([case(), case(name="half", dtype="f16")], "--kernel",
                                    "fwd_generic_f32")
        self.assertEqual(code, 0)
        self.assertEqual([row["kernel"] for row in self.result()["rows"]], ["fwd_generic_f32"])
        self.assertIn("takes f32", self.result()["skipped"][0]["reason"])

    def test_the_time_limit(self):
        code, _, _ = self.run_bench([case(), case(name="late")], "--time-limit", "0")
        self.assertEqual(code, 0)
        self.assertEqual(len(self.result()["skipped"]), 2)
        self.assertIn("time limit", self.result()["skipped"][0]["reason"])

    def test_an_interrupt_keeps_finished_rows(self):
        real, calls = CpuCase.check, []

        def check(self):
            calls.append(self)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return real(self)

        with mock.patch.object(CpuCase, "check", check):
            code, _, err = self.run_bench([case(name="done"), case(name="second")])
        self.assertEqual(code, 130)
        self.assertIn("interrupted; 1 rows", err)
        self.assertEqual([row["name"] for row in self.result()["rows"]], ["done"])

    def test_rows_of_other_runs(self):
        cases = [case(name="a"), case(name="b", suite="cpu")]
        self.run_bench(cases)
        before = {row["name"]: row["us"] for row in self.result()["rows"]}
        code, _, _ = self.run_bench(cases, "--case", "b")
        self.assertEqual(code, 0)
        after = {row["name"]: row["us"] for row in self.result()["rows"]}
        self.assertEqual((list(after), after["a"]), (["a", "b"], before["a"]))

        stale = self.result()
        stale["fingerprint"] = "0" * 16
        results.write(self.output, stale)
        code, _, err = self.run_bench(cases, "--case", "b")
        self.assertEqual(code, 2)
        self.assertIn("other sources", err)
        self.assertEqual(self.result(), stale)
        self.assertEqual(self.run_bench(cases)[0], 0)
        self.assertEqual(len(self.result()["rows"]), 2)

    def test_mistakes_are_explained(self):
        code, _, err = self.run_bench([case()], "--suite", "nonsense")
        self.assertEqual(code, 2)
        self.assertIn("known are cpu", err)
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as err:
            command.main(["--peers", "cudnn,nobody"])
        self.assertIn("nobody", err.getvalue())
        code, _, err = self.run_bench([case()], "--cases", "/no/such/file")
        self.assertEqual(code, 2)
        self.assertIn("/no/such/file", err)


    def test_a_table_of_a_file(self):
        self.run_bench([case(name="shown", q_heads=4, kv_heads=2, causal=True)])
        result = self.result()
        result["rows"][0].update(us=10.0, peers_us={"cudnn": 5.0, "eff": 8.0},
                                 ratios={"cudnn": 2.0, "eff": 1.25})
        results.write(self.output, result)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(command.main(["--show", str(self.output)]), 0)
        heading, _, row = out.getvalue().strip().splitlines()
        self.assertEqual(heading.count("|"), row.count("|"))
        self.assertIn("| 5 | 8 | 2.00 (cudnn) |", row)
        self.assertIn("1,4/2,5x9,8 f32 causal", row)
        with contextlib.redirect_stderr(io.StringIO()) as err:
            self.assertEqual(command.main(["--show", "/no/such/file"]), 2)
        self.assertIn("/no/such/file", err.getvalue())


class Selection(unittest.TestCase):
    def test_defaults_follow_the_device(self):
        cases = [case(name="a", suite="cpu"), case(name="b", suite="anchors"),
                 case(name="c", suite="regression")]

        def names(*arguments, **options):
            return [one.name for one in bench_cases.select(cases, *arguments, **options)]

        self.assertEqual(names("cpu"), ["a"])
        self.assertEqual(names("cuda"), ["b", "c"])
        self.assertEqual(names("cuda", suites=["cpu", "regression"]), ["a", "c"])
        self.assertEqual(names("cpu", names=["b"]), ["b"])
        with self.assertRaisesRegex(ValueError, "known are a, b, c"):
            names("cpu", names=["d"])

    def test_the_old_name_of_a_suite(self):
        options = command.parse_arguments(["--suite", "lineage", "--suite", "cpu"])
        self.assertEqual(options.suite, ["regression", "cpu"])

    def test_the_file_is_checked(self):
        good = case().fields()
        self.assertEqual(bench_cases.parse(json.dumps([good]), "x"), [case()])
        for name, value in (("batch", "1"), ("batch", True), ("causal", 1), ("name", 3)):
            with self.assertRaisesRegex(ValueError, f"x: case 0: {name}"):
                bench_cases.parse(json.dumps([{**good, name: value}]), "x")
        with self.assertRaisesRegex(ValueError, 'no field "kv_len"'):
            bench_cases.parse(json.dumps([{k: v for k, v in good.items() if k != "kv_len"}]), "x")
        more = {**good, "used_k": [4], "page_size": 3, "requires": "pages"}
        self.assertEqual(bench_cases.parse(json.dumps([more]), "x")[0].fields(), more)
        for name, value in (("used_k", [1, 2]), ("used_k", [10]), ("used_k", ["a"]),
                            ("packed", [1, 2]), ("packed", [1]), ("packed", ["a"]),
                            ("window", -1), ("window", 1), ("v_dim", "1"),
                            ("page_size", 2), ("page_size", "1"), ("requires", "wings")):
            with self.assertRaisesRegex(ValueError, f"x: case 0: {name}"):
                bench_cases.parse(json.dumps([{**good, name: value}]), "x")
        with self.assertRaisesRegex(ValueError, "list of cases"):
            bench_cases.parse("{}", "x")

    def test_arithmetic(self):
        one = case(batch=2, q_heads=4, kv_heads=2, q_len=3, kv_len=5, head_dim=8, dtype="f16")
        self.assertEqual(one.flops(), 4 * 2 * 4 * 15 * 8)
        self.assertEqual(one.input_bytes(), 2 * (4 * 3 + 2 * 2 * 5) * 8 * 2)
        ragged = case(batch=2, q_heads=4, kv_heads=2, q_len=3, kv_len=9, head_dim=8, dtype="f16",
                      causal=True, used_k=(2, 6))
        self.assertEqual([ragged.visible_end(b, i) for b in (0, 1) for i in range(3)],
                         [0, 1, 2, 4, 5, 6])
        self.assertEqual(ragged.flops(), 4 * 4 * (3 + 15) * 8)
        self.assertEqual(ragged.kv_bytes(), 2 * 2 * (2 + 6) * 8 * 2)
        packed = case(batch=2, q_heads=4, kv_heads=2, q_len=4, kv_len=4, head_dim=8, v_dim=2,
                      dtype="f16", causal=True, window=1, packed=(4, 2))
        self.assertEqual(packed.out_shape, (6, 4, 2))
        self.assertEqual([(packed.visible_begin(0, i), packed.visible_end(0, i)) for i in range(4)],
                         [(0, 1), (0, 2), (1, 3), (2, 4)])
        self.assertEqual(packed.visible_pairs(), (1 + 2 + 2 + 2) + (1 + 2))
        self.assertEqual(packed.flops(), 2 * 4 * 10 * (8 + 2))
        self.assertEqual(packed.input_bytes(), (2 * 6 * (8 + 2) + 4 * 6 * 8) * 2)


class Samples(unittest.TestCase):
    """The order of operations in a GPU sample. Stand-ins for torch's graphs and events record it."""

    def runner(self, ms):
        log = []
        torch = mock.MagicMock()
        torch.cuda._sleep.side_effect = lambda cycles: log.append("pause")
        runner = cuda.Runner.__new__(cuda.Runner)
        runner.torch, runner.stream, runner.calls, runner.graph = torch, mock.MagicMock(), 2, mock.Mock()
        runner.begin, runner.end = mock.Mock(), mock.Mock()
        runner.graph.replay.side_effect = lambda: log.append("replay")
        runner.begin.record.side_effect = lambda stream: log.append("begin")
        runner.end.record.side_effect = lambda stream: log.append("end")
        runner.begin.elapsed_time.side_effect = lambda end: ms
        return runner, log

    def test_the_second_replay_after_the_pause_is_timed(self):
        """Before each sample the GPU idles as long as the previous one took, at least 2 ms."""
        for ms, second_idle in ((0.2, 2000), (5.0, 10000)):
            runner, log = self.runner(ms)
            with mock.patch.object(cuda.time, "sleep",
                                   lambda seconds: log.append(f"idle {1e6 * seconds:.0f} us")):
                self.assertAlmostEqual(runner.sample(), 500 * ms)
                self.assertAlmostEqual(runner.sample(), 500 * ms)
            timed = ["pause", "replay", "begin", "replay", "end"]
            self.assertEqual(log, ["idle 2000 us", *timed, f"idle {second_idle} us", *timed])

    def test_a_captured_result_is_computed_again(self):
        runner, log = self.runner(1.0)
        runner.result = mock.Mock()
        runner.result.fill_.side_effect = lambda value: log.append("poisoned")
        self.assertIs(runner.recomputed(), runner.result)
        self.assertEqual(log, ["poisoned", "replay"])


if __name__ == "__main__":
    unittest.main()
