"""scripts/checks/stale_rows lists rows of other sources, and only those."""
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


class StaleRows(unittest.TestCase):
    def list(self, text):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "gpu.json")
            with open(path, "w", encoding="utf-8") as out:
                out.write(text)
            done = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True)
        return done.returncode, done.stdout

    def test_current_rows_are_not_listed(self):
        code, said = self.list(json.dumps({"rows": [
            row("a", "fwd_simt_f16_d64_q64", HASHES["simt"]),
            row("b", "fwd_neon_f32", HASHES["cpu"]),
            row("c", "fwd_avx512_f32", HASHES["cpu"])]}))
        self.assertEqual(code, 0, said)
        self.assertIn("0 of 3 rows are stale", said)

    def test_stale_rows_are_listed_and_do_not_fail(self):
        code, said = self.list(json.dumps({"rows": [
            row("fresh", "fwd_simt_f16_d64_q64", HASHES["simt"]),
            row("old", "fwd_simt_f32_d64_q64", "0123456789abcdef"),
            row("gone", "fwd_wmma_f16_d64", HASHES["simt"]),
            row("unmarked", "fwd_neon_f32", None)]}))
        self.assertEqual(code, 0, said)
        self.assertIn("3 of 4 rows are stale", said)
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


if __name__ == "__main__":
    unittest.main()
