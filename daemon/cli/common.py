"""What commands share: how one is declared, and the options several of them take."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, get_args

from pydantic.fields import FieldInfo

from ...shmring.wire import admin
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
from .help_page import Formatter, Page

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
_OPTION_WIDTH = 24  # beyond it the usage does not fit a narrow terminal: then the description names the choices
_UNSET = {"socket_group": "the process's", "master_port": "a free one", "lease_ms": "as the store's"}
Run = Callable[[argparse.Namespace], int]

SYSTEM_SOCKET = Path("/run/kvprefetch/kvprefetchd.sock")

# What several commands' help says of the same thing.
SOCKET_FILE = {str(SYSTEM_SOCKET): "the control socket of the system's daemon"}
SOCKET_ENVIRONMENT = {
    f"{PREFIX}SOCKET": "the control socket, where --socket is not given",
    "XDG_RUNTIME_DIR": "below it, in kvprefetch/, lies the socket of a user's own daemon",
}
CONFIGURATION_FILE = {
    "/etc/kvprefetch/kvprefetchd.toml": "the configuration of the systemd service, which names it with --config; no "
    "file is read unless it is named"
}
CONFIGURATION_ENVIRONMENT = {
    f"{PREFIX}<KEY>": f"a key of the configuration, such as {PREFIX}STAGING=8GiB; stronger than the file",
    FILE_VARIABLE: "the TOML file, where --config is not given",
    "RUNTIME_DIRECTORY, XDG_RUNTIME_DIR": "where the control socket lies by default",
}


def declare(
    commands: Commands, name: str, text: str, run: Run, page: Page, *, details: str = ""
) -> argparse.ArgumentParser:
    """Add a command; `run` gets the parsed arguments and returns the exit status, `page` is for its help."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}. {details}".rstrip(), epilog=page.text(),
        formatter_class=Formatter, allow_abbrev=False,
    )  # fmt: skip
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
        shown = default_text(name, field)
        kind = "SIZE" if name in SIZES else kind_of(field)
        if len(name) + len(kind) > _OPTION_WIDTH:
            kind = "VALUE"
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar=kind, help=f"{field.description or ''} (default: {shown})"
        )


def default_text(name: str, field: FieldInfo) -> str:
    """A key's default in words, where it is none what that comes to."""
    default: Any = field.get_default(call_default_factory=True)
    if default in (None, ()):
        return _UNSET.get(name, "none")
    return size_text(default) if name in SIZES else str(default)


def kind_of(field: FieldInfo) -> str:
    """What stands for the value of a key: its choices, or what kind of thing it is."""
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    if all(isinstance(kind, str) for kind in kinds):
        return f"{{{','.join(kinds)}}}"
    names = {int: "N", float: "X", Path: "PATH"}
    return names.get(kinds[0], "VALUE") if isinstance(kinds[0], type) else "VALUE"


def configuration_sources(arguments: argparse.Namespace) -> Sources:
    """Where a command with `add_configuration` takes its configuration from."""
    return Sources.of({name: getattr(arguments, name) for name in DaemonConfig.model_fields}, arguments.config)


def accepted(sources: Sources) -> Effective:
    """The configuration that serve would start with. Raises ConfigError: also for what it would refuse although each
    value is valid by itself.
    """
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


def give(order: Message, socket: Path, timeout_s: float = TIMEOUT_S) -> int:
    """Have a running daemon do it, and print what it says; the exit status is 0 when it was carried out, else 1."""
    answer = ask(socket, order, admin.Report, timeout_s)
    print(answer.text)
    return 0 if answer.ok else 1
