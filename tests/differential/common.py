"""Shared by the parts of the differential suite: the path of the package, and the count of results."""

import collections
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(FOLDER))
for one in (os.path.join(TREE, "tests", "python"), os.path.join(TREE, "python")):
    if one not in sys.path:
        sys.path.insert(0, one)

SHOWN = 20  # findings to print; further ones are only counted


class Tally:
    """Counts the results of one part and prints them as one line. A part passes if no result is wrong
    and every kind in `at_least` has at least that number of right results."""

    def __init__(self, name, at_least):
        self.name, self.at_least = name, at_least
        self.counts, self.refusals, self.omissions = (collections.Counter() for _ in range(3))
        self.findings = []

    def right(self, kind):
        self.counts[kind] += 1

    def refused(self, reason):
        """FlashCore raises an exception that docs/python.md documents."""
        self.refusals[reason] += 1

    def omitted(self, reason):
        """FlashCore does not compute this result. The other results of the case are compared."""
        self.omissions[reason] += 1

    def wrong(self, what):
        self.findings.append(what)

    def judge(self, kind, what, error, limit):
        """Counts a comparison: right if the error is at most the limit. NaN is wrong."""
        if error <= limit:
            self.right(kind)
        else:
            self.wrong(f"{what}: error {error:.2e}, limit {limit:.1e}")

    def line(self):
        def detail(counts):
            return f" ({', '.join(f'{name} {count}' for name, count in counts.items())})" if counts else ""
        text = (f"{self.name}: {self.counts.total()} right{detail(self.counts)}, "
                f"{self.refusals.total()} refused{detail(self.refusals)}")
        if self.omissions:
            text += f", {self.omissions.total()} omitted{detail(self.omissions)}"
        return f"{text}, {len(self.findings)} wrong"

    def finish(self):
        """Prints the findings and the line. Returns the exit code."""
        for kind, count in self.at_least.items():
            if self.counts[kind] < count:
                self.wrong(f"{kind}: {self.counts[kind]} right results; there were {count} or more")
        for one in self.findings[:SHOWN]:
            print(f"WRONG {one}")
        if len(self.findings) > SHOWN:
            print(f"... and {len(self.findings) - SHOWN} more")
        print(self.line(), flush=True)
        return 1 if self.findings else 0


def short(error):
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
