"""flashcore quantize on files and on random data."""

import unittest

from flashcore_command import CommandTest, write_npy


class Quantize(CommandTest):
    def test_every_type_and_granularity(self):
        for dtype in ("e4m3", "e5m2", "int8", "byte"):
            for per in ("tensor", "head", "block"):
                found = self.call_json("quantize", "--shape", "2,3,50,24", "--from-dtype", "bf16",
                                       "--dtype", dtype, "--per", per, "--block-rows", 16,
                                       "--device", "cpu", "--samples", 0)
                self.assertTrue(found["passed"])
                self.assertEqual((found["not_nearest"], found["saturated"]), (0, 0))
                self.assertTrue(0.001 < found["relative_error"] < 0.1, found)

    def test_rotation(self):
        columns = [1.0] * 63 + [100.0]
        write_npy(self.path("x"), "<f4", (1, 2, 4, 64), columns * 8)
        errors = []
        for rotate in ([], ["--rotate"]):
            found = self.call_json("quantize", "--in", self.path("x"), "--dtype", "int8", "--device",
                                   "cpu", "--samples", 0, *rotate)
            self.assertTrue(found["passed"])
            self.assertEqual(found["rotate"], bool(rotate))
            errors.append(found["relative_error"])
        self.assertLess(errors[1], 0.5 * errors[0])
        for dtype in ("e4m3", "e5m2", "int8", "byte"):
            for shape in ("2,3,50,24", "1,2,300,128", "1,1,3,576"):
                found = self.call_json("quantize", "--shape", shape, "--dtype", dtype, "--per",
                                       "block", "--rotate", "--device", "cpu", "--samples", 0)
                self.assertEqual((found["passed"], found["not_nearest"]), (True, 0))
                self.assertTrue(0.001 < found["relative_error"] < 0.1, found)

    def test_threads_do_not_change_the_result(self):
        found = [self.call_json("quantize", "--shape", "1,3,500,32", "--device", "cpu", "--samples",
                                0, "--threads", threads)["relative_error"] for threads in (1, 2, 3)]
        self.assertEqual(found, found[:1] * 3)

    def test_files(self):
        write_npy(self.path("x"), "<f4", (2, 1, 3, 2), [0, 1, -2, 0.5, 4, -127] * 2)
        self.call("quantize", "--in", self.path("x"), "--dtype", "int8", "--device", "cpu",
                  "--out", self.path("codes"), "--scale-out", self.path("scale"), "--samples", 0)
        with open(self.path("codes"), "rb") as file:
            content = file.read()
        self.assertIn(b"'|i1'", content)
        # Ties go to even: 0.5 becomes 0.
        self.assertEqual(list(content[-12:]), [0, 1, 254, 0, 4, 129] * 2)
        with open(self.path("scale"), "rb") as file:
            self.assertEqual(file.read()[-8:], b"\x00\x00\x80\x3f" * 2)  # 1.0, twice

    def test_times(self):
        found = self.call_json("quantize", "--shape", "1,1,64,64", "--device", "cpu", "--samples", 2)
        self.assertEqual([one["what"] for one in found["times"]],
                         ["quantize, scales computed", "quantize, scales given", "dequantize"])
        self.assertTrue(all(one["gbs"] > 0 for one in found["times"]))

    def test_refusals(self):
        self.refuse("quantize", about="--in FILE")
        self.refuse("quantize", "--shape", "1,1,4,4", "--dtype", "f16", about="--dtype")
        write_npy(self.path("nan"), "<f4", (1, 1, 1, 2), [1, float("nan")])
        self.refuse("quantize", "--in", self.path("nan"), "--dtype", "byte", "--device", "cpu",
                    about="from[0, 0, 0, 1] is NaN")
        self.refuse("quantize", "--in", self.path("nan"), "--dtype", "byte", "--rotate", "--device",
                    "cpu", about="from[0, 0, 0, 1] is nan: it has no rotation")
        write_npy(self.path("wide"), "<f8", (1, 1, 1, 2), [1, 2])
        self.refuse("quantize", "--in", self.path("wide"), "--device", "cpu", about="f64")


if __name__ == "__main__":
    unittest.main()
