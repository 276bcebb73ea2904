"""Shared by the commands: how to declare one, and the options that several of them take."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, get_args

import click
from pydantic.fields import FieldInfo

from kvprefetch.client.control import find_socket

from ...shmring.wire.control_socket import SYSTEM_SOCKET
from ..config.machine import machine_bytes
from ..config.model import FORMER, SIZES, ConfigError, DaemonConfig
from ..config.sizes import size_text, whole_mib
from ..config.sources import FILE_VARIABLE, PREFIX, Effective, Sources, resolve
from ..control.access import group_id
from ..door.token import read_token
from ..store.disk import DiskSpec, automatic_disk
from ..store.settings import MooncakeSettings
from .help_page import Command, CommandGroup, HelpPage

Arguments: TypeAlias = SimpleNamespace  # of a command, by name
Run = Callable[[Arguments], int]
PATH = click.Path(path_type=Path, readable=False)  # what opens it says why it cannot, with the cure
_UNSET = {"socket_group": "the process's", "master_port": "a free one", "lease_ms": "as the store's"}

EX_UNAVAILABLE = 69
SOCKET_FILE = {SYSTEM_SOCKET: "the control socket of the system's daemon"}
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


class Real(click.FloatRange):
    """A number within bounds, which `nan` is not: click takes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        return number if number == number else self.fail(f"{value!r} is no number.", param, ctx)


def declare(group: CommandGroup, name: str, run: Run, page: HelpPage, *params: click.Parameter) -> None:
    """Add a command; `run` gets the parsed arguments and returns the exit status."""
    call = lambda **given: run(Arguments(**given))  # noqa: E731
    group.add_command(Command(name, page, params=list(params), callback=call))


def option(*names: str, **more: Any) -> click.Option:
    return click.Option(names, **more)


def flag(name: str, text: str) -> click.Option:
    return click.Option([name], is_flag=True, help=text)


def socket_option() -> click.Option:
    text = "the daemon's control socket (default: of the daemon that an engine of this user finds)"
    return option("--socket", metavar="PATH", type=PATH, default=find_socket, help=text)


def configuration_options() -> Iterator[click.Option]:
    """Yield `--config` and one option for each key of the configuration, which checks their values itself."""
    yield option("--config", metavar="FILE", type=PATH, help=f"TOML file of the same keys (or ${FILE_VARIABLE})")
    for name, field in DaemonConfig.model_fields.items():
        kind = "SIZE" if name in SIZES else kind_of(field)
        text = f"{field.description or ''} (default: {default_text(name, field)})"
        choices = kind[1:-1].split(",") if kind.startswith("{") else ()
        shown = click.Choice(choices) if choices else click.Path(readable=False) if kind == "PATH" else str
        yield option(f"--{name.replace('_', '-')}", metavar=None if choices else kind, type=shown, help=text)
    yield from (option(f"--{name.replace('_', '-')}", hidden=True, help=f"now {now}") for name, now in FORMER.items())


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


def configuration_sources(arguments: Arguments) -> Sources:
    """Return the sources of the configuration, for a command with `configuration_options`."""
    names = (*DaemonConfig.model_fields, *FORMER)
    return Sources.of({name: getattr(arguments, name) for name in names}, arguments.config)


def accepted(sources: Sources) -> Effective:
    """Return the configuration with which serve would start. Raises ConfigError, also for valid values that together
    make serve refuse."""
    effective = resolve(sources)
    if effective.config.disk in ("auto", "none"):
        found = automatic_disk() if effective.config.disk == "auto" else None
        effective = replace(effective, config=effective.config.model_copy(update={"disk": found}))
    config = effective.config
    if config.mooncake_config is not None:
        MooncakeSettings.from_file(config.mooncake_config)
    elif config.disk is not None:
        DiskSpec.parse(config.disk)
    if config.socket_group is not None:
        group_id(config.socket_group)
    if config.door_port and config.door != "off":
        check_token(config)
    for name in ("staging",) if config.mooncake_config is not None else ("staging", "memory"):
        if (size := getattr(config, name)) > (most := machine_bytes()):
            raise ConfigError(f"{name}: is more than this machine has: {name}={size_text(size)} max={whole_mib(most)}")
    return effective


def check_token(config: DaemonConfig) -> None:
    """Raise ConfigError where there is no file with a token, it holds none, or other users may read it."""
    if config.door_token is None:
        raise ConfigError(f"door_token: is missing: door_port={config.door_port} needs a file with a token")
    try:
        read_token(config.door_token)
    except (OSError, ValueError) as error:
        raise ConfigError(f"door_token: {error}: door_token={str(config.door_token)!r}") from None


def of_running(effective: Effective) -> DaemonConfig:
    """Return the configuration with the socket of the daemon that runs, not of one that would start, unless it is
    named."""
    where = {"socket": find_socket()} if effective.origin["socket"] == "default" else {}
    return effective.config.model_copy(update=where)


def show(fields: Mapping[str, Any], *, ok: bool = True, problems: Iterable[str] = ()) -> None:
    """Print a result as one JSON object, in which every command has these keys: its words, whether it ends with
    status 0, and what is wrong in sentences. Its own fields are beside them."""
    command = click.get_current_context().command_path.partition(" ")[2]
    print(json.dumps({"command": command, "ok": ok, "problems": list(problems), **fields}, indent=2))
