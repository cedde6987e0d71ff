"""Calling the real program, for all tests of the command line."""

import json
import os
import struct
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["FLASHCORE_CLI"]
SOURCE = os.environ["FLASHCORE_SOURCE"]
# Sanitizers make everything slower: fewer problems, the same tests.
SANITIZED = bool(os.environ.get("FLASHCORE_SANITIZE"))

OK, FAILED, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130


class CommandTest(unittest.TestCase):
    """Runs in a folder of its own, where there is no bench/cases.json."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def call(self, *arguments, code=OK, cwd=None, env=None):
        """The finished process; its exit code must be `code`."""
        done = subprocess.run(
            [PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300,
            cwd=cwd or self.folder, env={**os.environ, **(env or {})})
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done

    def call_json(self, *arguments, code=OK, **keywords):
        """What --json prints, which must be one JSON value and nothing else."""
        return json.loads(self.call(*arguments, "--json", code=code, **keywords).stdout)

    def refuse(self, *arguments, about=""):
        """The one line a call that cannot be done must answer with."""
        done = self.call(*arguments, code=COULD_NOT_RUN)
        self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, r"\Aflashcore: [^\n]+\n\Z")
        self.assertIn(about, done.stderr)
        return done.stderr


def write_npy(path, descr, shape, values, fortran=False):
    """A .npy file from a flat list, written independently of the program's own writer."""
    code = {"<f4": "f", "<f8": "d", "<f2": "e", "<i4": "i", "|b1": "?", "<u2": "H", "<i8": "q"}
    data = struct.pack(f"<{len(values)}{code[descr]}", *values)
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {tuple(shape)!r}, }}"
    text += " " * (63 - (10 + len(text)) % 64) + "\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data)


def read_npy(path):
    """(descr, shape, flat list) of a file the program wrote."""
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
