"""Tests scripts/checks/stale_rows: it lists rows measured with other sources, and only those. --carry
updates the rows whose machine code is proven to be the same, and only those."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SCRIPT = os.path.join(TREE, "scripts", "checks", "stale_rows")
HASHES = dict(line.split() for line in subprocess.run(
    [os.path.join(TREE, "scripts", "fingerprint"), "--families"], check=True, capture_output=True,
    text=True).stdout.splitlines())


def row(name, kernel, fingerprint):
    return {"name": name, "kernel": kernel, "kernel_fingerprint": fingerprint}


OLD = "0123456789abcdef"
# The names of the entry points of kernels in all architectures of their families, and of the combine
# kernel.
ENTRIES = ("fwd_kernel", "fwd_kernel_general")
SIMT = [f"simt/{sm}/fwd_kernel/64,64,64,1,0,256" for sm in ("sm75", "sm80", "sm90")]
SM80 = [f"sm80/{sm}/{entry}/__half,64,16,128,1,16,128" for sm in ("sm80", "sm90") for entry in ENTRIES]
KV8 = [f"sm80/{sm}/{entry}/void,64,16,256,2,16,256" for sm in ("sm80", "sm90") for entry in ENTRIES]
SM90 = [f"sm90/sm90/{entry}/__nv_bfloat16,64,64,128,4,16,256,false" for entry in ENTRIES]
FP8 = [f"sm90/sm90/{entry}/__nv_bfloat16,64,64,128,4,16,256,true" for entry in ENTRIES]
COMBINE = [f"common/{sm}/combine" for sm in ("sm75", "sm80", "sm90")]
ALL = [*SIMT, *SM80, *KV8, *SM90, *FP8, *COMBINE]
KERNELS = {"simt": "fwd_simt_f32_d64_q64", "sm80": "fwd_sm80_f16_d64_q16_k128",
           "kv8": "fwd_sm80_8bit_bf16_d64_q16", "sm90": "fwd_sm90_bf16_d64_q64",
           "fp8": "fwd_sm90_e4m3_bf16_d64_q64"}


def proof(same=ALL, changed=(), missing=(), old=(OLD,), new=tuple(HASHES.values())):
    return {"same": [name for name in same if name not in {*changed, *missing}],
            "changed": list(changed), "missing": list(missing), "new": [],
            "old_fingerprints": list(old), "new_fingerprints": list(new)}


class StaleRows(unittest.TestCase):
    def list(self, text, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "gpu.json")
            with open(path, "w", encoding="utf-8") as out:
                out.write(text)
            done = subprocess.run([sys.executable, SCRIPT, *arguments, path], capture_output=True, text=True)
            with open(path, encoding="utf-8") as after:
                self.after = after.read()
        self.assertTrue(arguments or self.after == text)
        return done.returncode, done.stdout

    def carry(self, rows, lists):
        """The fingerprints of the rows after --carry, and the output."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(lists, file)
            file.flush()
            code, said = self.list(json.dumps({"rows": rows}, indent=3), "--carry", file.name)
        self.assertEqual(code, 0, said)
        return [row["kernel_fingerprint"] for row in json.loads(self.after)["rows"]], said

    def test_current_rows_are_not_listed(self):
        code, said = self.list(json.dumps({"rows": [
            row("a", "fwd_simt_f16_d64_q64", HASHES["simt"]),
            row("b", "fwd_neon_f32", HASHES["cpu"]),
            row("c", "fwd_avx512_f32", HASHES["cpu"]),
            row("d", "bwd_simt_bf16_d128", HASHES["simt"])]}))
        self.assertEqual(code, 0, said)
        self.assertIn("0 of 4 rows are stale", said)

    def test_stale_rows_are_listed_and_do_not_fail(self):
        code, said = self.list(json.dumps({"rows": [
            row("fresh", "fwd_simt_f16_d64_q64", HASHES["simt"]),
            row("old", "fwd_simt_f32_d64_q64", "0123456789abcdef"),
            row("gone", "fwd_wmma_f16_d64", HASHES["simt"]),
            row("unmarked", "fwd_neon_f32", None), row("back", "bwd_simt_bf16_d128", OLD)]}))
        self.assertEqual(code, 0, said)
        self.assertIn("back: bwd_simt_bf16_d128 was measured at", said)
        self.assertIn("4 of 5 rows are stale", said)
        self.assertIn("old: fwd_simt_f32_d64_q64 was measured at 0123456789abcdef", said)
        self.assertIn("gone: fwd_wmma_f16_d64 is not a kernel of this tree", said)
        self.assertIn("unmarked", said)
        self.assertNotIn("fresh", said)

    def test_a_broken_file_fails(self):
        for text in ("", "[]", "{}", '{"rows": 1}', '{"rows": [1]}'):
            with self.subTest(text=text):
                code, said = self.list(text)
                self.assertEqual(code, 1, said)
                self.assertIn("not a result file", said)

    def test_carries_rows_of_the_same_machine_code(self):
        rows = [row(name, kernel, OLD) for name, kernel in KERNELS.items()]
        after, said = self.carry(rows, proof())
        self.assertEqual(after, [HASHES[name] for name in ("simt", "sm80", "sm80", "sm90", "sm90")], said)
        self.assertIn("0 of 5 rows are stale, 5 carried", said)
        self.assertEqual(self.after, json.dumps({"rows": json.loads(self.after)["rows"]}, indent=3))

    def test_a_changed_kernel_keeps_only_its_own_rows_stale(self):
        rows = [row(name, kernel, OLD) for name, kernel in KERNELS.items()]
        for family, names in (("simt", SIMT), ("sm80", SM80), ("kv8", KV8), ("sm90", SM90), ("fp8", FP8)):
            for kind in ("changed", "missing"):
                with self.subTest(family=family, kind=kind):  # its last entry point
                    after, said = self.carry(rows, proof(**{kind: names[-1:]}))
                    for name, fingerprint in zip(KERNELS, after, strict=True):
                        self.assertEqual(fingerprint == OLD, name == family, said)
                    self.assertIn(f"not carried: {names[-1]} is {kind}", said)
                    self.assertIn("1 of 5 rows are stale, 4 carried", said)

    def test_splits_need_the_combine_kernel(self):
        rows = [dict(row("one", KERNELS["sm80"], OLD), splits=1),
                dict(row("four", KERNELS["sm80"], OLD), splits=4)]
        after, _ = self.carry(rows, proof())
        self.assertEqual(after, [HASHES["sm80"]] * 2)
        after, said = self.carry(rows, proof(changed=["common/sm90/combine"]))
        self.assertEqual(after, [HASHES["sm80"], OLD])
        self.assertIn("four: ", said)
        self.assertIn("common/sm90/combine is changed", said)

    def test_an_incomplete_proof_carries_nothing(self):
        rows = [row("a", KERNELS["sm80"], OLD)]
        for lists, reason in ((proof(same=SM80[2:]), "found no kernel sm80/sm80/"),
                              (proof(same=KV8), "found no kernel"), (proof(same=[]), "found no kernel"),
                              (proof(old=[]), "OLD was not built from the sources of this row"),
                              (proof(new=[OLD]), "NEW was not built from this tree")):
            with self.subTest(reason=reason):
                after, said = self.carry(rows, lists)
                self.assertEqual(after, [OLD])
                self.assertIn(reason, said)

    def test_gradients_are_not_carried_on_the_proof_of_a_forward_kernel(self):
        """bwd_simt_f32_d128 and fwd_simt_f32_d128_q64 have the same numbers."""
        same = [*ALL, *(f"simt/{sm}/{entry}/128,64,64,1,0,256" for sm in ("sm75", "sm80", "sm90")
                         for entry in ("fwd_kernel", "bwd_kernel"))]
        rows = [row("back", "bwd_simt_f32_d128", OLD), row("forth", "fwd_simt_f32_d128_q64", OLD)]
        after, said = self.carry(rows, proof(same=same))
        self.assertEqual(after, [OLD, HASHES["simt"]], said)
        self.assertIn("gradients take several kernels", said)

    def test_rows_without_sass_are_not_carried(self):
        rows = [row("cpu", "fwd_avx2_f32", OLD), row("gone", "fwd_wmma_f16_d64", OLD),
                row("unmarked", KERNELS["simt"], None)]
        after, said = self.carry(rows, proof())
        self.assertEqual(after, [OLD, OLD, None])
        self.assertIn("3 of 3 rows are stale, 0 carried", said)
        self.assertIn("a CPU kernel has no SASS", said)

    def test_a_broken_proof_fails(self):
        for text in ("", "[]", "{}", '{"same": []}'):
            with self.subTest(text=text), tempfile.NamedTemporaryFile("w") as file:
                file.write(text)
                file.flush()
                rows = json.dumps({"rows": [row("a", KERNELS["sm80"], OLD)]})
                code, said = self.list(rows, "--carry", file.name)
                self.assertEqual(code, 1, said)
                self.assertIn("not written by same_sass", said)
                self.assertEqual(self.after, rows)


if __name__ == "__main__":
    unittest.main()
