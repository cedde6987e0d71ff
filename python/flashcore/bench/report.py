"""A result file as CSV and as an HTML page: speed relative to the best peer, latency by length, and a
table. The page is self-contained."""

import csv
import io
from html import escape
from typing import Any

from flashcore.bench.cases import FIELDS, Case
from flashcore.bench.chart import Chart
from flashcore.bench.narrow_speed_chart import NarrowSpeedChart
from flashcore.bench.speed_chart import SpeedChart, bars_of, shown_suites
from flashcore.bench.table import baselines, c_call, device

# Wide tables scroll inside their box, so that the page itself never does.
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
svg { display: block; } svg.speed { max-width: 100%; height: auto; }
.narrow { display: none; } .narrow svg.speed { width: 100%; }
.narrow svg.speed text { paint-order: stroke; stroke: #ffffff; stroke-width: 3px; }
.charts svg { width: 100%; max-width: 46rem; font: 13px system-ui, sans-serif; }
.charts text { fill: currentColor; } .grid { stroke: #8886; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; }
td, th { padding: .15rem .6rem; text-align: right; }
td:nth-child(-n+3), th:nth-child(-n+3) { text-align: left; } tr:nth-child(even) { background: #8882; }
td.faster { color: #2f81c7; } td.slower { color: #d06f28; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: 13px; }
dt { opacity: .7; } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 640px) { .wide { display: none; } .narrow { display: block; } }
@media (prefers-color-scheme: dark) {
body { background: #0d1117; } .narrow svg.speed text { stroke: #0d1117; }
}
"""


def _peers(rows):
    return sorted({name for row in rows for name in row["peers_us"]})


def to_csv(result):
    """One line per case. Times are in microseconds, ratios are ours / peer."""
    rows, peers = result["rows"], _peers(result["rows"])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    compared = sorted({name for row in rows for name in row.get("baseline_ratios", {})})
    writer.writerow([*FIELDS, "kernel", "splits", "call", "us", "bare_us", "spread", "tflops", "error",
                     *(f"ours_over_{name}" for name in compared),
                     *(f"{name}_us" for name in peers), *(f"ours_over_{name}" for name in peers)])
    for row in rows:
        case = Case.of(row)
        writer.writerow([*(row[name] for name in FIELDS), row["kernel"], row.get("splits", ""),
                         row.get("call", ""), row["us"], row.get("bare_us", ""), row["spread"],
                         case.flops() / row["us"] / 1e6, row["error"],
                         *(row.get("baseline_ratios", {}).get(name, "") for name in compared),
                         *(row["peers_us"].get(name, "") for name in peers),
                         *(row.get("ratios", {}).get(name, "") for name in peers)])
    return text.getvalue()


def _times(row):
    return {"ours": row["us"], **row["peers_us"]}


def _group(case):
    """The title of a case's chart. Cases with the same title differ in length and batch only."""
    phase = "gradients" if case.kind == "bwd" else "decode" if case.q_len == 1 else "prefill"
    heads = case.shape_text().split(",")[1]
    return f"{phase} {case.dtype}, heads {heads}, dim {case.head_dim}" + (", causal" if case.causal else "")


def _is_dense(case):
    return not (case.used_k or case.packed or case.page_size or case.window or case.v_dim
                or case.options.given())


def latency_charts(result):
    """[(title, chart)]: one chart per suite and group of dense cases that differ only in length and batch.

    If a group has several batches of one length, each batch has its own chart."""
    shown = shown_suites(result["rows"])
    groups: dict[tuple[str, str], list[tuple[Any, Any]]] = {}
    for row in result["rows"]:
        case = Case.of(row)
        if case.suite in shown and _is_dense(case):
            groups.setdefault((case.suite, _group(case)), []).append((case, row))
    charts = []
    for (_, title), members in groups.items():
        lengths = [case.kv_len for case, _ in members]
        if len(set(lengths)) == len(lengths):
            charts.append((title, members))
            continue
        for batch in sorted({case.batch for case, _ in members}):
            charts.append((f"{title}, batch {batch}",
                           [(case, row) for case, row in members if case.batch == batch]))
    return [(title, _latency_chart(members)) for title, members in charts
            if len({case.kv_len for case, _ in members}) > 1]


def _latency_chart(members):
    series: dict[str, list[tuple[float, float, str]]] = {}
    for case, row in members:
        for name, us in _times(row).items():
            series.setdefault(name, []).append(
                (case.kv_len, us, f"{case.name} {case.shape_text()}: {us:.4g} us"))
    return Chart("keys", "us per call", series)


def _table(result):
    peers = _peers(result["rows"])
    yield ("<div class=\"scroll\"><table><tr><th>case<th>batch, heads, len, dim<th>kernel<th>us<th>C call us<th>TFLOP/s"
           "<th>error<th>ours / baselines")
    yield "".join(f"<th>{escape(name)} us<th>ours / {escape(name)}" for name in peers) + "</tr>"
    for row in result["rows"]:
        case = Case.of(row)
        cells = [escape(case.name), escape(case.shape_text()), escape(row["kernel"]),
                 f"{row['us']:.4g}", c_call(row), f"{case.flops() / row['us'] / 1e6:.3g}",
                 f"{row['error']:.2g}", escape(baselines(row))]
        yield "<tr>" + "".join(f"<td>{cell}" for cell in cells)
        for name in peers:
            if name not in row["peers_us"]:
                yield f"<td title=\"{escape(row.get('peers_note', {}).get(name, ''))}\">-<td>"
                continue
            ratio = row["ratios"][name]
            kind = "faster" if ratio < 1 else "slower"
            yield f"<td>{row['peers_us'][name]:.4g}<td class=\"{kind}\">{ratio:.2f}"
        yield "</tr>"
    yield "</table></div>"


def to_html(result):
    machine = device(result)
    peers = ", ".join(f"{name} {found}" for name, found in result.get("peers", {}).items())
    facts = {"torch": result.get("torch"), "peers": peers, "cuDNN": result.get("cudnn"),
             "CUDA": result.get("cuda"), "driver": result.get("driver"),
             "sources": result.get("fingerprint"), "measured": result.get("date"),
             "command": result.get("command")}
    parts = ["<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">",
             "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">",
             f"<title>FlashCore on {escape(machine)}</title><style>{_STYLE}</style>",
             f"<h1>FlashCore on {escape(machine)}</h1>"]
    bars = bars_of(result)
    if bars:
        parts += ["<div class=\"wide\">", SpeedChart(result, bars).svg(), "</div><div class=\"narrow\">",
                  NarrowSpeedChart(result, bars).svg(), "</div>"]
    else:
        parts.append("<p>No case has a peer's time.</p>")
    charts = latency_charts(result)
    if charts:
        parts.append("<h2>Latency by length</h2><div class=\"charts\">")
        for title, one in charts:
            parts.append(f"<div><h3>{escape(title)}</h3>{one.svg()}</div>")
        parts.append("</div>")
    parts += ["<h2>Cases</h2><p>Medians. A ratio below 1 means that ours takes less time. In rows with "
              "a C call time, us is the time of <code>flashcore.attention</code>; in other rows it is "
              "the time of the C call. Baselines are other calls in the same rounds: "
              "<code>plain</code> is the case without its options.</p>",
              *_table(result), "<h2>Setup</h2><dl>",
              *(f"<dt>{name}<dd>{escape(str(value))}" for name, value in facts.items() if value),
              "</dl></html>\n"]
    return "\n".join(parts)


def write(result, path):
    """Writes FILE.csv and FILE.html next to FILE.json. Returns their paths."""
    made = []
    for suffix, text in ((".csv", to_csv(result)), (".html", to_html(result))):
        made.append(path.with_suffix(suffix))
        made[-1].write_text(text, encoding="utf-8")
    return made
