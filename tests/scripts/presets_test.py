"""Every preset without CUDA can be configured, with its tests. Nothing is built."""
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
SCRIPT = ". scripts/lib/common.sh; configure \"$1\" -B \"$2\" -DFLASHCORE_BUILD_TESTS=ON"


def cpu_presets():
    listed = json.loads((TREE / "CMakePresets.json").read_text(encoding="utf-8"))["configurePresets"]
    by_name = {one["name"]: one for one in listed}

    def cuda(preset):
        value = preset.get("cacheVariables", {}).get("FLASHCORE_CUDA")
        return value or (cuda(by_name[preset["inherits"]]) if "inherits" in preset else "AUTO")

    return [one["name"] for one in listed if not one.get("hidden") and cuda(one) == "OFF"]


class Presets(unittest.TestCase):
    def test_each_can_be_configured(self):
        self.assertLessEqual({"cpu", "asan", "tsan"}, set(cpu_presets()))
        for name in cpu_presets():
            with self.subTest(preset=name), tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(["bash", "-c", SCRIPT, "bash", name, folder], cwd=TREE,
                                      capture_output=True, text=True,
                                      env={**os.environ, "LOGS": folder}, check=False)
                self.assertEqual(done.returncode, 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
                self.assertTrue((Path(folder) / "build.ninja").is_file())


if __name__ == "__main__":
    unittest.main(verbosity=2)
