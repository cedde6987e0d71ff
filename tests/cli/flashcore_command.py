"""Runs the program, for all tests of the command line."""

import json
import os
import struct
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["FLASHCORE_CLI"]
SOURCE = os.environ["FLASHCORE_SOURCE"]
# Sanitizers are slow: the same tests run with fewer problems.
SANITIZED = bool(os.environ.get("FLASHCORE_SANITIZE"))

OK, FAILED, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130


class CommandTest(unittest.TestCase):
    """Each test runs in an empty folder, without bench/cases.json."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def call(self, *arguments, code=OK, cwd=None, env=None):
        """Returns the finished process; its exit code must be `code`."""
        done = subprocess.run(
            [PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300,
            cwd=cwd or self.folder, env={**os.environ, **(env or {})})
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done

    def call_json(self, *arguments, code=OK, **keywords):
        """Returns the output of --json, which must be one JSON value and nothing else."""
        return json.loads(self.call(*arguments, "--json", code=code, **keywords).stdout)

    def refuse(self, *arguments, about=""):
        """Returns the one-line error of a call that must be rejected."""
        done = self.call(*arguments, code=COULD_NOT_RUN)
        self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, r"\Aflashcore: [^\n]+\n\Z")
        self.assertIn(about, done.stderr)
        return done.stderr


def write_npy(path, descr, shape, values, fortran=False):
    """Writes a .npy file from a flat list, independently of the program's own writer."""
    code = {"<f4": "f", "<f8": "d", "<f2": "e", "<i4": "i", "|b1": "?", "<u2": "H", "<i8": "q"}
    data = struct.pack(f"<{len(values)}{code[descr]}", *values)
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {tuple(shape)!r}, }}"
    text += " " * (63 - (10 + len(text)) % 64) + "\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data)


def read_npy(path):
    """Returns (descr, shape, flat list) of a file that the program wrote."""
    with open(path, "rb") as file:
        content = file.read()
    assert content[:8] == b"\x93NUMPY\x01\x00"
    (length,) = struct.unpack("<H", content[8:10])
    header = eval(content[10:10 + length], {"__builtins__": {}})
    assert not header["fortran_order"]
    code = {"<f4": "f", "<f8": "d", "<f2": "e", "<V2": "H"}[header["descr"]]
    data = content[10 + length:]
    values = list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))
    return header["descr"], header["shape"], values
