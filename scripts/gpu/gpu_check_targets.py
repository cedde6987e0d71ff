#!/usr/bin/env python3
"""Judges the rows of a benchmark by the targets in bench/targets.json.

    python3 scripts/gpu/gpu_check_targets.py RESULT.json...

rewrites the verdicts in result files after targets have changed. Measured values do not change.

A target limits the time of a row. It is relative to a peer that was timed in the same process
("time_share" of its time, or "speedup" over it; "best" is the fastest peer), to one of the row's baselines
(also "rate_share" of its FLOP/s), to another row, or absolute ("us", "tflops", "kv_tbs"). Each target becomes
a time, `target_us`. The row's ratio is target_us / us; a ratio below 1 is an open gap. The strictest target
of a row counts. Peers that were not timed in the same process are ignored. A row without any target_us is
not judged. A target with "bar" has no tolerance; "goal" is what its row should reach next, which is not
judged.
"""

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(Path(__file__).resolve().parent)]
from flashcore.bench import results  # noqa: E402
from flashcore.bench.cases import Case  # noqa: E402
from gpu_check_limits import limit_of, mistake_of, peer_times  # noqa: E402

GAPS_HEADING = "Open gaps"
_SELECTORS = ("name", "dtype", "batch", "kv_len", "head_dim", "causal")
_SHOWN = ("fa3", "fa2", "cudnn")  # peers with their own column


def load(path, gpu):
    """The content of the file if it is for this GPU, or if a CPU was measured (no GPU), else None."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    return content if gpu in (content["gpu"], "") else None


def matches(selector, row):
    return all(row.get(name) == selector[name] for name in _SELECTORS if name in selector)


def label(row):
    return f"{row['name']} {Case.of(row).shape_text()}"


@dataclass
class Judged:
    """A row and the limits of its targets."""

    row: dict
    peers_us: dict
    limits: list = field(default_factory=list)

    @property
    def target_us(self):
        """The strictest time; None if the row has no target, or if the run has no time for any of them."""
        return min((one.us for one in self.limits if one.us is not None), default=None)

    @property
    def missing(self):
        """Why a target is not judged; empty if all are."""
        return next((one.missing for one in self.limits if one.missing), "")

    @property
    def ratio(self):
        return None if self.target_us is None else self.target_us / self.row["us"]

    @property
    def verdict(self):
        if self.ratio is None:
            return f"not judged: {self.missing}" if self.missing else ""
        return "pass" if self.ratio >= 1 else "short"

    def failures(self):
        return [one for one in self.limits if one.fails(self.row["us"])]

    def failure(self):
        """What fails, in words."""
        return f"{label(self.row)} at {self.ratio:.2f}: " + ", ".join(one.measured for one in self.failures())


def judge(rows, content, others=()):
    """One Judged per row. others: further rows, for targets that are relative to one."""
    known = [*rows, *others]
    return [Judged(row, peer_times(row), [limit_of(target, row, known, matches) for target in content["targets"]
                                          if matches(target, row)]) for row in rows]


def put_targets(rows, content, others=()):
    """Judges the rows and writes the targets into them. Returns the Judged."""
    judged = judge(rows, content, others)
    for one in judged:
        one.row.pop("target", None)
        if one.target_us is not None:
            one.row["target"] = {"target_us": one.target_us, "ratio": one.ratio}
    return judged


def summary_of(judged):
    """The "targets" entry of the stage `bench` in a result file."""
    if not judged:
        return {}
    return {"targets": {
        "passed": sum(one.verdict == "pass" for one in judged),
        "short": {label(one.row): one.ratio for one in judged if one.verdict == "short"},
        "not judged": {label(one.row): one.missing for one in judged
                       if one.verdict.startswith("not judged")
                       or any(limit.missing and limit.is_bar for limit in one.limits)}}}


def table(judged):
    """Markdown table: | row | ours | some peers | best peer | target | ratio to target | |."""
    lines = [f"| row | ours us | {' | '.join(_SHOWN)} | best peer | target us | ratio to target | |",
             f"|-|-:|{'-:|' * len(_SHOWN)}-|-:|-:|-|"]
    for one in judged:
        if not one.verdict:
            continue
        best = min(one.peers_us, key=one.peers_us.get, default=None)
        cells = [label(one.row), f"{one.row['us']:.4g}",
                 *(f"{one.peers_us[name]:.4g}" if name in one.peers_us else ""
                   for name in _SHOWN),
                 f"{best} {one.peers_us[best]:.4g}" if best else "",
                 "" if one.target_us is None else f"{one.target_us:.4g}",
                 "" if one.ratio is None else f"{one.ratio:.2f}", one.verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines + bars(judged))


def bars(judged):
    """Markdown table of the bars: | row | measured | goal | |; nothing without bars."""
    lines = ["", "| row | bar | goal | |", "|-|-|-:|-|"]
    for one in judged:
        for limit in (limit for limit in one.limits if limit.is_bar):
            verdict = f"not judged: {limit.missing}" if limit.us is None else \
                "MISSED" if limit.fails(one.row["us"]) else "pass"
            lines.append(f"| {label(one.row)} | {limit.measured} | {limit.target.get('goal', '')} | {verdict} |")
    return lines if len(lines) > 3 else []


def explained(path):
    """The first column of the table under the heading "Open gaps": names of cases, or full labels,
    with a reason there."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return set()
    section = re.search(rf"^#+ {GAPS_HEADING}\s*$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        return set()
    cells = re.findall(r"^\|([^|]*)\|", section.group(1), re.MULTILINE)
    names = {cell.strip().strip("`") for cell in cells[2:]}  # without the table's header
    return names - {""}


def failures(judged, excused):
    """The rows that fail a target and have no reason in the documents."""
    return [one for one in judged if one.failures()
            and one.row["name"] not in excused and label(one.row) not in excused]


def mistakes(content, cases):
    """The mistakes in a targets file, as sentences. Every target must select a case and set one
    limit."""
    found = []
    selectors = [(target, "target") for target in content["targets"]] + \
        [(target["row"], "row of a target") for target in content["targets"] if "row" in target]
    for selector, what in selectors:
        if not any(matches(selector, case.fields()) for case in cases):
            found.append(f"{what} {selector}: no case matches")
    for target in content["targets"]:
        found += filter(None, [mistake_of(target)])
        named = target.get("baseline")
        if named and not all(named in case.baselines for case in cases if matches(target, case.fields())):
            found.append(f"target {target}: a case that it selects is not compared with {named}")
    return found


def judge_again(path, content):
    """Judges the rows of a result file by these targets and replaces its former verdicts."""
    result = results.read(path)
    judged = put_targets(result["rows"], content)
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
        content = load(ROOT / "bench" / "targets.json", results.read(path)["gpu"])
        if content is None:
            print(f"{path}: unchanged; bench/targets.json has no targets for its GPU")
            continue
        print(table(judge_again(path, content)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
