"""What commands share: how one is declared, and the options several of them take."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ...shmring import messages
from ...shmring.messages import default_socket
from ..client import Unavailable
from ..config import DaemonConfig
from ..sources import FILE_VARIABLE, PREFIX, Sources

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
Run = Callable[[argparse.Namespace], int]

SYSTEM_SOCKET = Path("/run/kvprefetch/kvprefetchd.sock")


def declare(commands: Commands, name: str, text: str, run: Run, *, details: str = "") -> argparse.ArgumentParser:
    """Add a command; `run` gets the parsed arguments and returns the exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}. {details}", allow_abbrev=False
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_socket(parser: argparse.ArgumentParser) -> None:
    """`--socket PATH`, for a command that asks a running daemon."""
    parser.add_argument(
        "--socket", metavar="PATH", type=Path, default=find_socket(os.environ),
        help="the daemon's control socket (default: %(default)s)",
    )  # fmt: skip


def find_socket(environ: Mapping[str, str]) -> Path:
    """$KVPREFETCHD_SOCKET, else this user's daemon where its socket exists, else the system's."""
    if named := environ.get(f"{PREFIX}SOCKET"):
        return Path(named)
    own = Path(default_socket(environ))
    return SYSTEM_SOCKET if not own.exists() and SYSTEM_SOCKET.exists() else own


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """`--config` and one option per key of the configuration."""
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"TOML file of the same keys (or ${FILE_VARIABLE})")
    for name, field in DaemonConfig.model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        shown = "none" if default in (None, ()) else default
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="VALUE", help=f"{field.description or ''} (default: {shown})"
        )


def configuration_sources(arguments: argparse.Namespace) -> Sources:
    """Where a command with `add_configuration` takes its configuration from."""
    return Sources.of({name: getattr(arguments, name) for name in DaemonConfig.model_fields}, arguments.config)


def report(received: tuple[messages.Message, list[int]]) -> int:
    """Print a running daemon's answer to an order; the exit status is 0 when it was carried out, else 1."""
    answer, _ = received
    if not isinstance(answer, messages.Report):
        raise Unavailable(f"the daemon answered with something else: type={answer.type}")
    print(answer.text)
    return 0 if answer.ok else 1
