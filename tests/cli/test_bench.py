import copy
import json
import os
import re
import unittest

from flashcore_command import FAILED, SOURCE, CommandTest

FIELDS = ("kind", "name", "dtype", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim",
          "causal", "cold_l2")


def case(name, dtype="f32", q_len=16, causal=False, **others):
    row = dict(suite="tiny", kind="fwd", name=name, dtype=dtype, batch=1, q_heads=2, kv_heads=1,
               q_len=q_len, kv_len=16, head_dim=8, causal=causal, cold_l2=True)
    return {**row, **others}


class BenchTest(CommandTest):
    """Tests with a file of tiny cases."""

    def setUp(self):
        super().setUp()
        self.cases = [case("a"), case("b", "f16", causal=True), case("c", "e4m3"),
                      case("g", "f16/e4m3"), case("d", kind="bwd"), case("e", used_k=[7]),
                      case("f", page_size=8, requires="pages"),
                      case("h", options={"softcap": 2.0, "alibi": True, "bias": True, "mask": "random",
                                         "batch_invariant": True}),
                      case("i", "f16", options={"f32_out": True}),
                      case("j", options={"documents": 2}), case("k", requires="wings")]
        self.file = self.path("cases.json")
        with open(self.file, "w") as file:
            json.dump({"cases": self.cases}, file)

    def bench(self, *arguments, **keywords):
        return self.call_json("bench", "--cases", self.file, "--suite", "tiny", "--device", "cpu",
                              "--quiet", *arguments, **keywords)


class Bench(BenchTest):
    def test_rows(self):
        result = self.bench("--output", self.path("new.json"))
        with open(self.path("new.json")) as file:
            self.assertEqual(json.load(file), result)
        self.assertRegex(result["fingerprint"], r"\A[0-9a-f]{16}\Z")
        self.assertTrue(result["complete"])
        self.assertTrue(result["device"])
        self.assertIn("flashcore", result["versions"])
        self.assertGreater(result["host_us"], 0)
        self.assertEqual([row["name"] for row in result["rows"]], ["a", "b", "c", "g", "f", "h", "i"])
        self.assertEqual(result["rows"][4]["page_size"], 8)
        self.assertEqual(result["rows"][5]["options"]["softcap"], 2.0)
        self.assertLess(result["rows"][6]["error"], 1e-5)  # not rounded to f16
        given_by_name = {given["name"]: given for given in self.cases}
        for row in result["rows"]:
            given = given_by_name[row["name"]]
            for field in FIELDS:
                self.assertEqual(row[field], given[field])
            self.assertEqual(row["peers_us"], {})
            self.assertEqual(len(row["samples"]), 20)
            self.assertGreater(row["us"], 0)
            self.assertLess(0 if row["error"] == 0 else row["error"], 1e-2)
            self.assertGreaterEqual(row["spread"], 0)
            self.assertRegex(row["kernel_fingerprint"], r"\A[0-9a-f]{16}\Z")
        self.assertEqual(result["rows"][0]["us"], sorted(result["rows"][0]["samples"])[9] / 2 +
                         sorted(result["rows"][0]["samples"])[10] / 2)

    def test_skipped_cases_have_reasons(self):
        skipped = {row["name"]: row["reason"] for row in self.bench("--samples", 5)["skipped"]}
        self.assertIn("gradients: timed by", skipped["d"])
        self.assertIn("variable lengths: timed by", skipped["e"])
        self.assertIn("option documents: timed by", skipped["j"])
        self.assertIn("wings: timed by", skipped["k"])

    def test_text(self):
        text = self.call("bench", "--cases", self.file, "--suite", "tiny", "--device", "cpu").stdout
        self.assertRegex(text, r"case +shape +dtype +kernel +us +spread +TFLOP/s +GB/s +roofline")
        self.assertRegex(text, r"a +\(1,2/1,16,8\) +f32 +fwd_\w+_f32 +\S+ +\S+% ")
        self.assertRegex(text, r"c +\(1,2/1,16,8\) +e4m3 +fwd_\w+_f16 ")
        self.assertIn("skipped: gradients: timed by", text)
        self.assertRegex(text, r"host cost of make_plan \+ run: \S+ us per call")

    def test_list(self):
        text = self.call("bench", "--cases", self.file, "--list").stdout
        self.assertEqual(len(text.splitlines()), 1 + len(self.cases), text)
        self.assertRegex(text, r"tiny +h#1 +\(1,2/1,16,8\) +f32")
        self.assertRegex(text, r"d#1 .* gradients: timed by python3")
        text = self.call("bench", "--cases", self.file, "--list", "--case", "b").stdout
        self.assertRegex(text, r"b#1 +\(1,2/1,16,8\) causal +f16")
        self.assertNotIn("a#1", text)

    def test_every_matching_kernel(self):
        result = self.bench("--kernel", "generic", "--case", "a", "--samples", 5, "--splits", 1)
        self.assertEqual([row["kernel"] for row in result["rows"]], ["fwd_generic_f32"])
        result = self.bench("--kernel", "generic_f64", "--case", "a")
        self.assertEqual(result["rows"], [])
        self.assertIn("no matching kernel supports", result["skipped"][0]["reason"])

    def test_time_limit(self):
        result = self.bench("--time-limit", "0.000001")
        self.assertFalse(result["complete"])
        self.assertIn("time limit", result["stopped"])

    def test_refusals(self):
        refuse = lambda *a, about: self.refuse("bench", "--device", "cpu", *a, about=about)
        refuse("--cases", self.path("none.json"), about="No such file")
        refuse("--cases", self.file, "--suite", "nope", about="known: tiny")
        refuse("--cases", self.file, "--case", "nope", about="known: a, b, c, g, d, e, f, h, i, j, k")
        refuse("--compare", self.path("none.json"), about="No such file")
        refuse("--results", self.file, about="--compare")
        for content in ("", "{}", "[1", '{"cases": [{}]}', '{"cases": 7}',
                        json.dumps({"cases": [case("a", q_len=0)]}),
                        json.dumps({"cases": [case("a", q_len="x")]})):
            with open(self.path("bad.json"), "w") as file:
                file.write(content)
            refuse("--cases", self.path("bad.json"), about="bad.json")
            refuse("--compare", self.path("bad.json"), about="bad.json")


class Compare(BenchTest):
    """Faster means a smaller time."""

    def setUp(self):
        super().setUp()
        self.result = self.bench("--samples", 5)
        for row in self.result["rows"]:
            row["spread"] = 0.01
        self.save("now.json", 1)

    def save(self, name, factor):
        changed = copy.deepcopy(self.result)
        for row in changed["rows"]:
            row["us"] *= factor
        with open(self.path(name), "w") as file:
            json.dump(changed, file)
        return self.path(name)

    def verdicts(self, old, *arguments, code=0):
        found = self.call_json("bench", "--compare", old, "--results", self.path("now.json"),
                               *arguments, code=code)
        return {row["verdict"] for row in found["comparison"]["rows"]}

    def test_smaller_time_is_faster(self):
        old = self.save("old.json", 1.5)
        self.assertEqual(self.verdicts(old, "--fail-on-slower"), {"faster"})

    def test_larger_time_is_slower(self):
        old = self.save("old.json", 0.5)
        self.assertEqual(self.verdicts(old), {"slower"})
        self.assertEqual(self.verdicts(old, "--fail-on-slower", code=FAILED), {"slower"})

    def test_same_time_is_noise(self):
        old = self.save("old.json", 1)
        self.assertEqual(self.verdicts(old, "--fail-on-slower"), {"noise"})

    def test_small_change_is_noise(self):
        for factor in (0.98, 1.02):
            self.assertEqual(self.verdicts(self.save("old.json", factor)), {"noise"})

    def test_wide_spread(self):
        """A change far beyond the spread of a busy machine counts, in both directions."""
        for row in self.result["rows"]:
            row["spread"] = 2.0
        self.save("now.json", 1)
        for factor, verdict in ((1000, "faster"), (4, "faster"), (2.9, "noise"), (0.35, "noise"),
                                (0.25, "slower"), (0.001, "slower")):
            self.assertEqual(self.verdicts(self.save("old.json", factor)), {verdict}, factor)

    def test_compare_with_a_new_run(self):
        """The changes exceed any noise of the machine, in both directions."""
        for factor, verdict, code in ((1000, "faster", 0), (0.001, "slower", FAILED)):
            found = self.bench("--case", "a", "--fail-on-slower", "--compare",
                               self.save("old.json", factor), code=code)
            self.assertEqual(found["comparison"]["rows"][0]["verdict"], verdict)
            self.assertEqual(len(found["comparison"]["only_old"]), 6)

    def test_text(self):
        text = self.call("bench", "--compare", self.save("old.json", 2), "--results",
                         self.path("now.json")).stdout
        self.assertIn("7 faster, 0 slower, 0 noise", text)
        self.assertRegex(text, r"-50.0 % +faster")


class CasesFile(CommandTest):
    """Tests of bench/cases.json."""

    def setUp(self):
        super().setUp()
        with open(os.path.join(SOURCE, "bench/cases.json")) as file:
            self.cases = json.load(file)["cases"]

    def test_fields(self):
        for row in self.cases:
            for field in (*FIELDS, "suite"):
                self.assertIn(field, row)

    def test_suites(self):
        count = {}
        for row in self.cases:
            count[row["suite"]] = count.get(row["suite"], 0) + 1
        self.assertEqual(count, {"anchors": 75, "regression": 16, "cpu": 25, "serving": 9,
                                 "simt": 2, "options": 27, "gradients": 9})

    def test_names(self):
        """A name is in one suite, and its shape is the case's."""
        letters = {"b": ("batch",), "h": ("q_heads", "kv_heads"), "s": ("q_len", "kv_len"),
                   "d": ("head_dim",)}
        suites = {}
        for row in self.cases:
            self.assertEqual(suites.setdefault(row["name"], row["suite"]), row["suite"])
            if row["suite"] in ("cpu", "simt", "regression"):
                self.assertTrue(row["name"].startswith(row["suite"] + "-"), row["name"])
            for letter, extent in re.findall(r"-([bhsd])(\d+)\b", row["name"]):
                for field in letters[letter]:
                    self.assertEqual(row[field], int(extent), row)

    def test_built_in_copy(self):
        """Outside the source tree the program has the same cases."""
        inside = self.call_json("explain", "--suite", "simt", "--plan-for", "h200", cwd=SOURCE)
        outside = self.call_json("explain", "--suite", "simt", "--plan-for", "h200")
        self.assertEqual(inside, outside)


if __name__ == "__main__":
    unittest.main()
