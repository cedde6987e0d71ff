"""Sampling of a benchmark, and the summary of its samples."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MIN_SAMPLES = 5
# Our two timers of a round: the call that is compared with the peers, and the bare C call.
OURS, BARE = "ours", "bare"
BASELINE = "baseline:"  # begins the names of what a case is compared with


def one_round(timers: Mapping[str, Callable[[], float]], reverse: bool = False) -> dict[str, float]:
    """Runs each timer once and returns {name: us per call} in the order of `timers`. With `reverse` they
    run in reverse order. A timer measures one sample and returns its us per call."""
    names = list(timers)
    times = {name: timers[name]() for name in (names[::-1] if reverse else names)}
    return {name: times[name] for name in names}


def spread(samples: Sequence[float]) -> float:
    """The interquartile range divided by the median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def sample_count(wanted: int, seconds_per_sample: float,
                 budget_s: float) -> tuple[int, str | None]:
    """(number of samples to take, reason if it is less than wanted, or None)."""
    if wanted * seconds_per_sample <= budget_s or wanted <= MIN_SAMPLES:
        return wanted, None
    count = max(MIN_SAMPLES, int(budget_s / seconds_per_sample))
    if count >= wanted:
        return wanted, None
    return count, f"{count} samples instead of {wanted}: one takes {seconds_per_sample:.2g} s"


def calls_per_sample(us_per_call: float, sample_us: float, least: int, most: int = 1024) -> int:
    """The number of calls of a sample that takes sample_us, at least `least`, one per input set."""
    wanted = int(-(-sample_us // max(us_per_call, 0.1)))
    return max(min(max(wanted, 1), most), least)


def whole_turns(calls: int, sets: int) -> int:
    """`calls`, rounded up so that each input set is used equally often."""
    return -(-calls // sets) * sets


def summarise(samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Summarizes samples, one {name: us per call} per round, which include "ours". The ratio of a peer
    is the median over rounds of ours / peer; below 1, ours takes less time. "bare" and baselines are not
    peers; baselines, if there are any, have entries like those of peers."""
    ours = [round_[OURS] for round_ in samples]
    summary: dict[str, Any] = {
        "us": statistics.median(ours),
        "spread": spread(ours),
        "samples": ours,
        "peers_us": {},
        "peers_spread": {},
        "ratios": {},
    }
    for name in samples[0]:
        if name == OURS:
            continue
        theirs = [round_[name] for round_ in samples]
        if name == BARE:
            summary["bare_us"], summary["bare_spread"] = statistics.median(theirs), spread(theirs)
            continue
        ratio = statistics.median(mine / other for mine, other in zip(ours, theirs))
        if name.startswith(BASELINE):
            summary.setdefault("baselines_us", {})[name.removeprefix(BASELINE)] = statistics.median(theirs)
            summary.setdefault("baseline_ratios", {})[name.removeprefix(BASELINE)] = ratio
            continue
        summary["peers_us"][name] = statistics.median(theirs)
        summary["peers_spread"][name] = spread(theirs)
        summary["ratios"][name] = ratio
    return summary
