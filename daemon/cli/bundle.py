"""The bundle of `doctor`: versions, findings, configuration without secrets, recent log, status and metrics."""

from __future__ import annotations

import http.client
import io
import os
import re
import shutil
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from ...shmring.wire.admin import Status, StatusQuery
from ..config.model import DaemonConfig
from .client import Unavailable, ask

LOG_BYTES = 4 << 20
_USERINFO = re.compile(r"(://)[^/\s\"'@]+@")
_SECRET = re.compile(
    r"(?i)(\"?[\w-]*(?:password|passwd|token|secret|credential|api_?key)[\w-]*\"?\s*[:=]\s*)(\"[^\"]*\"|\S+)"
)


def without_secrets(text: str) -> str:
    """Replace user names and passwords in addresses, and values of keys that sound like secrets."""
    return _SECRET.sub(r"\1[removed]", _USERINFO.sub(r"\1[removed]@", text))


def write(target: Path, config: DaemonConfig, texts: Mapping[str, str], log: Path | None) -> None:
    """Write these texts and the bundle's own into a tar.gz that only its user may read. Raises OSError."""
    parts = {**texts, "status.json": _status(config.socket), "metrics.txt": metrics(config), "log.jsonl": _log(log)}
    if config.mooncake_config is not None:
        parts["mooncake.json"] = config.mooncake_config.read_text(errors="replace")
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in parts.items():
            data = without_secrets(text).encode()
            entry = tarfile.TarInfo(f"kvprefetch/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))


def _status(path: Path) -> str:
    try:
        return ask(path, StatusQuery(), Status).model_dump_json(indent=2)
    except Unavailable as error:
        return str(error)


def metrics(config: DaemonConfig) -> str:
    """Return the metrics page of this configuration's daemon, or why there is none."""
    if not config.metrics_port:
        return "switched off: metrics_port=0"
    try:
        url = f"http://{config.metrics_address}:{config.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as page:
            return str(page.read().decode(errors="replace"))
    except (OSError, ValueError, http.client.HTTPException) as error:  # another program may have that port
        return f"not answered: {error}"


def _log(path: Path | None) -> str:
    """Return the end of a log file, or of the unit's journal."""
    try:
        if path is not None:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
                return file.read().decode(errors="replace")
        if shutil.which("journalctl") is None:
            return "no --log FILE given, and no journalctl here"
        journal = ["journalctl", "--no-pager", "-o", "cat", "-u", "kvprefetchd", "-n", "5000"]
        return subprocess.run(journal, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not readable: {error}"
