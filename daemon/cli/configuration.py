"""`kvprefetchd check-config` and `config init`: show the configuration that serve would use, or write a file for it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import click

from kvprefetch.client.control import Unavailable

from ..config.model import NEXT_ATTACH, RELOADABLE, SIZES, DaemonConfig
from ..config.sizes import size_text
from ..config.sources import Effective
from ..control.listener import check_place
from .common import (
    Arguments,
    ConfigurationPage,
    accepted,
    configuration_options,
    configuration_sources,
    declare,
    default_text,
    flag,
    kind_of,
    show,
)
from .help_page import CommandGroup

CHECK = ConfigurationPage(
    "check a configuration and print it as TOML, each value with its source",
    details="Takes the options of serve and starts nothing. You may save its output and name that file with --config.",
    examples=(
        ("kvprefetchd check-config", "the defaults, and what the environment changes"),
        ("kvprefetchd check-config --config /etc/kvprefetch/kvprefetchd.toml", "before a reload or a restart"),
        ("kvprefetchd check-config --json", "for a program"),
    ),
    exits={0: "serve would accept it"},
    also="kvprefetchd serve, config init, doctor",
)
CONFIG = ConfigurationPage(
    "write a configuration file",
    details="`kvprefetchd check-config` shows and checks what a file, the environment and options come to.",
    examples=(("kvprefetchd config init kvprefetchd.toml", "a file to begin with"),),
    also="kvprefetchd check-config",
)
INIT = ConfigurationPage(
    "write a configuration file with every key, explained",
    details="Takes the options of serve. Keys that an option, the environment or --config sets have their value in the "
    "file; all others are comments with their defaults. It replaces no file.",
    arguments={"FILE": "a new file (default: standard output)"},
    examples=(
        ("kvprefetchd config init kvprefetchd.toml", "all defaults, to be edited"),
        ("kvprefetchd config init --staging 8GiB --memory 16GiB kvprefetchd.toml", "two keys set"),
        ("kvprefetchd config init", "look at it"),
        ("kvprefetchd serve --config kvprefetchd.toml", "use it"),
    ),
    exits={0: "written", 69: "the file is there already, or cannot be written"},
    also="kvprefetchd check-config; docs/reference/configuration.md",
)
HEAD = """\
# Configuration of kvprefetchd. Take the `#` away from a key to set it; where it has …, write a value.
# Check the file: kvprefetchd check-config --config FILE
"""
WIDTH = 100


def add(commands: CommandGroup) -> None:
    json_too = flag("--json", "as JSON, sizes in bytes")
    start = flag("--start", "also look whether this machine has what serve needs to start")
    declare(commands, "check-config", run_check, CHECK, json_too, start, *configuration_options())
    actions = CommandGroup("config", CONFIG)
    commands.add_command(actions)
    file = click.Argument(["file"], type=click.Path(allow_dash=True), default="-")
    declare(actions, "init", run_init, INIT, file, *configuration_options())


def run_check(arguments: Arguments) -> int:
    effective = accepted(configuration_sources(arguments))
    if arguments.start:
        check_start(effective.config)
    if arguments.json:
        values = effective.config.model_dump(mode="json")
        show({"keys": {name: {"value": values[name], "from": effective.origin[name]} for name in values}})
    else:
        print("\n".join(as_toml(effective)))
    return 0


def check_start(config: DaemonConfig) -> None:
    """Raise ConfigError, Unavailable or ImportError, with the cure, where serve would end at once.

    Cores are not counted: an engine that asks may be bound to one, which its daemon is not.
    """
    from ..runtime import service  # noqa: F401  # the daemon's packages
    from ..store.errors import StoreError
    from ..store.joining import import_client

    try:
        import_client()
        check_place(config.socket)
    except StoreError as error:
        raise Unavailable(str(error)) from None


def run_init(arguments: Arguments) -> int:
    text = commented(accepted(configuration_sources(arguments)))
    if arguments.file == "-":
        print(text, end="")
        return 0
    try:
        with Path(arguments.file).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Unavailable(f"{arguments.file}: cannot be written: {error.strerror or error}") from None
    print(f"wrote {arguments.file}")
    return 0


def as_toml(effective: Effective) -> list[str]:
    lines = []
    for name in DaemonConfig.model_fields:
        setting = _setting(effective, name)
        shown = setting if setting is not None else f"# {name} is not set"
        lines.append(f"{shown:<48} # {effective.origin[name]}; {_reload(name)}")
    return lines


def commented(effective: Effective) -> str:
    """Return a TOML file that sets the keys whose source is not the default, and has all others as comments."""
    parts = [HEAD]
    for name, field in DaemonConfig.model_fields.items():
        kind = "size" if name in SIZES else {"N": "number", "X": "number", "PATH": "path"}.get(kind_of(field), "")
        about = [field.description, kind, f"default: {default_text(name, field)}", _reload(name)]
        lines = textwrap.wrap("; ".join(filter(None, about)), WIDTH, initial_indent="# ", subsequent_indent="# ")
        setting = _setting(effective, name) or f"{name} = …"
        lines.append(f"# {setting}" if effective.origin[name] == "default" else setting)
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _setting(effective: Effective, name: str) -> str | None:
    """Return `key = value` in TOML, None for a key that is not set."""
    value: Any = getattr(effective.config, name)
    text = str(value) if isinstance(value, Path) else size_text(value) if name in SIZES else value
    if text is None:
        return None
    # JSON writes values as TOML does, but for surrogates and DEL. A path that is no UTF-8 keeps its escapes.
    said = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{name} = {said.encode(errors='backslashreplace').decode()}"


def _reload(name: str) -> str:
    if name in NEXT_ATTACH:
        return "reload: for engines that attach from then on"
    return "reload: at once" if name in RELOADABLE else "needs a restart"
