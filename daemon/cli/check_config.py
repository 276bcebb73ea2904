"""`kvprefetchd check-config`: the effective configuration as TOML, with the source of each value."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..config.model import NEXT_ATTACH, RELOADABLE, SIZES, DaemonConfig
from ..config.sizes import size_text
from ..config.sources import Effective
from .common import Commands, ConfigurationPage, accepted, add_configuration, configuration_sources, declare

PAGE = ConfigurationPage(
    "check a configuration and print it as TOML, each value with its source",
    details="Takes the options of serve and starts nothing. You may save its output and name that file with --config.",
    examples=(
        ("kvprefetchd check-config", "the defaults, and what the environment changes"),
        ("kvprefetchd check-config --config /etc/kvprefetch/kvprefetchd.toml", "before a reload or a restart"),
        ("kvprefetchd check-config --staging 8GiB > kvprefetchd.toml", "a file to begin with"),
    ),
    exits={0: "serve would accept it"},
    also="kvprefetchd serve, doctor",
)


def add(commands: Commands) -> None:
    add_configuration(declare(commands, "check-config", run, PAGE))


def run(arguments: argparse.Namespace) -> int:
    print("\n".join(as_toml(accepted(configuration_sources(arguments)))))
    return 0


def as_toml(effective: Effective) -> list[str]:
    """Return the lines of a TOML file with this configuration."""
    return [_line(name, getattr(effective.config, name), effective.origin[name]) for name in DaemonConfig.model_fields]


def _line(name: str, value: Any, origin: str) -> str:
    """Return one line of TOML; JSON writes strings, numbers and lists as TOML does."""
    text = str(value) if isinstance(value, Path) else size_text(value) if name in SIZES else value
    setting = f"{name} = {json.dumps(text)}" if text is not None else f"# {name} is not set"
    reload = "reload: at once" if name in RELOADABLE else "needs a restart"
    if name in NEXT_ATTACH:
        reload = "reload: for engines that attach from then on"
    return f"{setting:<48} # {origin}; {reload}"
