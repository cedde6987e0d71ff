"""From samples to a row: faster must mean a smaller time, in both directions."""

import unittest

from flashcore import _timing


def rounds(ours, peer):
    return [{"ours": a, "peer": b} for a, b in zip(ours, peer)]


class Summary(unittest.TestCase):
    def test_a_planted_speed_up_and_slow_down(self):
        base = [10.0, 10.1, 9.9, 10.0, 10.05]
        for factor in (0.5, 2.0):
            row = _timing.summarise(rounds([factor * x for x in base], base))
            self.assertAlmostEqual(row["us"], factor * 10.0)
            self.assertAlmostEqual(row["peers_us"]["peer"], 10.0)
            self.assertAlmostEqual(row["ratios"]["peer"], factor)

    def test_the_ratio_is_that_of_the_pairs(self):
        """A machine that slows down during the run slows both: the pairs do not care."""
        ours = [10.0, 20.0, 40.0, 80.0, 160.0]
        row = _timing.summarise(rounds(ours, [2 * x for x in ours]))
        self.assertEqual(row["ratios"]["peer"], 0.5)
        self.assertGreater(row["spread"], 0.5)

    def test_one_outlier_moves_nothing(self):
        row = _timing.summarise(rounds([10.0] * 9 + [1e6], [5.0] * 10))
        self.assertEqual((row["us"], row["spread"], row["ratios"]["peer"]), (10.0, 0.0, 2.0))

    def test_without_peers(self):
        row = _timing.summarise([{"ours": 3.0}, {"ours": 3.0}])
        self.assertEqual((row["us"], row["peers_us"], row["ratios"]), (3.0, {}, {}))


class Counts(unittest.TestCase):
    def test_slow_cases_get_fewer_samples_and_say_so(self):
        self.assertEqual(_timing.sample_count(20, 0.01, 2.0), (20, None))
        count, note = _timing.sample_count(20, 0.2, 2.0)
        self.assertEqual(count, 10)
        self.assertIn("10 samples instead of 20", note)
        self.assertEqual(_timing.sample_count(20, 5.0, 2.0)[0], _timing.MIN_SAMPLES)
        self.assertEqual(_timing.sample_count(3, 5.0, 2.0), (3, None))

    def test_short_calls_are_repeated(self):
        self.assertEqual(_timing.calls_per_sample(10.0, 200, 1), 20)
        self.assertEqual(_timing.calls_per_sample(500.0, 200, 1), 1)
        self.assertEqual(_timing.calls_per_sample(0.0, 200, 1), 1024)
        self.assertEqual(_timing.calls_per_sample(500.0, 200, 7), 7)


if __name__ == "__main__":
    unittest.main()
