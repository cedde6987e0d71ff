"""A short run of boundary_fuzz.py; FLASHCORE_FUZZ_SECONDS for a longer one, with another seed each time."""

import os
import subprocess
import sys
import time
import unittest

try:
    import numpy  # noqa: F401: its children need it
except ImportError:
    raise unittest.SkipTest("NumPy is not installed")

import boundary_fuzz

SHORT = 10


class Fuzz(unittest.TestCase):
    def test_no_call_breaks_a_promise(self):
        seconds = float(os.environ.get("FLASHCORE_FUZZ_SECONDS", SHORT))
        seed = 1 if seconds <= SHORT else int(time.time())
        done, findings = boundary_fuzz.run(seconds, seed, batch=1000)
        self.assertEqual(findings, [], "\n".join(findings))
        self.assertGreater(done, 100)

    def test_a_read_behind_the_end_is_found(self):
        """The guard pages are there: both before and behind an array."""
        for at_start, index in ((False, "size"), (True, "-1")):
            program = ("import sys, ctypes; sys.path.insert(0, sys.argv[1]); import guarded; "
                       f"one = guarded.empty((3, 5), 'f4', at_start={at_start}); size = one.nbytes; "
                       "one[...] = 1; print('fine', flush=True); "
                       f"ctypes.c_char.from_address(one.ctypes.data + ({index})).value")
            done = subprocess.run([sys.executable, "-c", program, boundary_fuzz.FOLDER],
                                  capture_output=True, text=True)
            self.assertEqual((done.stdout, done.returncode), ("fine\n", -11), done.stderr)


if __name__ == "__main__":
    unittest.main()
