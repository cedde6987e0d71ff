"""What a person at a terminal sees: a bar, colours, and neither where they would hurt."""

import os
import pty
import subprocess
import threading
import unittest

from flashcore_command import PROGRAM, CommandTest


def at_a_terminal(arguments, **environment):
    """Everything the program shows on a terminal."""
    ours, theirs = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen([PROGRAM, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
                               env={**env, "TERM": "xterm", **environment})
    os.close(theirs)
    pieces = []

    def read():
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                return
            if not piece:
                return
            pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait(timeout=120)
    reader.join(timeout=10)
    os.close(ours)
    return code, b"".join(pieces).decode()


class Terminal(CommandTest):
    CHECK = ["check", "--device", "cpu", "--problems", "1000000", "--time-limit", "1.5"]

    def test_progress_bar(self):
        code, text = at_a_terminal(self.CHECK)
        self.assertEqual(code, 0)
        self.assertRegex(text, r"\r\x1b\[K\[[#.]{30}\] \d+/1000000 random problems")

    def test_quiet(self):
        _, text = at_a_terminal([*self.CHECK, "--quiet"])
        self.assertNotIn("[.", text)

    def test_colours(self):
        self.assertIn("\x1b[32mpassed", at_a_terminal(["check", "--device", "cpu", "--problems",
                                                       "8"])[1])

    def test_no_colours_where_not_wanted(self):
        arguments = ["check", "--device", "cpu", "--problems", "8", "--quiet"]
        for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            self.assertNotIn("\x1b[", at_a_terminal(arguments, **environment)[1])

    def test_plain_in_a_pipe(self):
        done = self.call("check", "--device", "cpu", "--problems", "8")
        self.assertNotIn("\x1b", done.stdout + done.stderr)
        self.assertNotIn("\r", done.stdout + done.stderr)

    def test_a_full_disk_is_an_error(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("standard output cannot be written", done.stderr)


if __name__ == "__main__":
    unittest.main()
