"""Tests scripts/checks/faults: its tables name existing faults, features and families."""
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import unittest
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
COMMAND = TREE / "build" / "cpu" / "bin" / "flashcore"


def load():
    loader = importlib.machinery.SourceFileLoader("faults", str(TREE / "scripts" / "checks" / "faults"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("faults", loader))
    loader.exec_module(module)
    return module


def kernel(family, *features, op="fwd"):
    return {"family": family, "op": op, "features": list(features)}


class Faults(unittest.TestCase):
    def setUp(self):
        self.script = load()

    def test_every_name_is_a_fault(self):
        known = {name for name, _ in self.script.injected_faults().values()}
        tables = (self.script.STAGES, self.script.NO_STAGE, self.script.HANGS, self.script.PROTOCOL,
                  self.script.BACKWARD, self.script.MODEL_ONLY, self.script.NEEDS, self.script.FAMILIES)
        for table in tables:
            self.assertEqual(set(table) - known, set())

    def test_features_and_families_exist(self):
        if not COMMAND.is_file():
            self.skipTest("the CPU preset is not built")
        kernels = json.loads(subprocess.run([COMMAND, "info", "--kernels", "--json"], check=True, text=True,
                                            stdout=subprocess.PIPE).stdout)["kernels"]
        features = {feature for one in kernels for feature in one["features"]}
        self.assertEqual(set(self.script.NEEDS.values()) - features, set())
        families = {one["family"] for one in kernels}
        self.assertEqual(set().union(*self.script.FAMILIES.values()) - families, set())

    def test_a_fault_needs_a_kernel_that_can_show_it(self):
        can_show = self.script.can_show
        simt, sm90 = kernel("simt", "bias"), kernel("sm90", "sinks")
        e4m3 = kernel("sm90_e4m3", "block scales")
        self.assertTrue(can_show("causal_off_by_one", [sm90], True))
        self.assertTrue(can_show("softcap_after_bias", [sm90, simt], False))
        self.assertFalse(can_show("softcap_after_bias", [sm90], True))
        self.assertFalse(can_show("half_the_codes", [simt, sm90], True))
        self.assertTrue(can_show("half_the_codes", [e4m3], True))
        self.assertFalse(can_show("never_ends", [sm90, e4m3], True))
        self.assertTrue(can_show("never_ends", [simt], True))
        self.assertTrue(can_show("parity_wrong", [e4m3], True))
        self.assertFalse(can_show("turn_skipped", [e4m3], True))
        self.assertFalse(can_show("parity_wrong", [sm90], False))
        self.assertFalse(can_show("counted_wrong", [simt, sm90], True))
        gradients = kernel("sm90", "sinks", op="bwd")
        self.assertTrue(can_show("delta_ignored", [gradients], True))
        self.assertFalse(can_show("delta_ignored", [sm90], True))
        self.assertFalse(can_show("dbias_first_batch", [gradients, simt], True))
        self.assertTrue(can_show("dbias_first_batch", [kernel("sm80", "bias", op="bwd")], True))


if __name__ == "__main__":
    unittest.main()
