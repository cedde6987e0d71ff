"""Progress bar and colours: on a terminal only."""

import os
import pty
import subprocess
import threading
import unittest

from flashcore_command import PROGRAM, CommandTest


def run_on_a_terminal(arguments, **environment):
    """Returns the exit code and the whole output of the program on a terminal."""
    controller, terminal = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen([PROGRAM, *arguments], stdin=terminal, stdout=terminal, stderr=terminal,
                               env={**env, "TERM": "xterm", **environment})
    os.close(terminal)
    chunks = []

    def read():
        while True:
            try:
                chunk = os.read(controller, 4096)
            except OSError:  # the other end is closed
                return
            if not chunk:
                return
            chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait(timeout=120)
    reader.join(timeout=10)
    os.close(controller)
    return code, b"".join(chunks).decode()


class Terminal(CommandTest):
    CHECK = ["check", "--device", "cpu", "--problems", "1000000", "--time-limit", "1.5"]

    def test_progress_bar(self):
        code, text = run_on_a_terminal(self.CHECK)
        self.assertEqual(code, 0)
        self.assertRegex(text, r"\r\x1b\[K\[[#.]{30}\] \d+/1000000 random problems")

    def test_quiet(self):
        _, text = run_on_a_terminal([*self.CHECK, "--quiet"])
        self.assertNotIn("[.", text)

    def test_colours(self):
        _, text = run_on_a_terminal(["check", "--device", "cpu", "--problems", "8"])
        self.assertIn("\x1b[32mpassed", text)

    def test_no_colours_on_request(self):
        arguments = ["check", "--device", "cpu", "--problems", "8", "--quiet"]
        for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            self.assertNotIn("\x1b[", run_on_a_terminal(arguments, **environment)[1])

    def test_no_colours_in_a_pipe(self):
        done = self.call("check", "--device", "cpu", "--problems", "8")
        self.assertNotIn("\x1b", done.stdout + done.stderr)
        self.assertNotIn("\r", done.stdout + done.stderr)

    def test_full_disk_is_an_error(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("cannot write to standard output", done.stderr)


if __name__ == "__main__":
    unittest.main()
