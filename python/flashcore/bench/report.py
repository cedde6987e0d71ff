"""A result file as CSV and as an HTML page: speed relative to the best peer, latency by length, and a
table. The page is self-contained."""

import csv
import io
from html import escape
from typing import Any

from flashcore.bench.cases import FIELDS, Case
from flashcore.bench.chart import Chart
from flashcore.bench.speed_chart import SpeedChart, bars_of
from flashcore.bench.table import c_call, device

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
svg.speed { max-width: 100%; height: auto; }
.charts svg { width: 100%; max-width: 46rem; font: 11px system-ui, sans-serif; }
.charts text { fill: currentColor; } .grid { stroke: #8886; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: .15rem .6rem; text-align: right; }
td:nth-child(-n+3), th:nth-child(-n+3) { text-align: left; } tr:nth-child(even) { background: #8882; }
td.faster { color: #2f81c7; } td.slower { color: #d06f28; }
"""


def _peers(rows):
    return sorted({name for row in rows for name in row["peers_us"]})


def to_csv(result):
    """One line per case. Times are in microseconds, ratios are ours / peer."""
    rows, peers = result["rows"], _peers(result["rows"])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*FIELDS, "kernel", "splits", "call", "us", "bare_us", "spread", "tflops", "error",
                     *(f"{name}_us" for name in peers), *(f"ours_over_{name}" for name in peers)])
    for row in rows:
        case = Case.of(row)
        writer.writerow([*(row[name] for name in FIELDS), row["kernel"], row.get("splits", ""),
                         row.get("call", ""), row["us"], row.get("bare_us", ""), row["spread"],
                         case.flops() / row["us"] / 1e6, row["error"],
                         *(row["peers_us"].get(name, "") for name in peers),
                         *(row.get("ratios", {}).get(name, "") for name in peers)])
    return text.getvalue()


def _times(row):
    return {"ours": row["us"], **row["peers_us"]}


def latency_charts(result):
    """[(title, chart)]: one chart per group of cases that differ only in length and batch."""
    groups: dict[str, list[tuple[Any, Any]]] = {}
    for row in result["rows"]:
        case = Case.of(row)
        phase = "decode" if case.q_len == 1 else "prefill"
        heads = case.shape_text().split(",")[1]
        title = f"{phase} {case.dtype}, heads {heads}, dim {case.head_dim}" + \
            (", causal" if case.causal else "")
        groups.setdefault(title, []).append((case, row))
    charts = []
    for title, members in groups.items():
        if len({case.kv_len for case, _ in members}) < 2:
            continue
        series: dict[str, list[tuple[float, float, str]]] = {}
        for case, row in members:
            for name, us in _times(row).items():
                series.setdefault(name, []).append(
                    (case.kv_len, us, f"{case.name} {case.shape_text()}: {us:.4g} us"))
        batches = {case.batch for case, _ in members}
        charts.append((title, Chart("keys", "us per call", series, lines=len(batches) == 1)))
    return charts


def _table(result):
    peers = _peers(result["rows"])
    yield ("<table><tr><th>case<th>batch, heads, len, dim<th>kernel<th>us<th>C call us<th>TFLOP/s"
           "<th>error")
    yield "".join(f"<th>{escape(name)} us<th>ours / {escape(name)}" for name in peers) + "</tr>"
    for row in result["rows"]:
        case = Case.of(row)
        cells = [escape(case.name), escape(case.shape_text()), escape(row["kernel"]),
                 f"{row['us']:.4g}", c_call(row), f"{case.flops() / row['us'] / 1e6:.3g}",
                 f"{row['error']:.2g}"]
        yield "<tr>" + "".join(f"<td>{cell}" for cell in cells)
        for name in peers:
            if name not in row["peers_us"]:
                yield f"<td title=\"{escape(row.get('peers_note', {}).get(name, ''))}\">-<td>"
                continue
            ratio = row["ratios"][name]
            kind = "faster" if ratio < 1 else "slower"
            yield f"<td>{row['peers_us'][name]:.4g}<td class=\"{kind}\">{ratio:.2f}"
        yield "</tr>"
    yield "</table>"


def to_html(result):
    machine = device(result)
    peers = ", ".join(f"{name} {found}" for name, found in result.get("peers", {}).items())
    facts = {"torch": result.get("torch"), "peers": peers, "cuDNN": result.get("cudnn"),
             "CUDA": result.get("cuda"), "driver": result.get("driver"),
             "sources": result.get("fingerprint"), "measured": result.get("date"),
             "command": result.get("command")}
    parts = ["<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">",
             f"<title>FlashCore on {escape(machine)}</title><style>{_STYLE}</style>",
             f"<h1>FlashCore on {escape(machine)}</h1>",
             "<p>" + "; ".join(f"{name} {escape(str(value))}" for name, value in facts.items()
                               if value) + "</p>"]
    bars = bars_of(result)
    parts.append(SpeedChart(result, bars).svg() if bars else "<p>No case has a peer's time.</p>")
    charts = latency_charts(result)
    if charts:
        parts.append("<h2>Latency by length</h2><div class=\"charts\">")
        for title, one in charts:
            parts.append(f"<div><h3>{escape(title)}</h3>{one.svg()}</div>")
        parts.append("</div>")
    parts += ["<h2>Cases</h2><p>Medians. A ratio below 1 means that ours takes less time. In rows with "
              "a C call time, us is the time of <code>flashcore.attention</code>; in other rows it is "
              "the time of the C call.</p>",
              *_table(result), "</html>\n"]
    return "\n".join(parts)


def write(result, path):
    """Writes FILE.csv and FILE.html next to FILE.json. Returns their paths."""
    made = []
    for suffix, text in ((".csv", to_csv(result)), (".html", to_html(result))):
        made.append(path.with_suffix(suffix))
        made[-1].write_text(text, encoding="utf-8")
    return made
