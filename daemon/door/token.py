"""The token that callers over TCP send to the HTTP door."""

from __future__ import annotations

import os
from pathlib import Path

MIN_TOKEN, MAX_TOKEN = 16, 4096  # bytes


def read_token(path: Path) -> bytes:
    """Return the token that a file has on its first line. Raises OSError and ValueError."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o007:
            raise ValueError("other users may read it: chmod o= FILE")
        token = file.readline(MAX_TOKEN + 2).strip()
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        raise ValueError(f"should have {MIN_TOKEN} to {MAX_TOKEN} bytes on its first line: bytes={len(token)}")
    return token
