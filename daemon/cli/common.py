"""Shared by the commands: how to declare one, and the options that several of them take."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, get_args

from pydantic.fields import FieldInfo

from ...shmring.wire.admin import Report
from ...shmring.wire.codec import Message
from ...shmring.wire.control_socket import default_socket
from ..config.machine import machine_bytes
from ..config.model import SIZES, ConfigError, DaemonConfig
from ..config.sizes import size_text, whole_mib
from ..config.sources import FILE_VARIABLE, PREFIX, Effective, Sources, resolve
from ..control.access import group_id
from ..store.disk import DiskSpec
from ..store.settings import MooncakeSettings, SettingsError
from .client import TIMEOUT_S, ask
from .help_page import HelpFormatter, HelpPage

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
Run = Callable[[argparse.Namespace], int]
_OPTION_WIDTH = 24  # a wider option does not fit a narrow terminal; then the description names the choices
_UNSET = {"socket_group": "the process's", "master_port": "a free one", "lease_ms": "as the store's"}

SYSTEM_SOCKET = Path("/run/kvprefetch/kvprefetchd.sock")
SOCKET_FILE = {str(SYSTEM_SOCKET): "the control socket of the system's daemon"}
CONFIGURATION_FILE = {
    "/etc/kvprefetch/kvprefetchd.toml": "the configuration of the systemd service, which names it with --config; a "
    "command reads no file unless you name it"
}
CONFIGURATION_ENVIRONMENT = {
    f"{PREFIX}<KEY>": f"a key of the configuration, such as {PREFIX}STAGING=8GiB; stronger than the file",
    FILE_VARIABLE: "the TOML file, where --config is not given",
    "RUNTIME_DIRECTORY, XDG_RUNTIME_DIR": "where the control socket lies by default",
}
NO_COLOR = {"NO_COLOR": "not empty: no colours on a terminal"}
# The help page of a command that asks a running daemon, and of one that takes the configuration.
SocketPage = partial(
    HelpPage,
    files=SOCKET_FILE,
    environment={
        f"{PREFIX}SOCKET": "the control socket, where --socket is not given",
        "XDG_RUNTIME_DIR": "the socket of a user's own daemon lies below it, in kvprefetch/",
    },
)
ConfigurationPage = partial(HelpPage, files=CONFIGURATION_FILE, environment=CONFIGURATION_ENVIRONMENT)


def declare(commands: Commands, name: str, run: Run | None, page: HelpPage) -> argparse.ArgumentParser:
    """Add a command; `run` gets the parsed arguments and returns the exit status. A command of commands has none."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=page.summary,
        description=page.description,
        epilog=page.sections(),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser, page=page)
    return parser


def add_socket(parser: argparse.ArgumentParser) -> None:
    text = "the daemon's control socket (default: %(default)s)"
    parser.add_argument("--socket", metavar="PATH", type=Path, default=find_socket(os.environ), help=text)


def find_socket(environ: Mapping[str, str]) -> Path:
    """Return $KVPREFETCHD_SOCKET, else the socket of this user's daemon where it exists, else the system's."""
    if named := environ.get(f"{PREFIX}SOCKET"):
        return Path(named)
    own = Path(default_socket(environ))
    return SYSTEM_SOCKET if not own.exists() and SYSTEM_SOCKET.exists() else own


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and one option for each key of the configuration."""
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"TOML file of the same keys (or ${FILE_VARIABLE})")
    for name, field in DaemonConfig.model_fields.items():
        kind = "SIZE" if name in SIZES else kind_of(field)
        if len(name) + len(kind) > _OPTION_WIDTH:
            kind = "VALUE"
        text = f"{field.description or ''} (default: {default_text(name, field)})"
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=kind, help=text)


def default_text(name: str, field: FieldInfo) -> str:
    """Return a key's default in words; for a key without one, its effect."""
    default: Any = field.get_default(call_default_factory=True)
    if default in (None, ()):
        return _UNSET.get(name, "none")
    return size_text(default) if name in SIZES else str(default)


def kind_of(field: FieldInfo) -> str:
    """Return a placeholder for the value of a key: its choices, or its kind."""
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    if all(isinstance(kind, str) for kind in kinds):
        return f"{{{','.join(kinds)}}}"
    names = {int: "N", float: "X", Path: "PATH"}
    return names.get(kinds[0], "VALUE") if isinstance(kinds[0], type) else "VALUE"


def configuration_sources(arguments: argparse.Namespace) -> Sources:
    """Return the sources of the configuration, for a command with `add_configuration`."""
    return Sources.of({name: getattr(arguments, name) for name in DaemonConfig.model_fields}, arguments.config)


def accepted(sources: Sources) -> Effective:
    """Return the configuration with which serve would start. Raises ConfigError, also for valid values that together
    make serve refuse."""
    effective = resolve(sources)
    config = effective.config
    try:
        if config.mooncake_config is not None:
            MooncakeSettings.from_file(config.mooncake_config)
        elif config.disk is not None:
            DiskSpec.parse(config.disk)
    except SettingsError as error:
        raise ConfigError(str(error)) from None
    if config.socket_group is not None:
        group_id(config.socket_group)
    for name in ("staging",) if config.mooncake_config is not None else ("staging", "memory"):
        if (size := getattr(config, name)) > (most := machine_bytes()):
            raise ConfigError(f"{name}: is more than this machine has: {name}={size_text(size)} max={whole_mib(most)}")
    return effective


def seconds(text: str, *, least: float = 0.0) -> float:
    """Read an option's seconds, up to an hour."""
    with contextlib.suppress(ValueError):
        if least <= (value := float(text)) <= 3600:
            return value
    raise argparse.ArgumentTypeError(f"should be seconds from {least:g} to 3600: {text!r}")


def command_daemon(command: Message, socket: Path, timeout_s: float = TIMEOUT_S) -> int:
    """Send an admin command and print the daemon's report. Returns exit status 0 when the daemon did it, else 1."""
    report = ask(socket, command, Report, timeout_s)
    print(report.text)
    return 0 if report.ok else 1
