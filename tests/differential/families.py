"""Every model family of transformers with attn_implementation="flashcore": runs
tests/python/transformers_families.py over its whole list and checks that no count has dropped.

    python3 tests/differential/families.py [--jobs 2] [NAME...]"""

import re
import subprocess
import sys

import common

CELL = re.compile(r"    [\w ]+: (?:wrong|fails)")
PROGRAM = f"{common.TREE}/tests/python/transformers_families.py"
LINE = re.compile(r"(?:causal|seq2seq|encoder|vision) (\S+): "
                  r"(right, with refusals|right|wrong|refused|no attention|not built) ")
# With transformers 5.23. Newer versions have more families.
AT_LEAST = {"right": 195}


def main(arguments):
    chosen = arguments if any(not one.startswith("-") and not one.isdigit() for one in arguments) else [
        "--all", *arguments]
    tally = common.Tally("families", AT_LEAST if "--all" in chosen else {"right": 1})
    process = subprocess.Popen([sys.executable, PROGRAM, *chosen], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        found = LINE.match(line)
        if found is None:
            if CELL.match(line) and tally.findings:  # belongs to the family of the last finding
                tally.findings[-1] += " " + line.strip()
            continue
        name, verdict = found.groups()
        if verdict == "wrong":
            tally.wrong(f"{name}: {line[found.end():].strip()}".rstrip())
        elif verdict == "refused":
            tally.refused("computes attention by itself")
        elif verdict in ("no attention", "not built"):
            tally.omitted(verdict)
        else:
            tally.right(verdict)
    if process.wait() not in (0, 1):
        tally.wrong(f"transformers_families.py exited with code {process.returncode}")
    return tally.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
