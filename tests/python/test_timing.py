"""The summary of samples: a faster call has a smaller time and ratio."""

import time
import unittest

from flashcore.bench import timing


def rounds(ours, peer):
    return [{"ours": a, "peer": b} for a, b in zip(ours, peer)]


class Summary(unittest.TestCase):
    def test_a_simulated_speed_up_and_slow_down(self):
        base = [10.0, 10.1, 9.9, 10.0, 10.05]
        for factor in (0.5, 2.0):
            row = timing.summarise(rounds([factor * x for x in base], base))
            self.assertAlmostEqual(row["us"], factor * 10.0)
            self.assertAlmostEqual(row["peers_us"]["peer"], 10.0)
            self.assertAlmostEqual(row["ratios"]["peer"], factor)

    def test_the_ratio_is_that_of_the_pairs(self):
        """A machine that slows down during the run slows both, so the ratio of pairs does not change."""
        ours = [10.0, 20.0, 40.0, 80.0, 160.0]
        row = timing.summarise(rounds(ours, [2 * x for x in ours]))
        self.assertEqual(row["ratios"]["peer"], 0.5)
        self.assertGreater(row["spread"], 0.5)

    def test_one_outlier_changes_nothing(self):
        row = timing.summarise(rounds([10.0] * 9 + [1e6], [5.0] * 10))
        self.assertEqual((row["us"], row["spread"], row["ratios"]["peer"]), (10.0, 0.0, 2.0))

    def test_the_bare_call_is_not_a_peer(self):
        row = timing.summarise([{"ours": 4.0, "bare": 3.0, "peer": 8.0}] * 3)
        self.assertEqual((row["us"], row["bare_us"], row["bare_spread"]), (4.0, 3.0, 0.0))
        self.assertEqual((row["peers_us"], row["ratios"]), ({"peer": 8.0}, {"peer": 0.5}))

    def test_without_peers(self):
        row = timing.summarise([{"ours": 3.0}, {"ours": 3.0}])
        self.assertEqual((row["us"], row["peers_us"], row["ratios"]), (3.0, {}, {}))


class Rounds(unittest.TestCase):
    """Functions that take time, called in turns."""

    def setUp(self):
        self.log = []

    def timer(self, name, seconds):
        def sample():
            self.log.append(name)
            begin = time.perf_counter()
            time.sleep(seconds)
            return 1e6 * (time.perf_counter() - begin)
        return sample

    def test_every_second_round_is_reversed(self):
        timers = {name: self.timer(name, 0.0) for name in ("ours", "bare", "peer")}
        rounds = [timing.one_round(timers, reverse=number % 2 == 1) for number in range(4)]
        self.assertEqual(self.log, 2 * ["ours", "bare", "peer", "peer", "bare", "ours"])
        self.assertTrue(all(list(one) == ["ours", "bare", "peer"] for one in rounds))

    def test_the_slower_function_has_the_larger_time(self):
        timers = {"ours": self.timer("ours", 0.002), "peer": self.timer("peer", 0.010)}
        row = timing.summarise([timing.one_round(timers, bool(number % 2)) for number in range(5)])
        self.assertGreaterEqual(row["us"], 2000)
        self.assertGreaterEqual(row["peers_us"]["peer"], 10000)
        self.assertLess(row["ratios"]["peer"], 1)


class Counts(unittest.TestCase):
    def test_slow_cases_get_fewer_samples_with_a_note(self):
        self.assertEqual(timing.sample_count(20, 0.01, 2.0), (20, None))
        count, note = timing.sample_count(20, 0.2, 2.0)
        self.assertEqual(count, 10)
        self.assertIn("10 samples instead of 20", note)
        self.assertEqual(timing.sample_count(20, 5.0, 2.0)[0], timing.MIN_SAMPLES)
        self.assertEqual(timing.sample_count(3, 5.0, 2.0), (3, None))

    def test_short_calls_are_repeated(self):
        self.assertEqual(timing.calls_per_sample(10.0, 200, 1), 20)
        self.assertEqual(timing.calls_per_sample(500.0, 200, 1), 1)
        self.assertEqual(timing.calls_per_sample(0.0, 200, 1), 1024)
        self.assertEqual(timing.calls_per_sample(500.0, 200, 7), 7)

    def test_input_sets_are_read_equally_often(self):
        self.assertEqual([timing.whole_turns(calls, 3) for calls in (1, 3, 4, 8)], [3, 3, 6, 9])
        self.assertEqual(timing.whole_turns(20, 1), 20)


if __name__ == "__main__":
    unittest.main()
