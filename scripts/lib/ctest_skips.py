"""Prints `NOT RUN: test: reason` for every test that is skipped in a JUnit report of ctest.

    python3 scripts/lib/ctest_skips.py REPORT.xml
"""
import sys
import xml.etree.ElementTree as ElementTree


def skips(path):
    """[(test, reason)]; the reason is the last line the test printed."""
    found = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            lines = (case.findtext("system-out") or "").strip().splitlines()
            found.append((case.get("name"), lines[-1].strip() if lines else "it skipped itself"))
    return found


if __name__ == "__main__":
    for name, reason in skips(sys.argv[1]):
        print(f"NOT RUN: {name}: {reason}")
