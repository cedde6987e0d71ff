"""Headers of calls captured in CUDA graphs: which calls share a header, and when a header becomes free.
The tests set the flags that CUDA sets; test_torch_graphs.py has real graphs."""

import ctypes
import threading
import unittest
import weakref

import torch_support  # noqa: F401 (skips without torch)

from flashcore._core import abi
from flashcore._torch.graph_headers import HEADERS_AT_ONCE, GraphHeaders

_FIRST = 1 << 20


class Headers(unittest.TestCase):
    def setUp(self):
        self.headers = GraphHeaders()
        self.headers.add(_FIRST, None)
        self.flags = {}  # header -> flag that CUDA sets

    def take(self, capture, stream=1):
        seen = []
        header = self.headers.take(capture, stream, seen.append)
        self.assertLessEqual(len(seen), 1)
        for flag in seen:
            self.assertEqual(flag.value, 0)
            self.flags[header] = flag
        return header

    def end(self, header):
        """Sets the flag by its address, as the library's note_end() does."""
        ctypes.c_int32.from_address(ctypes.addressof(self.flags[header])).value = 1

    def test_calls_that_share_a_header(self):
        first = self.take(5)
        self.assertEqual(self.take(5), first)
        self.assertEqual(len(self.flags), 1)  # watch() is called once
        others = {self.take(5, stream=2), self.take(6), self.take(6, stream=2), self.take(6, None)}
        self.assertEqual(len(others | {first}), 5)
        self.assertEqual(self.take(5), first)

    def test_addresses(self):
        taken = {self.take(i) for i in range(HEADERS_AT_ONCE)}
        self.assertEqual(taken, {_FIRST + i * abi.WORKSPACE_HEADER_BYTES
                                 for i in range(HEADERS_AT_ONCE)})

    def test_no_free_header(self):
        taken = [self.take(i) for i in range(HEADERS_AT_ONCE)]
        self.assertIsNone(self.take(1000))
        self.assertEqual(self.take(3), taken[3])  # this capture already has one
        second = 1 << 30
        self.headers.add(second, None)
        self.assertGreaterEqual(self.take(1000), second)

    def test_headers_of_destroyed_graphs_are_reused(self):
        taken = [self.take(i) for i in range(HEADERS_AT_ONCE)]
        self.end(taken[7])
        self.assertEqual(self.take(1000), taken[7])
        self.assertEqual(self.flags[taken[7]].value, 0)  # it is watched again
        self.assertIsNone(self.take(1001))
        self.assertIsNone(self.take(7))  # a capture that has ended has no header
        self.end(taken[7])
        self.assertEqual(self.take(1001), taken[7])

    def test_are_few(self):
        self.assertTrue(GraphHeaders().are_few())
        self.assertFalse(self.headers.are_few())
        for i in range(HEADERS_AT_ONCE // 2):
            self.assertFalse(self.headers.are_few())
            self.take(i)
        last = self.take(1000)
        self.assertTrue(self.headers.are_few())
        self.end(last)
        self.assertFalse(self.headers.are_few())

    def test_a_graph_that_cannot_be_watched(self):
        def refuse(flag):
            raise RuntimeError("no")

        with self.assertRaisesRegex(RuntimeError, "no"):
            self.headers.take(1, 1, refuse)
        self.assertEqual(len({self.take(i) for i in range(HEADERS_AT_ONCE)}), HEADERS_AT_ONCE)

    def test_memory_is_kept(self):
        class Memory:
            pass

        memory, gone = Memory(), []
        weakref.finalize(memory, gone.append, True)
        self.headers.add(1 << 30, memory)
        del memory
        self.assertEqual(gone, [])

    def test_flags_outlive_everything(self):
        """CUDA may write a flag when the program ends."""
        flag = ctypes.addressof(self.headers._ended[_FIRST])
        self.take(1)
        del self.headers
        self.flags.clear()
        scratch = [(ctypes.c_int32 * HEADERS_AT_ONCE)(*[3] * HEADERS_AT_ONCE) for _ in range(100)]
        self.assertEqual(ctypes.c_int32.from_address(flag).value, 0)  # its memory is not reused
        del scratch

    def test_threads(self):
        """Concurrent captures get different headers."""
        taken, start = [], threading.Barrier(8)

        def ask(thread):
            start.wait()
            for i in range(8):
                taken.append(self.headers.take(8 * thread + i, 1, lambda flag: None))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        self.assertEqual(len(set(taken)), 64)
        self.assertNotIn(None, taken)


if __name__ == "__main__":
    unittest.main()
