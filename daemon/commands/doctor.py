"""`kvprefetchd doctor`: check this machine and this configuration, say what to do, and collect it all for others."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import bundle
from ..client import Unavailable
from ..doctor import Finding, examine, versions
from ..sources import resolve
from .check_config import check_files, shown
from .common import Commands, add_configuration, configuration_sources, declare, find_socket

DETAILS = (
    "Takes the options of serve. The exit status is 1 when something is bad. The bundle has versions, findings, "
    "configuration without secrets, status, metrics and the recent log, which names requests."
)


def add(commands: Commands) -> None:
    parser = declare(commands, "doctor", "check libraries, limits, permissions and the store", run, details=DETAILS)
    parser.add_argument("--bundle", metavar="FILE", type=Path, help="also write everything into this tar.gz")
    parser.add_argument(
        "--log", metavar="FILE", type=Path, help="the daemon's log, for the bundle (default: the journal)"
    )
    add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    sources = configuration_sources(arguments)
    effective = resolve(sources)
    if effective.origin["socket"] == "default":  # the daemon to look at, not the one to start
        config = effective.config.model_copy(update={"socket": find_socket(sources.environ)})
    else:
        config = effective.config
    check_files(config)
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
