"""`kvprefetchd doctor`: check this machine and this configuration, say what to do, and collect it all for others."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from . import bundle
from .check_config import shown
from .client import Unavailable
from .common import (
    CONFIGURATION_ENVIRONMENT,
    CONFIGURATION_FILE,
    SOCKET_FILE,
    Commands,
    accepted,
    add_configuration,
    configuration_sources,
    declare,
    find_socket,
)
from .findings import Finding, examine, versions
from .help_page import Page

DETAILS = (
    "Takes the options of serve, and tries what serve would use: a value is put into a store, found, read and removed, "
    "in a private store or with --mooncake-config in the cluster. Each line is ok, note (works, may surprise) or bad, "
    "and says what to do. A daemon that runs is asked, and not disturbed.\n\n"
    "The bundle has versions, findings, configuration without secrets, status, metrics and the recent log, which names "
    "requests."
)
PAGE = Page(
    examples=(
        ("kvprefetchd doctor", "this machine and the defaults"),
        ("kvprefetchd doctor --config /etc/kvprefetch/kvprefetchd.toml", "with the service's configuration"),
        ("kvprefetchd doctor --bundle doctor.tar.gz --log kvprefetchd.log", "everything for whoever helps"),
    ),
    exits={0: "nothing is bad", 1: "something is bad", 69: "the bundle cannot be written"},
    files=CONFIGURATION_FILE | SOCKET_FILE,
    environment=CONFIGURATION_ENVIRONMENT,
    also="kvprefetchd check-config, status",
)


def add(commands: Commands) -> None:
    parser = declare(
        commands, "doctor", "check libraries, limits, permissions and the store", run, PAGE, details=DETAILS
    )
    parser.add_argument("--bundle", metavar="FILE", type=Path, help="also write everything into this tar.gz")
    parser.add_argument(
        "--log", metavar="FILE", type=Path, help="the daemon's log, for the bundle (default: the journal)"
    )
    add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    sources = configuration_sources(arguments)
    effective = accepted(sources)
    if effective.origin["socket"] == "default":  # the daemon to look at, not the one to start
        config = effective.config.model_copy(update={"socket": find_socket(os.environ)})
    else:
        config = effective.config
    lines, bad = [], 0
    for name, finding in examine(config):
        bad += finding.level == "bad"
        lines.append(line_of(name, finding))
        print(lines[-1], flush=True)
    if arguments.bundle is not None:
        try:
            bundle.write(
                arguments.bundle, config, "\n".join(shown(effective)), "\n".join(lines), versions(), arguments.log
            )
        except OSError as error:
            raise Unavailable(f"bundle cannot be written: {error}") from None
        print(f"wrote {arguments.bundle}")
    return 1 if bad else 0


def line_of(name: str, finding: Finding) -> str:
    advice = f"\n{'':16}-> {finding.advice}" if finding.advice else ""
    return f"{finding.level:<5}{name:<11}{finding.what}{advice}"
