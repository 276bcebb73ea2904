"""Whose namespaces these are, beside the values on a disk tier, which would evict that sooner or later.

One JSON file of keys and values. The tier's folder belongs to one daemon, so there is one writer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from pathlib import Path

FILE = "fingerprints.json"


class Fingerprints:
    """What was put, in the folder of a disk tier; from any thread. Without a folder nothing is kept.

    A file that cannot be read, or not be written, keeps nothing either: DiskWatch says what is wrong with the disk.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / FILE if folder is not None else None
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        """Its value, or b""."""
        with self._lock:
            return self._read().get(key, "").encode()

    def put(self, key: str, value: bytes) -> None:
        with self._lock:
            if (all_ := self._read()).get(key) != (text := value.decode(errors="replace")):
                self._write({**all_, key: text})

    def remove(self, a_key: str) -> None:
        """Of each key that `a_key`, a regular expression, matches as a whole."""
        with self._lock:
            all_ = self._read()
            kept = {key: value for key, value in all_.items() if not re.fullmatch(a_key, key)}
            if kept != all_:
                self._write(kept)

    def _read(self) -> dict[str, str]:
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                return {str(key): str(value) for key, value in json.loads(self._file.read_bytes()).items()}
        return {}

    def _write(self, all_: dict[str, str]) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            fresh = self._file.with_suffix(".new")
            with fresh.open("w") as file:
                json.dump(all_, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._file)
