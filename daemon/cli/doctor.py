"""`kvprefetchd doctor`: check this machine and configuration, advise, and collect a bundle for helpers."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from . import bundle
from .check_config import as_toml
from .client import Unavailable
from .common import (
    CONFIGURATION_FILE,
    SOCKET_FILE,
    Commands,
    ConfigurationPage,
    accepted,
    add_configuration,
    configuration_sources,
    declare,
    find_socket,
)
from .findings import Finding, examine, versions

PAGE = ConfigurationPage(
    "check libraries, limits, permissions and the store",
    details="Takes the options of serve, and tries what serve would use: it puts a value into a store, finds, reads "
    "and removes it, in a private store or with --mooncake-config in the cluster. Each line is ok, note (works, may "
    "surprise) or bad, with advice. It asks a running daemon and does not disturb it.\n\n"
    "The bundle has versions, findings, configuration without secrets, status, metrics and the recent log, which names "
    "requests.",
    examples=(
        ("kvprefetchd doctor", "this machine and the defaults"),
        ("kvprefetchd doctor --config /etc/kvprefetch/kvprefetchd.toml", "with the service's configuration"),
        ("kvprefetchd doctor --bundle doctor.tar.gz --log kvprefetchd.log", "everything for a helper"),
    ),
    exits={0: "nothing is bad", 1: "something is bad", 69: "the bundle cannot be written"},
    files=CONFIGURATION_FILE | SOCKET_FILE,
    also="kvprefetchd check-config, status",
)


def add(commands: Commands) -> None:
    parser = declare(commands, "doctor", run, PAGE)
    parser.add_argument("--bundle", metavar="FILE", type=Path, help="also write everything into this tar.gz")
    log = "the daemon's log, for the bundle (default: the journal)"
    parser.add_argument("--log", metavar="FILE", type=Path, help=log)
    add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    effective = accepted(configuration_sources(arguments))
    config = effective.config
    if effective.origin["socket"] == "default":  # look at the daemon that runs, not at the one that would start
        config = config.model_copy(update={"socket": find_socket(os.environ)})
    lines, bad = [], 0
    for name, finding in examine(config):
        bad += finding.level == "bad"
        lines.append(_line(name, finding))
        print(lines[-1], flush=True)
    if arguments.bundle is not None:
        texts = {
            "versions.json": json.dumps(versions(), indent=2),
            "doctor.txt": "\n".join(lines),
            "config.toml": "\n".join(as_toml(effective)),
        }
        try:
            bundle.write(arguments.bundle, config, texts, arguments.log)
        except OSError as error:
            raise Unavailable(f"bundle cannot be written: {error}") from None
        print(f"wrote {arguments.bundle}")
    return 1 if bad else 0


def _line(name: str, finding: Finding) -> str:
    advice = f"\n{'':16}-> {finding.advice}" if finding.advice else ""
    return f"{finding.level:<5}{name:<11}{finding.what}{advice}"
