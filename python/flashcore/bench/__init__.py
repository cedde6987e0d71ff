"""Benchmark of FlashCore against every installed attention library: python3 -m flashcore.bench."""

from flashcore.bench.command import main as main
