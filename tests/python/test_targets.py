"""Targets: each kind of target, the direction of ratios, the rows that fail, and that bench/targets.json
matches existing cases."""

import shutil
import tempfile
import unittest
from pathlib import Path

import gpu_check_targets as targets
from flashcore.bench import cases, results
from support import case

ROOT = Path(__file__).resolve().parents[2]


def row(us=10.0, peers=None, **fields):
    """A measured row; peers: {name: us}."""
    return {**case(**fields).fields(), "us": us,
            "ratios": {name: us / theirs for name, theirs in (peers or {}).items()}}


def compared(us, **baselines):
    """A measured row; baselines: {name: us}."""
    return {**row(us), "baseline_ratios": {name: us / theirs for name, theirs in baselines.items()}}


def content(*wanted):
    return {"gpu": "X", "targets": list(wanted)}


def judged(one, *wanted, others=()):
    return targets.judge([one, *others], content(*wanted))[0]


class Limits(unittest.TestCase):
    def test_a_share_of_a_peers_time(self):
        target = {"name": "tiny", "peer": "fa2", "time_share": 0.75}
        found = judged(row(6.0, {"fa2": 10.0, "cudnn": 4.0}), target)
        self.assertAlmostEqual(found.target_us, 7.5)
        self.assertAlmostEqual(found.ratio, 1.25)
        self.assertEqual(found.verdict, "pass")
        self.assertEqual(judged(row(8.0, {"fa2": 10.0}), target).verdict, "short")

    def test_a_speedup_over_the_best_peer(self):
        target = {"name": "tiny", "peer": "best", "speedup": 1.25}
        found = judged(row(8.1, {"fa2": 12.0, "cudnn": 10.0}), target)
        self.assertAlmostEqual(found.target_us, 8.0)
        self.assertEqual(found.verdict, "short")
        self.assertEqual(judged(row(7.9, {"fa2": 12.0, "cudnn": 10.0}), target).verdict, "pass")

    def test_figures(self):
        one = row(10.0, dtype="f16", batch=2, q_heads=4, kv_heads=2, q_len=3, kv_len=5, head_dim=8)
        flops, kv_bytes = 4 * 2 * 4 * 15 * 8, 2 * 2 * 2 * 5 * 8 * 2
        self.assertEqual(judged(one, {"name": "tiny", "us": 9.0}).target_us, 9.0)
        self.assertAlmostEqual(judged(one, {"name": "tiny", "tflops": 2.0}).target_us, flops / 2e6)
        wide = {"name": "tiny", "kv_tbs": 4.0, "above_kv_mb": 0}
        self.assertAlmostEqual(judged(one, wide).target_us, kv_bytes / 4e6)
        self.assertIsNone(judged(one, {**wide, "above_kv_mb": 1}).target_us)

    def test_another_row(self):
        target = {"name": "tiny", "row": {"name": "whole", "batch": 3}, "speedup": 0.9}
        others = [row(100.0, name="whole", batch=1), row(9.0, name="whole", batch=3)]
        found = judged(row(10.5), target, others=others)
        self.assertAlmostEqual(found.target_us, 10.0)
        self.assertEqual(found.verdict, "short")
        self.assertEqual(judged(row(10.5), target).verdict, "not judged: no row whole")

    def test_a_baseline(self):
        share = {"name": "tiny", "baseline": "plain", "time_share": 1.1}
        self.assertAlmostEqual(judged(compared(10.9, plain=10.0), share).target_us, 11.0)
        self.assertEqual(judged(compared(11.1, plain=10.0), share).verdict, "short")
        speed = {"name": "tiny", "baseline": "plain@fa2", "speedup": 0.8}
        self.assertAlmostEqual(judged(compared(12.0, **{"plain@fa2": 10.0}), speed).target_us, 12.5)
        self.assertEqual(judged(compared(12.0, plain=10.0), speed).verdict, "not judged: no time of plain@fa2")
        refused = {**compared(12.0), "baselines_note": {"plain@fa2": "not installed"}}
        self.assertEqual(judged(refused, speed).verdict, "not judged: not installed")

    def test_the_rate_of_a_baseline(self):
        """Queries 0 to 8 of 9 see 45 of 81 pairs: at the same rate they take 45/81 of the time."""
        one = {**row(6.0, q_len=9, causal=True), "baseline_ratios": {"full": 0.6}}
        found = judged(one, {"name": "tiny", "baseline": "full", "rate_share": 0.9})
        self.assertAlmostEqual(found.target_us, 10.0 * 45 / 81 / 0.9)
        self.assertIn("of the FLOP/s of full, wanted 0.9", found.limits[0].measured)

    def test_the_strictest_of_several(self):
        found = judged(row(7.0, {"cudnn": 10.0}), {"name": "tiny", "peer": "best", "speedup": 1.0},
                       {"name": "tiny", "us": 6.0})
        self.assertEqual(found.target_us, 6.0)

    def test_only_selected_rows(self):
        target = {"name": "tiny", "batch": 4, "us": 1.0}
        self.assertEqual(judged(row(), target).verdict, "")
        self.assertEqual(judged(row(batch=4), target).verdict, "short")
        target = {"name": "tiny", "dtype": "f16", "us": 1.0}
        self.assertEqual(judged(row(dtype="f32"), target).verdict, "")
        self.assertEqual(judged(row(dtype="f16"), target).verdict, "short")

    def test_targets_are_for_one_gpu_and_for_cpus(self):
        path = ROOT / "bench" / "targets.json"
        self.assertIsNone(targets.load(path, "NVIDIA L4"))
        for measured in ("NVIDIA H200", ""):
            self.assertIn("targets", targets.load(path, measured))

    def test_a_peer_counts_if_it_was_timed(self):
        target = {"name": "tiny", "peer": "best", "time_share": 1.0}
        self.assertAlmostEqual(judged(row(6.1, {"cudnn": 8.0, "fa3": 6.0}), target).target_us, 6.0)
        self.assertAlmostEqual(judged(row(6.1, {"cudnn": 8.0}), target).target_us, 8.0)

    def test_without_peers_nothing_is_claimed(self):
        found = judged(row(), {"name": "tiny", "peer": "fa2", "time_share": 1.0})
        self.assertEqual(found.verdict, "not judged: no time of fa2")
        found = judged(row(), {"name": "tiny", "peer": "best", "time_share": 1.0})
        self.assertEqual(found.verdict, "not judged: no time of any peer")


class Failures(unittest.TestCase):
    def setUp(self):
        target = {"name": "tiny", "us": 10.0}
        self.rows = [judged(row(us), target) for us in (9.0, 10.4, 10.6)]

    def test_the_tolerance(self):
        self.assertEqual([one.row["us"] for one in targets.failures(self.rows, set())], [10.6])

    def test_a_bar_has_no_tolerance(self):
        bar = {"name": "tiny", "us": 10.0, "bar": True, "goal": 9.0}
        rows = [judged(row(us), bar, {"name": "tiny", "us": 9.9}) for us in (9.9, 10.0, 10.1)]
        self.assertEqual([one.row["us"] for one in targets.failures(rows, set())], [10.1])
        self.assertEqual(rows[2].failure(), "tiny 1,2/1,5x9,8 f32 at 0.98: 10.1 us, wanted 10")
        lines = targets.bars(rows)
        self.assertEqual(lines[3], "| tiny 1,2/1,5x9,8 f32 | 9.9 us, wanted 10 | 9.0 | pass |")
        self.assertIn("| MISSED |", lines[5])
        self.assertEqual(targets.bars(self.rows), [])

    def test_a_bar_that_is_not_judged_is_listed(self):
        one = judged(row(), {"name": "tiny", "us": 20.0},
                     {"name": "tiny", "peer": "fa3_det", "speedup": 1.1, "bar": True})
        self.assertEqual(one.verdict, "pass")
        self.assertIn("not judged: no time of fa3_det", targets.bars([one])[3])
        self.assertEqual(list(targets.summary_of([one])["targets"]["not judged"].values()), ["no time of fa3_det"])

    def test_reasons_in_the_documents(self):
        self.assertEqual(targets.failures(self.rows, {"tiny"}), [])
        self.assertEqual(targets.failures(self.rows, {"tiny 1,2/1,5x9,8 f32"}), [])
        self.assertEqual(len(targets.failures(self.rows, {"tin", "tiny 1"})), 1)

    def test_the_table_of_the_documents(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "performance.md"
            self.assertEqual(targets.explained(path), set())
            path.write_text("# P\n\n| case | x |\n|-|-|\n| other | 1 |\n\n## Open gaps\n\n"
                            "Words.\n\n| case | reason |\n|-|-|\n| `long` | one |\n"
                            "| prefill 1,8,64,64 bf16 | two |\n\n## Next\n\n| a | b |\n|-|-|\n| c | d |\n",
                            encoding="utf-8")
            self.assertEqual(targets.explained(path), {"long", "prefill 1,8,64,64 bf16"})
            path.write_text("# P\n", encoding="utf-8")
            self.assertEqual(targets.explained(path), set())

    def test_the_printed_table(self):
        one = row(8.0, {"fa2": 12.0, "cudnn": 10.0})
        lines = targets.table(targets.judge([one, row(name="free")], content(
            {"name": "tiny", "peer": "best", "speedup": 1.0}))).splitlines()
        self.assertEqual(len(lines), 3)  # a row without a target is omitted
        self.assertEqual(lines[2], "| tiny 1,2/1,5x9,8 f32 | 8 |  | 12 | 10 | cudnn 10 | 10 | 1.25 | pass |")


class Again(unittest.TestCase):
    def test_a_file_is_judged_by_new_targets(self):
        """Measured values do not change. Removed targets disappear, also from the stage."""
        rows = [{**row(8.0, {"cudnn": 10.0}), "target": {"target_us": 1.0, "ratio": 0.125}},
                {**row(5.0, name="free"), "target": {"target_us": 1.0, "ratio": 0.2}}]
        given = {"gpu": "X", "rows": rows, "stages": {"bench": {"status": "passed", "seconds": 1.0, "details": {
            "rows": 2, "targets": {"passed": 0, "short": {"x": 0.1}, "not judged": {}}}}}}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.json"
            results.write(path, given)
            targets.judge_again(path, content({"name": "tiny", "peer": "best", "speedup": 1.0}))
            found = results.read(path)
        self.assertEqual(found["rows"][0], {**rows[0], "target": {"target_us": 10.0, "ratio": 1.25}})
        self.assertNotIn("target", found["rows"][1])
        self.assertEqual(found["stages"]["bench"]["details"],
                         {"rows": 2, "targets": {"passed": 1, "short": {}, "not judged": {}}})


class TheFile(unittest.TestCase):
    def setUp(self):
        self.targets = targets.load(ROOT / "bench" / "targets.json", "NVIDIA H200")
        self.cases = cases.load(ROOT / "bench" / "cases.json")

    def test_targets_match_cases(self):
        self.assertEqual(targets.mistakes(self.targets, self.cases), [])

    def test_mistakes_are_found(self):
        broken = content({"name": "nobody", "us": 1.0}, {"name": "prefill-b1-s512"},
                         {"name": "prefill-b1-s512", "us": 1.0, "tflops": 2.0},
                         {"name": "prefill-b1-s512", "speedup": 2.0},
                         {"name": "softcap", "baseline": "full", "time_share": 2.0},
                         {"name": "softcap", "baseline": "plain", "peer": "fa2", "time_share": 2.0})
        self.assertEqual(len(targets.mistakes(broken, self.cases)), 6)

    def test_no_target_is_a_peers_time_of_another_run(self):
        self.assertEqual(set(self.targets), {"gpu", "host_us_above_launch", "targets"})
        for target in self.targets["targets"]:
            if target["name"] in ("prefill", "gqa-prefill", "long", "fp8"):
                self.assertNotIn("us", target)

    def test_the_committed_rows_have_these_targets(self):
        """`python3 scripts/gpu/gpu_check_targets.py bench/results/*.json` after targets have changed."""
        for path in sorted((ROOT / "bench" / "results").glob("*.json")):
            with tempfile.TemporaryDirectory() as folder:
                result = results.read(path)
                wanted = targets.load(ROOT / "bench" / "targets.json", result["gpu"])
                if wanted is None:
                    continue
                copy = Path(folder) / path.name
                shutil.copy(path, copy)
                targets.judge_again(copy, wanted)
                self.assertEqual(results.read(copy), result)

    def test_every_row_that_needs_a_target_has_one(self):
        for name in ("prefill", "prefill-b1-h1", "prefill-b1-s512", "small", "decode", "decode-mha", "spec",
                     "ragged", "paged"):
            for one in (one for one in self.cases if one.name == name):
                found = [target for target in self.targets["targets"] if targets.matches(target, one.fields())]
                self.assertTrue(found, one)
        self.assertEqual(len([one for one in self.cases if one.name == "prefill"]), 24)

    def test_other_gpus_have_no_targets(self):
        self.assertIsNone(targets.load(ROOT / "bench" / "targets.json", "NVIDIA L4"))

    def test_ragged_and_uniform_read_the_same_bytes(self):
        ragged = next(one for one in self.cases if one.name == "ragged")
        uniform = next(one for one in self.cases if one.name == "ragged-uniform")
        self.assertEqual(ragged.kv_bytes(), uniform.kv_bytes())
        self.assertGreater(ragged.kv_bytes(), 1e9)
        self.assertTrue(all(128 <= length <= 32768 for length in ragged.used_k))


if __name__ == "__main__":
    unittest.main()
