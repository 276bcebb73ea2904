"""Tries an installed package alone, without this checkout: records go through a ring to another process.

Run as a script: `python -I tests/support/round_trip.py`. The peer's code checks each record.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import kvprefetch
from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.layout import Layout
from kvprefetch.shmring.segment import Segment

PEER = Path(__file__).parents[1] / "shmring/peer.py"
RECORDS = 20_000
LARGEST_BYTES = 300


def main() -> None:
    layout = Layout(
        ring_bytes=4096, flag_count=4, page_count=4, table_entries=8, credit_entries=8, slot_count=100, epoch=7
    )
    control, bell, peer = Segment.create(layout.total_bytes), Doorbell.create(), runpy.run_path(str(PEER))
    layout.write(control.buffer)
    child = os.fork()
    if child == 0:
        peer["produce"](control, bell, RECORDS, LARGEST_BYTES, 1)
        os._exit(0)
    took = peer["consume"](control, bell, RECORDS, LARGEST_BYTES, 1)
    _, status = os.waitpid(child, 0)
    assert (took, status) == (RECORDS, 0)
    print(f"{took} records, Python {sys.version.split()[0]}, {os.uname().machine}, kvprefetch {kvprefetch.__version__}")


if __name__ == "__main__":
    main()
