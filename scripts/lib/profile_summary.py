"""Summarizes an ncu report in twenty lines. Reads its raw page as CSV: a line of column names, a line of
units, a line per kernel. Ignores any output before the column names."""

import csv
import re

# (printed name, unit, names of the metric). The first metric in the report counts: names differ
# between architectures and versions of ncu.
_FIGURES = (
    ("duration", "us", ("gpu__time_duration.sum",)),
    ("tensor pipe", "%", ("sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
                          "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
                          "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
                          "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active")),
    ("XU (exp2, reciprocal)", "%", ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",)),
    ("FMA pipe", "%", ("sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
                       "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active")),
    ("shared memory", "%", (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
        "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed")),
    ("L2", "%", ("lts__throughput.avg.pct_of_peak_sustained_elapsed",
                 "lts__t_sectors.avg.pct_of_peak_sustained_elapsed")),
    ("DRAM", "%", ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
                   "dram__throughput.avg.pct_of_peak_sustained_elapsed")),
    ("issue slots", "%", ("sm__inst_issued.avg.pct_of_peak_sustained_active",
                          "smsp__issue_active.avg.pct_of_peak_sustained_active")),
    ("occupancy", "%", ("sm__warps_active.avg.pct_of_peak_sustained_active",)),
    ("registers per thread", "", ("launch__registers_per_thread",)),
    ("shared memory per CTA", "bytes", ("launch__shared_mem_per_block_dynamic",)),
)
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis",
            "MemoryWorkloadAnalysis_Tables", "LaunchStats", "Occupancy", "SchedulerStats",
            "WarpStateStats")
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!not_issued)(\w+?)_per_issue_active\.ratio")
_MOST_STALLS = 5
_TO_US = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3,
          "second": 1e6, "s": 1e6}


class NoKernel(Exception):
    """The text is not a report, or it has no kernel."""


def parse(text):
    """([{column: value} per kernel], {column: unit})."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise NoKernel("ncu printed no table")
    rows = list(csv.reader(lines[start:]))
    names, units = rows[0], rows[1] if len(rows) > 1 else []
    kernels = [dict(zip(names, row)) for row in rows[2:] if len(row) == len(names)]
    if not kernels:
        raise NoKernel("ncu's table has no kernel")
    return kernels, dict(zip(names, units))


def number(text):
    """1,234.5 -> 1234.5; None for other text ("n/a", "")."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def figure(kernel, units, names):
    """(value, unit) of the first metric that the report has, or None."""
    for name in names:
        value = number(kernel.get(name, ""))
        if value is not None:
            return value, units.get(name, "")
    return None


def stalls(kernel):
    """[(stall reason, stalled warps per issued instruction)], largest first."""
    found = []
    for name, text in kernel.items():
        match, value = _STALL.fullmatch(name), number(text)
        if match is not None and value is not None:
            found.append((match.group(1).replace("_", " "), value))
    return sorted(found, key=lambda one: -one[1])


def summary(text):
    """The summary of the first kernel, as text."""
    kernels, units = parse(text)
    kernel = kernels[0]
    lines = [f"{'kernel':<24} {kernel.get('Kernel Name', '?').split('(')[0][:120]}",
             f"{'grid, block':<24} {kernel.get('Grid Size', '?')}, {kernel.get('Block Size', '?')}"]
    for words, shown_unit, names in _FIGURES:
        found = figure(kernel, units, names)
        if found is None:
            lines.append(f"{words:<24} not reported by this ncu")
            continue
        value, unit = found
        if shown_unit == "us":
            value *= _TO_US.get(unit, 1.0)
        elif shown_unit == "bytes" and unit.lower().startswith("kbyte"):
            value *= 1000
        lines.append(f"{words:<24} {value:10.4g} {shown_unit}".rstrip())
    lines.append("top stalls, in stalled warps per issued instruction:")
    lines += [f"  {reason:<22} {value:10.2f}" for reason, value in stalls(kernel)[:_MOST_STALLS]]
    return "\n".join(lines)
