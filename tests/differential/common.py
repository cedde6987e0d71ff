"""What the parts of the differential suite share: where the package is, and how results are counted."""

import collections
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(FOLDER))
for one in (os.path.join(TREE, "tests", "python"), os.path.join(TREE, "python")):
    if one not in sys.path:
        sys.path.insert(0, one)

SHOWN = 20  # findings in full; the rest is counted


class Tally:
    """Counts of one part. It prints one line and passes only where nothing is wrong and nothing has
    gone: `at_least` holds the numbers of right results that must be reached, by kind."""

    def __init__(self, name, at_least):
        self.name, self.at_least = name, at_least
        self.counts, self.refusals, self.omissions = (collections.Counter() for _ in range(3))
        self.findings = []

    def right(self, kind):
        self.counts[kind] += 1

    def refused(self, reason):
        """FlashCore raised, and docs/python.md says that it does."""
        self.refusals[reason] += 1

    def omitted(self, reason):
        """A result that FlashCore does not give; the others of the same case are compared."""
        self.omissions[reason] += 1

    def wrong(self, what):
        self.findings.append(what)

    def judge(self, kind, what, error, limit):
        """A comparison: right up to the limit. NaN is wrong."""
        if error <= limit:
            self.right(kind)
        else:
            self.wrong(f"{what}: error {error:.2e}, may be {limit:.1e}")

    def line(self):
        def words(counts):
            return f" ({', '.join(f'{name} {count}' for name, count in counts.items())})" if counts else ""
        text = (f"{self.name}: {self.counts.total()} right{words(self.counts)}, "
                f"{self.refusals.total()} refused{words(self.refusals)}")
        if self.omissions:
            text += f", {self.omissions.total()} omitted{words(self.omissions)}"
        return f"{text}, {len(self.findings)} wrong"

    def finish(self):
        """The exit code, after the findings and the line."""
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
