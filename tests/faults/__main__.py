"""`make faults`: the campaign of faults, and its report docs/RELIABILITY.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.faults import report
from tests.faults.campaign import World
from tests.faults.faults import faults, summary
from tests.lab import process


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=240.0, help="no run begins after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/faults.json"), help="the verdicts")
    parser.add_argument("--publish", action="store_true", help="write docs/RELIABILITY.md")
    chosen = parser.parse_args()
    began, rows = time.monotonic(), []
    with World(process.scratch("faults"), chosen.seed) as world:
        for number, fault in enumerate(faults(chosen.runs, chosen.seed), start=1):
            if time.monotonic() - began > 60 * chosen.minutes:
                break
            if (why := world.cannot(fault)) is not None:
                print(f"{number}: {fault.victim} {fault.kind} left out: {why}")
                continue
            verdict = world.run(fault)
            rows.append(verdict.row())
            said = "; ".join(verdict.failures) or "all as promised"
            print(f"[{time.monotonic() - began:6.0f} s] {number}: {fault.victim} {fault.kind} at {fault.where}: {said}")
            sys.stdout.flush()
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text(json.dumps(rows))
    for line in (failed := summary(rows)):
        print(line)
    if chosen.publish:
        report.write(rows, time.monotonic() - began)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
