"""Turns a target of bench/targets.json into the time that it allows a row."""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
from flashcore.bench.cases import Case  # noqa: E402
from flashcore.bench.options import baseline_of  # noqa: E402

FIGURES = ("us", "tflops", "kv_tbs")
RELATIONS = ("time_share", "speedup", "rate_share")  # to another time: its share, its inverse, that of FLOP/s
TOLERANCE = 0.95  # a lower ratio fails, unless docs/performance.md has the reason; a bar has no tolerance


@dataclass
class Limit:
    """us is None if the target does not apply, or if the run has no time for what it is relative to
    (`missing`)."""

    target: dict
    us: float | None = None
    missing: str = ""
    measured: str = ""  # what the row reached, in the words of the target

    @property
    def is_bar(self):
        return self.target.get("bar", False)

    def fails(self, us):
        return self.us is not None and self.us / us < (1 if self.is_bar else TOLERANCE)


def peer_times(row):
    """{peer: us}: the row's time divided by the median ratio over all repetitions. A short slowdown of
    the machine then does not change the order."""
    return {name: row["us"] / ratio for name, ratio in row.get("ratios", {}).items()}


def baseline_times(row):
    """The same of what the row is compared with."""
    return {name: row["us"] / ratio for name, ratio in row.get("baseline_ratios", {}).items()}


def _figure(target, row):
    case = Case.of(row)
    if "us" in target:
        return Limit(target, target["us"], measured=f"{row['us']:.4g} us, wanted {target['us']:g}")
    if "tflops" in target:
        wanted = target["tflops"]
        return Limit(target, case.flops() / wanted / 1e6,
                     measured=f"{case.flops() / row['us'] / 1e6:.4g} TFLOP/s, wanted {wanted:g}")
    if case.kv_bytes() <= 1e6 * target["above_kv_mb"]:
        return Limit(target)
    wanted = target["kv_tbs"]
    return Limit(target, case.kv_bytes() / wanted / 1e6,
                 measured=f"{case.kv_bytes() / row['us'] / 1e6:.3g} TB/s, wanted {wanted:g}")


def _relative(target, row, name, other, other_flops):
    """The limit relative to a time `other` of `name`."""
    if "time_share" in target:
        return Limit(target, other * target["time_share"],
                     measured=f"{row['us'] / other:.3g} of the time of {name}, wanted {target['time_share']:g}")
    if "speedup" in target:
        return Limit(target, other / target["speedup"],
                     measured=f"{other / row['us']:.3g} of the speed of {name}, wanted {target['speedup']:g}")
    share = Case.of(row).flops() / other_flops * other
    return Limit(target, share / target["rate_share"],
                 measured=f"{share / row['us']:.3g} of the FLOP/s of {name}, wanted {target['rate_share']:g}")


def limit_of(target, row, rows, matches):
    """The Limit of one target for one row. rows: all rows of the run; matches(selector, row)."""
    if any(name in target for name in FIGURES):
        return _figure(target, row)
    if "row" in target:
        other = next((one for one in rows if matches(target["row"], one)), None)
        if other is None:
            return Limit(target, missing=f"no row {target['row']['name']}")
        return _relative(target, row, target["row"]["name"], other["us"], Case.of(other).flops())
    if "baseline" in target:
        name = target["baseline"]
        found = baseline_times(row).get(name)
        if found is None:
            return Limit(target, missing=row.get("baselines_note", {}).get(name) or f"no time of {name}")
        return _relative(target, row, name, found, baseline_of(Case.of(row), name.partition("@")[0]).flops())
    times = peer_times(row)
    name = min(times, key=times.get, default=None) if target["peer"] == "best" else target["peer"]
    if name not in times:
        return Limit(target, missing=f"no time of {'any peer' if target['peer'] == 'best' else name}")
    return _relative(target, row, name, times[name], Case.of(row).flops())


def mistake_of(target):
    """What is wrong with the limit of a target, as a sentence; None if nothing is."""
    said = [name for name in (*FIGURES, *RELATIONS) if name in target]
    if len(said) != 1:
        return f"target {target}: wanted one of {', '.join((*FIGURES, *RELATIONS))}"
    if said[0] in RELATIONS and sum(name in target for name in ("peer", "row", "baseline")) != 1:
        return f"target {target}: {said[0]} needs either a peer, a row or a baseline"
    return None
