#!/usr/bin/env python3
"""The times a benchmark's rows must reach on a GPU: bench/bars.json, judged and printed.

    python3 scripts/gpu/gpu_check_bars.py RESULT.json...    judges the rows of a result file again, by the bars
                                                        as they are now; measured values stay as they are

A bar says in one of several ways how long a row may take: against a peer that was timed in the same
process ("time_share" of its time, or "speedup" over it; "best" is the fastest peer), against another
row of ours, or by a figure ("us", "tflops", "kv_tbs"). Whatever the words, it becomes a time,
`bar_us`; the row's ratio is bar_us / us, and a ratio below 1 is short of the bar. Of several bars
of a row the strictest counts.
A peer that was not timed in the same process counts for nothing. A row without one is then judged by
the peers that were, or not at all.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
from flashcore.bench import results  # noqa: E402
from flashcore.bench.cases import Case  # noqa: E402

TOLERANCE = 0.95  # a row below this share of its bar fails, unless the documents say why
SHORT_HEADING = "Rows below their bar"
_SELECTORS = ("name", "batch", "kv_len", "head_dim", "causal")
_FIGURES = ("us", "tflops", "kv_tbs")
_SHOWN = ("fa3", "fa2", "cudnn")  # peers with a column of their own


def load(path, gpu):
    """The file's content where it is about this GPU; None where it is not."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    return content if content["gpu"] == gpu else None


def matches(selector, row):
    return all(row.get(name) == selector[name] for name in _SELECTORS if name in selector)


def label(row):
    return f"{row['name']} {Case.of(row).shape_text()}"


@dataclass
class Judged:
    """A row and its bar. bar_us is None where there is none, or where `missing` says what the bar
    needs and the run does not have."""

    row: dict
    peers_us: dict
    bar_us: float | None = None
    missing: str = ""

    @property
    def ratio(self):
        return None if self.bar_us is None else self.bar_us / self.row["us"]

    @property
    def verdict(self):
        if self.ratio is None:
            return f"not judged: {self.missing}" if self.missing else ""
        return "pass" if self.ratio >= 1 else "short"


def peer_times(row):
    """{peer: us} as the rounds saw them: ours over the median ratio of the rounds, so that a machine
    that slows down for a moment does not change who is ahead."""
    return {name: row["us"] / ratio for name, ratio in row.get("ratios", {}).items()}


def limit_of(bar, row, times, rows):
    """(us, what is missing) of one bar for one row; (None, "") where it does not apply."""
    case = Case.of(row)
    if "us" in bar:
        return bar["us"], ""
    if "tflops" in bar:
        return case.flops() / bar["tflops"] / 1e6, ""
    if "kv_tbs" in bar:
        if case.kv_bytes() <= 1e6 * bar["above_kv_mb"]:
            return None, ""
        return case.kv_bytes() / bar["kv_tbs"] / 1e6, ""
    if "row" in bar:
        other = next((one["us"] for one in rows if matches(bar["row"], one)), None)
        if other is None:
            return None, f"no row {bar['row']['name']}"
        return other / bar["speedup"], ""
    other = min(times.values(), default=None) if bar["peer"] == "best" else times.get(bar["peer"])
    if other is None:
        return None, f"no time of {'any peer' if bar['peer'] == 'best' else bar['peer']}"
    return other * bar["time_share"] if "time_share" in bar else other / bar["speedup"], ""


def judge(rows, content):
    """One Judged per row."""
    judged = []
    for row in rows:
        one = Judged(row, peer_times(row))
        limits = [limit_of(bar, row, one.peers_us, rows) for bar in content["bars"]
                  if matches(bar, row)]
        one.missing = next((missing for _, missing in limits if missing), "")
        one.bar_us = min((us for us, _ in limits if us is not None), default=None)
        judged.append(one)
    return judged


def put_bars(rows, content):
    """Judges the rows and writes each one's bar into it; the Judged."""
    judged = judge(rows, content)
    for one in judged:
        one.row.pop("bar", None)
        if one.bar_us is not None:
            one.row["bar"] = {"bar_us": one.bar_us, "ratio": one.ratio}
    return judged


def summary_of(judged):
    """What the entry of the stage `bench` says about bars."""
    if not judged:
        return {}
    return {"bars": {
        "passed": sum(one.verdict == "pass" for one in judged),
        "short": {label(one.row): one.ratio for one in judged if one.verdict == "short"},
        "not judged": {label(one.row): one.missing for one in judged
                       if one.verdict.startswith("not judged")}}}


def table(judged):
    """For people: | row | ours | some peers | best peer | bar | ratio to bar | |."""
    lines = [f"| row | ours us | {' | '.join(_SHOWN)} | best peer | bar us | ratio to bar | |",
             f"|-|-:|{'-:|' * len(_SHOWN)}-|-:|-:|-|"]
    for one in judged:
        if not one.verdict:
            continue
        best = min(one.peers_us, key=one.peers_us.get, default=None)
        cells = [label(one.row), f"{one.row['us']:.4g}",
                 *(f"{one.peers_us[name]:.4g}" if name in one.peers_us else ""
                   for name in _SHOWN),
                 f"{best} {one.peers_us[best]:.4g}" if best else "",
                 "" if one.bar_us is None else f"{one.bar_us:.4g}",
                 "" if one.ratio is None else f"{one.ratio:.2f}", one.verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def explained(path):
    """The first column of the table under the heading "Rows below their bar": names of cases, or
    whole labels, whose shortfall has a reason there."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return set()
    section = re.search(rf"^#+ {SHORT_HEADING}\s*$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        return set()
    cells = re.findall(r"^\|([^|]*)\|", section.group(1), re.MULTILINE)
    names = {cell.strip().strip("`") for cell in cells[2:]}  # past heading and rule
    return names - {""}


def failures(judged, excused):
    """The rows that are short by more than the tolerance and have no reason in the documents."""
    return [one for one in judged if one.ratio is not None and one.ratio < TOLERANCE
            and one.row["name"] not in excused and label(one.row) not in excused]


def mistakes(content, cases):
    """What is wrong with a bars file, as sentences: every bar must be about some case and say one
    thing."""
    found = []
    selectors = [(bar, "bar") for bar in content["bars"]] + \
        [(bar["row"], "row of a bar") for bar in content["bars"] if "row" in bar]
    for selector, what in selectors:
        if not any(matches(selector, case.fields()) for case in cases):
            found.append(f"{what} {selector}: no case is like that")
    for bar in content["bars"]:
        said = [name for name in (*_FIGURES, "time_share", "speedup") if name in bar]
        if len(said) != 1:
            found.append(f"bar {bar}: wanted one of {', '.join(_FIGURES)}, time_share, speedup")
        elif said[0] not in _FIGURES and ("peer" in bar) == ("row" in bar):
            found.append(f"bar {bar}: {said[0]} of what? wanted a peer or a row")
    return found


def judge_again(path, content):
    """The rows of a result file by these bars; what stood in it about others is replaced."""
    result = results.read(path)
    judged = put_bars(result["rows"], content)
    details = result.get("stages", {}).get("bench", {}).get("details")
    if details is not None:
        details.update(summary_of(judged))
    results.write(path, results.rounded(result))
    return judged


def main(paths):
    if not paths or paths[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if paths else 2
    for path in paths:
        content = load(ROOT / "bench" / "bars.json", results.read(path)["gpu"])
        if content is None:
            print(f"{path}: bench/bars.json has no bars for its GPU; left as it is")
            continue
        print(table(judge_again(path, content)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
