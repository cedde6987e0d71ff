#!/usr/bin/env python3
"""Judges the rows of a benchmark by the targets in bench/targets.json.

    python3 scripts/gpu/gpu_check_targets.py RESULT.json...

rewrites the verdicts in result files after targets have changed. Measured values do not change.

A target limits the time of a row. It is relative to a peer that was timed in the same process
("time_share" of its time, or "speedup" over it; "best" is the fastest peer), relative to another row, or
absolute ("us", "tflops", "kv_tbs"). Each target becomes a time, `target_us`. The row's ratio is
target_us / us; a ratio below 1 is an open gap. The strictest target of a row counts. Peers that were
not timed in the same process are ignored. A row without any target_us is not judged.
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

TOLERANCE = 0.95  # a lower ratio fails, unless docs/performance.md has the reason
GAPS_HEADING = "Open gaps"
_SELECTORS = ("name", "batch", "kv_len", "head_dim", "causal")
_FIGURES = ("us", "tflops", "kv_tbs")
_SHOWN = ("fa3", "fa2", "cudnn")  # peers with their own column


def load(path, gpu):
    """The content of the file if it is for this GPU, else None."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    return content if content["gpu"] == gpu else None


def matches(selector, row):
    return all(row.get(name) == selector[name] for name in _SELECTORS if name in selector)


def label(row):
    return f"{row['name']} {Case.of(row).shape_text()}"


@dataclass
class Judged:
    """A row and its target. target_us is None if the row has no target, or if the run has no time for
    the peer or row of the target (`missing`)."""

    row: dict
    peers_us: dict
    target_us: float | None = None
    missing: str = ""

    @property
    def ratio(self):
        return None if self.target_us is None else self.target_us / self.row["us"]

    @property
    def verdict(self):
        if self.ratio is None:
            return f"not judged: {self.missing}" if self.missing else ""
        return "pass" if self.ratio >= 1 else "short"


def peer_times(row):
    """{peer: us}: the row's time divided by the median ratio over all repetitions. A short slowdown of
    the machine then does not change the order."""
    return {name: row["us"] / ratio for name, ratio in row.get("ratios", {}).items()}


def limit_of(target, row, times, rows):
    """(us, description of a missing time) of one target for one row; (None, "") if it does not apply."""
    case = Case.of(row)
    if "us" in target:
        return target["us"], ""
    if "tflops" in target:
        return case.flops() / target["tflops"] / 1e6, ""
    if "kv_tbs" in target:
        if case.kv_bytes() <= 1e6 * target["above_kv_mb"]:
            return None, ""
        return case.kv_bytes() / target["kv_tbs"] / 1e6, ""
    if "row" in target:
        other = next((one["us"] for one in rows if matches(target["row"], one)), None)
        if other is None:
            return None, f"no row {target['row']['name']}"
        return other / target["speedup"], ""
    other = min(times.values(), default=None) if target["peer"] == "best" else times.get(target["peer"])
    if other is None:
        return None, f"no time of {'any peer' if target['peer'] == 'best' else target['peer']}"
    return other * target["time_share"] if "time_share" in target else other / target["speedup"], ""


def judge(rows, content):
    """One Judged per row."""
    judged = []
    for row in rows:
        one = Judged(row, peer_times(row))
        limits = [limit_of(target, row, one.peers_us, rows) for target in content["targets"]
                  if matches(target, row)]
        one.missing = next((missing for _, missing in limits if missing), "")
        one.target_us = min((us for us, _ in limits if us is not None), default=None)
        judged.append(one)
    return judged


def put_targets(rows, content):
    """Judges the rows and writes the targets into them. Returns the Judged."""
    judged = judge(rows, content)
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
                       if one.verdict.startswith("not judged")}}}


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
    return "\n".join(lines)


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
    """The rows below the tolerance that have no reason in the documents."""
    return [one for one in judged if one.ratio is not None and one.ratio < TOLERANCE
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
        said = [name for name in (*_FIGURES, "time_share", "speedup") if name in target]
        if len(said) != 1:
            found.append(f"target {target}: wanted one of {', '.join(_FIGURES)}, time_share, speedup")
        elif said[0] not in _FIGURES and ("peer" in target) == ("row" in target):
            found.append(f"target {target}: {said[0]} needs either a peer or a row")
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
