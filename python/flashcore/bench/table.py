"""Result rows as text: lines during a run, and a Markdown table for the docs."""

from typing import Any

from flashcore.bench.cases import Case


def print_heading() -> None:
    print(f"{'case':<16} {'batch,heads,len,dim':<30} {'kernel':<22} {'us':>9} {'spread':>7} "
          f"{'C us':>9} {'TFLOP/s':>8} {'error':>8}  peers: us (ours/peer; below 1 ours is faster)", flush=True)


def print_row(case: Case, row: dict[str, Any]) -> None:
    peers = "  ".join(f"{name} {us:.4g} ({row['ratios'][name]:.2f})"
                      for name, us in row["peers_us"].items())
    print(f"{case.name:<19} {case.shape_text():<30} {row['kernel']:<22} {row['us']:>9.4g} "
          f"{100 * row['spread']:>6.1f}% {c_call(row):>9} {row['tflops']:>8.3g} "
          f"{row['error']:>8.2g}  {'  '.join(filter(None, (baselines(row), peers)))}", flush=True)


def listing(cases: list[Case]) -> str:
    """One line per case: suite, name, shape and what it is compared with."""
    widths = [max((len(text) for text in texts), default=0) for texts in (
        [case.suite for case in cases], [case.name for case in cases], [case.shape_text() for case in cases])]
    return "\n".join(
        f"{case.suite:<{widths[0]}}  {case.name:<{widths[1]}}  {case.kind}  {case.shape_text():<{widths[2]}}  "
        f"{'against ' + ', '.join(case.baselines) if case.baselines else ''}".rstrip() for case in cases)


def baselines(row: dict[str, Any]) -> str:
    """The row's time over those of its baselines: "1.05 of plain"."""
    return ", ".join(f"{ratio:.3g} of {name}" for name, ratio in row.get("baseline_ratios", {}).items())


def c_call(row: dict[str, Any]) -> str:
    """The time of the bare C call; empty if `us` is that time already."""
    return f"{row['bare_us']:.4g}" if "bare_us" in row else ""


def device(result: dict[str, Any]) -> str:
    """The machine of a result file, for headings."""
    return result.get("gpu") or f"{result.get('cpu', 'CPU')}, {result.get('threads', '?')} threads"


def best_peer(row: dict[str, Any]) -> str | None:
    """The fastest peer; None if no peer was timed."""
    times: dict[str, float] = row["peers_us"]
    return min(times, key=times.__getitem__) if times else None


def markdown(result: dict[str, Any]) -> str:
    """A result file as a Markdown table, one row per case."""
    peers = sorted({name for row in result["rows"] for name in row["peers_us"]})
    heading = ["case", "batch, heads, len, dim", "kernel", "us", "C call us", "spread", "TFLOP/s",
               "error", *peers, "ours / best peer", "ours / baselines"]
    lines = ["| " + " | ".join(heading) + " |", "|-|-|-|" + "-:|" * (len(heading) - 3)]
    for row in result["rows"]:
        case = Case.of(row)
        times = row["peers_us"]
        best = best_peer(row)
        cells = [case.name, case.shape_text(), f"`{row['kernel']}`", f"{row['us']:.4g}", c_call(row),
                 f"{100 * row['spread']:.1f} %", f"{case.flops() / row['us'] / 1e6:.3g}",
                 f"{row['error']:.2g}"]
        cells += [f"{times[name]:.4g}" if name in times else "" for name in peers]
        ratio = row.get("ratios", {}).get(best) if best else None
        cells += [f"{ratio:.2f} ({best})" if ratio is not None else "", baselines(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
