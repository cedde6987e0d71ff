"""A result file as CSV and as one HTML page: the roofline with our points and the peers', latency by
length, and the table. The page needs nothing beside itself."""

import csv
import io
from html import escape
from typing import Any

from flashcore._cases import FIELDS, Case
from flashcore._chart import Chart
from flashcore._table import c_call

# Dense 16-bit tensor-core TFLOP/s and TB/s of memory, from the vendor's data sheets.
_DEVICES = {"H200": (989.0, 4.8), "H100": (989.0, 3.35), "A100": (312.0, 2.0), "L4": (121.0, 0.3)}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; max-width: 46rem; font: 11px system-ui, sans-serif; }
.grid { stroke: #ddd; } .roof { fill: none; stroke: #555; stroke-dasharray: 5 4; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: .15rem .6rem; text-align: right; }
td:nth-child(-n+3), th:nth-child(-n+3) { text-align: left; } tr:nth-child(even) { background: #f6f6f6; }
.faster { color: #2e7d32; } .slower { color: #c62828; }
"""


def _peers(rows):
    return sorted({name for row in rows for name in row["peers_us"]})


def to_csv(result):
    """One line a case; times in microseconds, ratios ours / peer."""
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


def _moved_bytes(case):
    """Inputs once and the output once."""
    return case.input_bytes() + case.output_bytes()


def _times(row):
    return {"ours": row["us"], **row["peers_us"]}


def roofline(result):
    series: dict[str, list[tuple[float, float, str]]] = {}
    best = 0.0
    for row in result["rows"]:
        case = Case.of(row)
        if case.flops() <= 0:
            continue
        intensity = case.flops() / _moved_bytes(case)
        for name, us in _times(row).items():
            tflops = case.flops() / us / 1e6
            best = max(best, tflops)
            series.setdefault(name, []).append(
                (intensity, tflops, f"{case.name} {case.shape_text()}: {us:.4g} us, "
                                    f"{tflops:.3g} TFLOP/s"))
    if not series:
        return None
    device = next((one for one in _DEVICES if one in result.get("gpu", "")), None)
    if device is None:
        lowest = min(x for many in series.values() for x, _, _ in many)
        highest = max(x for many in series.values() for x, _, _ in many)
        roofs = [("highest measured", [(lowest, best), (highest, best)])]
    else:
        peak, bandwidth = _DEVICES[device]
        lowest = min(x for many in series.values() for x, _, _ in many)
        ridge = peak / bandwidth
        roofs = [(f"{peak:g} TFLOP/s, {bandwidth:g} TB/s",
                  [(lowest, min(lowest * bandwidth, peak)), (ridge, peak), (ridge * 1e6, peak)])]
    return Chart("FLOP per byte", "TFLOP/s", series, roofs=roofs)


def latency_charts(result):
    """[(title, chart)]: cases that differ in length alone (and in batch), where there are several."""
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
    device = result.get("gpu") or f"CPU, {result.get('threads', '?')} threads"
    peers = ", ".join(f"{name} {found}" for name, found in result.get("peers", {}).items())
    facts = {"torch": result.get("torch"), "peers": peers, "cuDNN": result.get("cudnn"),
             "CUDA": result.get("cuda"), "driver": result.get("driver"),
             "sources": result.get("fingerprint"), "measured": result.get("date"),
             "command": result.get("command")}
    parts = ["<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">",
             f"<title>FlashCore on {escape(device)}</title><style>{_STYLE}</style>",
             f"<h1>FlashCore on {escape(device)}</h1>",
             "<p>" + "; ".join(f"{name} {escape(str(value))}" for name, value in facts.items()
                               if value) + "</p>"]
    chart = roofline(result)
    if chart is not None:
        parts += ["<h2>Roofline</h2><p>Each point is a case; its title says which.</p>", chart.svg()]
    charts = latency_charts(result)
    if charts:
        parts.append("<h2>Latency by length</h2><div class=\"charts\">")
        for title, one in charts:
            parts.append(f"<div><h3>{escape(title)}</h3>{one.svg()}</div>")
        parts.append("</div>")
    parts += ["<h2>Cases</h2><p>Medians; a ratio below 1 means that ours takes less time. Rows with "
              "a time of the C call have <code>flashcore.attention</code> under us, others the C "
              "call.</p>",
              *_table(result), "</html>\n"]
    return "\n".join(parts)


def write(result, path):
    """FILE.csv and FILE.html beside FILE.json; their paths."""
    made = []
    for suffix, text in ((".csv", to_csv(result)), (".html", to_html(result))):
        made.append(path.with_suffix(suffix))
        made[-1].write_text(text, encoding="utf-8")
    return made
