"""flashcore.distributed: shard(), unshard() and position_ids() on gloo processes."""

import unittest

from distributed_support import Ranks

from flashcore.distributed import masks, placement

RANKS = 2


def setUpModule():
    global ranks
    ranks = Ranks(RANKS)


def tearDownModule():
    ranks.close()


class Spans(unittest.TestCase):
    def test_every_row_is_on_one_rank(self):
        for sharding in placement.SHARDINGS:
            for count in (1, 2, 3, 5):
                for length in (0, 1, 4, 2 * count, 23):
                    spans = placement.place(length, count, sharding)
                    self.assertEqual(sorted(row for some in spans for span in some
                                            for row in range(*span)), list(range(length)))
                    sizes = [placement.rows(one) for one in spans]
                    self.assertLessEqual(max(sizes) - min(sizes), 2)

    def test_zigzag_balances_a_causal_mask(self):
        for count in (2, 3, 4):
            spans = placement.place(24 * count, count, "zigzag")
            work = [sum(row + 1 for span in some for row in range(*span)) for some in spans]
            self.assertEqual(len(set(work)), 1)

    def test_contiguous_shards_have_any_lengths(self):
        self.assertEqual(placement.place_lengths([3, 0, 2], "contiguous"), [[(0, 3)], [], [(3, 5)]])
        with self.assertRaisesRegex(ValueError, "rank 0: has 3 rows; zigzag placement of 5 rows on 3 "
                                                "ranks gives it 1"):
            placement.place_lengths([3, 0, 2], "zigzag")

    def test_masks_agree_with_the_definition(self):
        """sees() and keys_of() against every pair of a row and a key."""
        docs = (0, 4, 4, 9, 17)
        doc_of = [max(i for i in range(4) if docs[i] <= row < docs[i + 1]) for row in range(17)]
        for causal in (False, True):
            for window in ((-1, -1), (2, -1), (0, 3), (-1, 1)):
                mask = masks.Mask(docs, docs, causal, window)
                left, right = mask.reach

                def visible(row, key):
                    d = row - key
                    return (doc_of[row] == doc_of[key] and (left < 0 or d <= left)
                            and (right < 0 or -d <= right))

                for q_span in ((0, 3), (3, 8), (5, 17), (9, 10)):
                    keys = [key for key in range(17) if any(visible(row, key) for row in range(*q_span))]
                    self.assertEqual(mask.keys_of(q_span, True), (min(keys), max(keys) + 1))
                    for k_span in ((0, 2), (2, 6), (8, 9), (10, 17)):
                        want = any(key in keys for key in range(*k_span))
                        self.assertEqual(mask.sees(q_span, k_span), want, (causal, window, q_span, k_span))


class Shard(unittest.TestCase):
    def test_unshard_inverts_shard(self):
        for sharding in placement.SHARDINGS:
            for length in (0, 1, 8, 13):
                found = ranks.results("placement", length, sharding, None)
                self.assertEqual([one[0] for one in found], [True] * RANKS)
                self.assertEqual(sorted(row for one in found for row in one[1]), list(range(length)))
                self.assertEqual([one[1] for one in found], [one[2] for one in found])
                self.assertEqual([one[1] for one in found],
                                 [[row for span in some for row in range(*span)]
                                  for some in placement.place(length, RANKS, sharding)])

    def test_positions_start_again_in_each_document(self):
        found = ranks.results("placement", 8, "contiguous", [0, 3, 3, 8])
        self.assertEqual([row for one in found for row in one[1]], [0, 1, 2, 0, 1, 2, 3, 4])
        wrong = ranks.call("placement", 8, "contiguous", [0, 3, 9])
        self.assertIn("cu_seqlens: wanted the first row of each document", str(wrong[0]))

    def test_uneven_and_empty_shards(self):
        for lengths in ((5, 0), (0, 3), (1, 6)):
            self.assertEqual(ranks.results("uneven", lengths), [True] * RANKS)

    def test_ranks_that_disagree(self):
        found = ranks.call("wrong_unshard", 1)
        self.assertIsInstance(found[0], ValueError)
        self.assertEqual(str(found[0]), "rank 1: x has 5 entries in dimension 1, rank 0 has 4; all ranks "
                                        "must pass the same")
        self.assertEqual(str(found[0]), str(found[1]))


if __name__ == "__main__":
    unittest.main()
