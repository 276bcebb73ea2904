"""What commands share: how one is declared, and the options several of them take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from ...shmring.protocol import default_socket

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
Run = Callable[[argparse.Namespace], int]


def declare(commands: Commands, name: str, text: str, run: Run, *, details: str = "") -> argparse.ArgumentParser:
    """Add a command; `run` gets the parsed arguments and returns the exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}. {details}", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def add_socket(parser: argparse.ArgumentParser) -> None:
    """`--socket PATH`, for a command that asks a running daemon."""
    parser.add_argument(
        "--socket", metavar="PATH", type=Path, default=Path(default_socket()),
        help="the daemon's control socket (default: %(default)s)",
    )  # fmt: skip
