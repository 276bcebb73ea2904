"""Runs pieces of the benchmark of served engines and writes one JSON for each: `python -m benchmarks.served`."""

from __future__ import annotations

import sys

from benchmarks.bench.__main__ import main
from benchmarks.served.lab import PacedLab
from benchmarks.served.pieces import PIECES

if __name__ == "__main__":
    sys.exit(main(module="benchmarks.served", table=PIECES, lab=PacedLab))
