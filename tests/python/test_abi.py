"""The ctypes structs have the sizes and offsets of flashcore.h."""

import ctypes
import json
import os
import subprocess
import unittest

from flashcore._core import abi


class Layout(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        done = subprocess.run([os.environ["FLASHCORE_ABI_LAYOUT"]], capture_output=True, text=True,
                              timeout=30, check=True)
        cls.c = json.loads(done.stdout)

    def test_every_struct_and_field(self):
        structs = {name: fields for name, fields in self.c.items() if isinstance(fields, dict)}
        self.assertEqual(set(structs), set(abi.STRUCTS))
        for name, fields in structs.items():
            python = abi.STRUCTS[name]
            with self.subTest(name):
                self.assertEqual(ctypes.sizeof(python), fields.pop("sizeof"))
                self.assertEqual([field for field, _ in python._fields_], list(fields))
                for field, (offset, size) in fields.items():
                    described = getattr(python, field)
                    self.assertEqual((described.offset, described.size), (offset, size), field)

    def test_constants(self):
        for name in ("OK", "INVALID_ARGUMENT", "UNSUPPORTED", "OUT_OF_MEMORY", "CUDA_ERROR",
                     "INTERNAL", "CANCELLED", "CPU", "CUDA", "WORKSPACE_HEADER_BYTES"):
            self.assertEqual(getattr(abi, name), self.c["FLASHCORE_" + name], name)
        for dtype, constant in (("f32", "FLOAT"), ("bf16", "BFLOAT"), ("i32", "INT"),
                                ("bool", "BOOL"), ("int8", "INT"), ("byte", "UINT"),
                                ("e4m3", "FLOAT8_E4M3"), ("e5m2", "FLOAT8_E5M2")):
            self.assertEqual(abi.DTYPES[dtype][0], self.c["FLASHCORE_" + constant], dtype)

    def test_a_tensor_keeps_its_shape_alive(self):
        tensor = abi.tensor(0x1000, (2, 3, 4, 5), "bf16", abi.CUDA, 1, strides=(60, 20, 5, 1))
        scratch = [bytes(1000) for _ in range(100)]  # would reuse freed memory
        self.assertEqual(tensor.shape[:4], [2, 3, 4, 5])
        self.assertEqual(tensor.strides[:4], [60, 20, 5, 1])
        self.assertEqual((tensor.dtype.code, tensor.dtype.bits), (4, 16))
        self.assertEqual((tensor.device.device_type, tensor.device.device_id), (2, 1))
        del scratch


if __name__ == "__main__":
    unittest.main()
