"""Entry point of python3 -m flashcore.bench."""

import sys

from flashcore.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
