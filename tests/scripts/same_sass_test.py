"""Tests scripts/checks/same_sass: entry points and instructions are compared, names of called functions
are not. A script that prints a dump replaces cuobjdump, so the test needs no CUDA."""
import json
import os
import subprocess
import tempfile
import unittest

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SCRIPT = os.path.join(TREE, "scripts", "checks", "same_sass")
NAME = "_ZN9flashcore4cuda4sm9010fwd_kernelINS1_6ConfigI6__halfLi64EEEEEvv"
OTHER_ENTRY = "_ZN9flashcore4cuda4sm9018fwd_kernel_generalINS1_6ConfigI6__halfLi64EEEEEvv"
OTHER_SHAPE = "_ZN9flashcore4cuda4sm9010fwd_kernelINS1_6ConfigI6__halfLi128EEEEEvv"


def dump(name, instruction="MOV R1, R2 ;", called="old_name", architecture="90"):
    return (f"\t\tFunction : {name}\n\t.headerflags\t@\"EF_CUDA_SM{architecture} X\"\n"
            f"        /*0000*/   {instruction}   /* 0x01 */\n"
            f"        /*0010*/   CALL.REL `({called}) ;   /* 0x02 */\n")


class SameSass(unittest.TestCase):
    def compare(self, old, new):
        """(exit code, the JSON lists) for two dumps."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("old", old), ("new", new)):
                with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                    file.write(text)
            tool = os.path.join(folder, "cuobjdump")
            with open(tool, "w", encoding="utf-8") as file:
                file.write('#!/bin/sh\ncat "$2"\n')
            os.chmod(tool, 0o755)
            lists = os.path.join(folder, "lists.json")
            done = subprocess.run(
                [SCRIPT, os.path.join(folder, "old"), os.path.join(folder, "new"), "--json", lists],
                env={**os.environ, "PATH": folder + os.pathsep + os.environ["PATH"]},
                capture_output=True, text=True)
            self.assertIn(done.returncode, (0, 1), done.stderr)
            with open(lists, encoding="utf-8") as file:
                return done.returncode, json.load(file)

    def test_names_of_called_functions_are_ignored(self):
        code, lists = self.compare(dump(NAME), dump(NAME, called="new_name"))
        self.assertEqual((code, lists["same"], lists["changed"]),
                         (0, ["sm90/sm90/fwd_kernel/__half,64"], []))

    def test_a_changed_instruction_is_reported(self):
        code, lists = self.compare(dump(NAME), dump(NAME, "MOV R1, R3 ;"))
        self.assertEqual((code, lists["same"], len(lists["changed"])), (1, [], 1))

    def test_each_entry_point_is_compared(self):
        changed = dump(NAME, "MOV R1, R3 ;")
        for old, new in ((dump(NAME) + dump(OTHER_ENTRY), changed + dump(OTHER_ENTRY)),
                         (dump(OTHER_ENTRY) + dump(NAME), dump(OTHER_ENTRY) + changed)):
            code, lists = self.compare(old, new)
            self.assertEqual((code, lists["same"], lists["changed"]),
                             (1, ["sm90/sm90/fwd_kernel_general/__half,64"],
                              ["sm90/sm90/fwd_kernel/__half,64"]))

    def test_another_shape_or_architecture_is_another_kernel(self):
        for new in (dump(OTHER_SHAPE), dump(NAME, architecture="80")):
            code, lists = self.compare(dump(NAME), new)
            self.assertEqual((code, len(lists["missing"]), len(lists["new"])), (1, 1, 1))


if __name__ == "__main__":
    unittest.main()
