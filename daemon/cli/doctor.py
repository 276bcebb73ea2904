"""`kvprefetchd doctor`: check this machine and configuration, or an engine's, and collect a bundle for helpers."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from kvprefetch.client.control import TIMEOUT_S, Unavailable, look

from ..config.model import ConfigError, DaemonConfig
from ..telemetry.pretty import fitting
from .common import (
    CONFIGURATION_FILE,
    PATH,
    SOCKET_FILE,
    Arguments,
    ConfigurationPage,
    Real,
    accepted,
    configuration_options,
    configuration_sources,
    declare,
    flag,
    of_running,
    option,
    show,
)
from .configuration import as_toml
from .findings import Finding, engine, examine, measured, versions
from .help_page import CommandGroup

PAGE = ConfigurationPage(
    "check libraries, limits, permissions and the store",
    details="Takes the options of serve, and tries what serve would use: it puts a value into a store, finds, reads "
    "and removes it, in a private store or with --mooncake-config in the cluster. Each line is ok, note (works, may "
    "surprise) or bad, with advice. It asks a running daemon and does not disturb it.\n\n"
    "With --engine it examines an engine's environment instead, before the engine starts: run it there, as the "
    "engine's user. It looks at vLLM's version, at the connector's configuration, at the layers that the model's "
    "config.json names, and asks the daemon behind the connector's socket. It loads neither vLLM nor torch.\n\n"
    "With --measure it also loads all this, with fetch_threads calls at a time: it asks the running daemon for its "
    "status and the master for keys, puts 64 values of 1 MiB, reads those of each storage node as the daemon does, and "
    "removes them. With --disk it writes and reads a nameless file of 64 MiB in that folder, past the page cache where "
    "the file system can. Requests of that cluster wait for their share of its links meanwhile.\n\n"
    "The bundle has versions, findings, configuration without secrets, status, metrics and the recent log, which names "
    "requests.",
    examples=(
        ("kvprefetchd doctor", "this machine and the defaults"),
        ("kvprefetchd doctor --config /etc/kvprefetch/kvprefetchd.toml", "with the service's configuration"),
        ("kvprefetchd doctor --engine --model MODEL --kv-transfer-config JSON", "before `vllm serve` with the same"),
        ("kvprefetchd doctor --measure --mooncake-config mooncake.json", "how fast a cluster is, node by node"),
        ("kvprefetchd doctor --bundle doctor.tar.gz --log kvprefetchd.log", "everything for a helper"),
    ),
    exits={
        0: "nothing is bad",
        1: "something is bad",
        69: "the bundle cannot be written",
    },
    files=CONFIGURATION_FILE | SOCKET_FILE,
    also="kvprefetchd check-config, status, estimate; docs/TUNING.md",
)
LOG_BYTES = 4 << 20
_USERINFO = re.compile(r"(://)[^/\s\"'@]+@")
_SECRET = re.compile(
    r"(?i)(\"?[\w-]*(?:password|passwd|token|secret|credential|api_?key)[\w-]*\"?\s*[:=]\s*)(\"[^\"]*\"|\S+)"
)


def add(commands: CommandGroup) -> None:
    log = "the daemon's log, for the bundle (default: the journal)"
    kv = "with --engine: vLLM's option of this name (default: that of the README)"
    declare(
        commands,
        "doctor",
        run,
        PAGE,
        flag("--json", "print versions and findings as JSON, at the end"),
        option("--bundle", metavar="FILE", type=PATH, help="also write everything into this tar.gz"),
        option("--log", metavar="FILE", type=PATH, help=log),
        option(
            "--measure",
            metavar="[SECONDS]",
            is_flag=False,
            flag_value=1.0,
            type=Real(0, 600),
            help="also say how fast each part answers, under load for so long (1)",
        ),
        flag("--engine", "examine an engine's environment, not the daemon's"),
        option("--model", metavar="MODEL", help="with --engine: the model's folder, or its name on the Hub"),
        option("--kv-transfer-config", metavar="JSON", help=kv),
        *configuration_options(),
    )


def run(arguments: Arguments) -> int:
    sources, rows = configuration_sources(arguments), list[dict[str, Any]]()
    given = sources.flags or arguments.config or arguments.bundle or arguments.log or arguments.measure is not None
    if arguments.engine and given:
        raise ConfigError("doctor --engine: takes --model and --kv-transfer-config only, no option of the daemon")
    if not arguments.engine and (arguments.model or arguments.kv_transfer_config):
        raise ConfigError("doctor: --model and --kv-transfer-config need --engine")
    if arguments.engine:
        checks = engine(arguments.model, arguments.kv_transfer_config)
    else:
        effective = accepted(sources)
        config = of_running(effective)
        checks = examine(config)
        if arguments.measure is not None:
            checks = chain(checks, measured(config, arguments.measure, rows))
    found = []
    for name, finding in checks:
        found.append((name, finding))
        if not arguments.json:
            print(_line(name, finding), flush=True)
    if arguments.bundle is not None:
        texts = {
            "versions.json": json.dumps(versions(), indent=2),
            "doctor.txt": "\n".join(_line(*each) for each in found),
            "config.toml": "\n".join(as_toml(effective)),
        }
        try:
            write_bundle(arguments.bundle, config, texts, arguments.log)
        except OSError as error:
            raise Unavailable(f"bundle cannot be written: {error}") from None
        if not arguments.json:
            print(f"wrote {arguments.bundle}")
    bad = [f"{name}: {finding.what}" for name, finding in found if finding.level == "bad"]
    if arguments.json:
        findings = [{"check": name, **finding._asdict()} for name, finding in found]
        show({"versions": versions(), "findings": findings, "measured": rows}, ok=not bad, problems=bad)
    return 1 if bad else 0


def _line(name: str, finding: Finding) -> str:
    advice = f"\n{'':19}-> {fitting(finding.advice)}" if finding.advice else ""
    return f"{finding.level:<5}{name:<14}{fitting(finding.what)}{advice}"


def without_secrets(text: str) -> str:
    """Replace user names and passwords in addresses, and values of keys that sound like secrets."""
    return _SECRET.sub(r"\1[removed]", _USERINFO.sub(r"\1[removed]@", text))


def write_bundle(target: Path, config: DaemonConfig, texts: Mapping[str, str], log: Path | None) -> None:
    """Write these texts and the bundle's own into a tar.gz that only its user may read. Raises OSError."""
    parts = {
        **texts,
        "status.json": _status(config.socket),
        "metrics.txt": _metrics(config.metrics_address, config.metrics_port),
        "log.jsonl": _log(log),
    }
    if config.mooncake_config is not None:
        parts["mooncake.json"] = config.mooncake_config.read_text(errors="replace")
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)  # of a file that was there before, too
    with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in parts.items():
            data = without_secrets(text).encode()
            entry = tarfile.TarInfo(f"kvprefetch/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))


def _status(path: Path) -> str:
    try:
        return look(path, ids=True).model_dump_json(indent=2)
    except Unavailable as error:
        return str(error)


def _metrics(address: str, port: int) -> str:
    try:
        with contextlib.closing(http.client.HTTPConnection(address, port, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", "/metrics")
            return connection.getresponse().read(LOG_BYTES).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no metrics: {error}: metrics_address={address!r} metrics_port={port}"


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
