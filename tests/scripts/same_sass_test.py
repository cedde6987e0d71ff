"""Tests scripts/checks/same_sass: names are ignored, instructions are compared. A script that prints a
dump replaces cuobjdump, so the test needs no CUDA."""
import json
import os
import subprocess
import tempfile
import unittest

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SCRIPT = os.path.join(TREE, "scripts", "checks", "same_sass")
OLD_NAME = "_ZN9flashcore4cuda4sm909attentionINS1_6ConfigI6__halfLi64EEEEEvv"
NEW_NAME = "_ZN9flashcore4cuda4sm9010fwd_kernelINS1_6ConfigI6__halfLi64EEEEEvv"
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

    def test_names_are_ignored(self):
        code, lists = self.compare(dump(OLD_NAME), dump(NEW_NAME, called="new_name"))
        self.assertEqual((code, len(lists["same"]), lists["changed"]), (0, 1, []))

    def test_a_changed_instruction_is_reported(self):
        code, lists = self.compare(dump(OLD_NAME), dump(NEW_NAME, "MOV R1, R3 ;"))
        self.assertEqual((code, lists["same"], len(lists["changed"])), (1, [], 1))

    def test_another_shape_or_architecture_is_another_kernel(self):
        for new in (dump(OTHER_SHAPE), dump(NEW_NAME, architecture="80")):
            code, lists = self.compare(dump(OLD_NAME), new)
            self.assertEqual((code, len(lists["missing"]), len(lists["new"])), (1, 1, 1))


if __name__ == "__main__":
    unittest.main()
