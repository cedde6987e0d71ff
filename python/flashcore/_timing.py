"""What a benchmark makes of its samples."""

import statistics
from collections.abc import Sequence
from typing import Any

MIN_SAMPLES = 5


def spread(samples: Sequence[float]) -> float:
    """Distance between the quartiles, as a share of the median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def sample_count(wanted: int, seconds_per_sample: float,
                 budget_s: float) -> tuple[int, str | None]:
    """(how many samples to take, why fewer than wanted or None)."""
    if wanted * seconds_per_sample <= budget_s or wanted <= MIN_SAMPLES:
        return wanted, None
    count = max(MIN_SAMPLES, int(budget_s / seconds_per_sample))
    if count >= wanted:
        return wanted, None
    return count, f"{count} samples instead of {wanted}: one takes {seconds_per_sample:.2g} s"


def calls_per_sample(us_per_call: float, sample_us: float, least: int, most: int = 1024) -> int:
    """How many calls make a sample long enough, at least once through all input sets."""
    wanted = int(-(-sample_us // max(us_per_call, 0.1)))
    return max(min(max(wanted, 1), most), least)


def summarise(samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    """samples: one {name: us per call} per round, "ours" among the names. The ratio of a peer is the
    median over rounds of ours / peer: below 1, ours takes less time."""
    ours = [round_["ours"] for round_ in samples]
    summary: dict[str, Any] = {
        "us": statistics.median(ours),
        "spread": spread(ours),
        "samples": ours,
        "peers_us": {},
        "peers_spread": {},
        "ratios": {},
    }
    for name in samples[0]:
        if name == "ours":
            continue
        theirs = [round_[name] for round_ in samples]
        summary["peers_us"][name] = statistics.median(theirs)
        summary["peers_spread"][name] = spread(theirs)
        summary["ratios"][name] = statistics.median(
            mine / other for mine, other in zip(ours, theirs))
    return summary
