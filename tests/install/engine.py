"""An engine on a booted machine: `python -m tests.install.engine WHAT NAME`, in the environment of an engine there.

`save` saves values under a name and loads them, `load` finds them again; each says what came from the disk.
`save-and-stop` then stops the daemon at once, before a disk's heartbeat of a second. `knock` connects again and again
until the file NAME is there, and fails when a connection is refused.
"""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

# So much that a disk has not written it yet when the daemon is stopped at once.
BLOCKS, BLOCK_BYTES = 8, 1 << 20
SOCKET = Path("/run/kvprefetch/kvprefetchd.sock")


def main(what: str, name: str) -> None:
    if what == "knock":
        count = 0
        while not Path(name).exists():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(str(SOCKET))
            count += 1
            time.sleep(0.02)
        print(f"connected {count} times")
        return
    digests = [hashlib.sha256(f"{name}-{number}".encode()).digest() for number in range(BLOCKS)]
    blocks = {digest: digest * (BLOCK_BYTES // len(digest)) for digest in digests}
    engine = FakeEngine(SOCKET, engine_id=name, block_bytes=BLOCK_BYTES)
    if what != "load":
        engine.save(blocks)
    eventually(lambda: engine.load(digests, name=f"request-{name}") == [*blocks.values()], 30, "a hit")
    if what == "save-and-stop":
        subprocess.run(["systemctl", "stop", "kvprefetchd"], check=True)
    print(f"{engine.disk_blocks} of {BLOCKS} from disk")
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
