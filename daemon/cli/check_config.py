"""`kvprefetchd check-config`: the effective configuration as TOML, each value with where it came from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..config.model import NEXT_ATTACH, RELOADABLE, SIZES, DaemonConfig
from ..config.sizes import size_text
from ..config.sources import Effective
from .common import (
    CONFIGURATION_ENVIRONMENT,
    CONFIGURATION_FILE,
    Commands,
    accepted,
    add_configuration,
    configuration_sources,
    declare,
)
from .help_page import Page

DETAILS = "Takes the options of serve and starts nothing. What it prints may be saved and named with --config."
PAGE = Page(
    examples=(
        ("kvprefetchd check-config", "the defaults, and what the environment changes"),
        ("kvprefetchd check-config --config /etc/kvprefetch/kvprefetchd.toml", "before a reload or a restart"),
        ("kvprefetchd check-config --staging 8GiB > kvprefetchd.toml", "a file to begin with"),
    ),
    exits={0: "serve would accept it"},
    files=CONFIGURATION_FILE,
    environment=CONFIGURATION_ENVIRONMENT,
    also="kvprefetchd serve, doctor",
)


def add(commands: Commands) -> None:
    text = "check a configuration and print it as TOML, each value with its source"
    add_configuration(declare(commands, "check-config", text, run, PAGE, details=DETAILS))


def run(arguments: argparse.Namespace) -> int:
    print("\n".join(shown(accepted(configuration_sources(arguments)))))
    return 0


def shown(effective: Effective) -> list[str]:
    """Lines of a TOML file that says the same."""
    return [
        line_of(name, getattr(effective.config, name), effective.origin[name], reload_of(name))
        for name in DaemonConfig.model_fields
    ]


def reload_of(name: str) -> str:
    if name in NEXT_ATTACH:
        return "reload: for engines that attach from then on"
    return "reload: at once" if name in RELOADABLE else "needs a restart"


def line_of(name: str, value: Any, origin: str, reload: str) -> str:
    """One line of TOML; JSON writes strings, numbers and lists as TOML does."""
    text = str(value) if isinstance(value, Path) else size_text(value) if name in SIZES else value
    said = f"{name} = {json.dumps(text)}" if text is not None else f"# {name} is not set"
    return f"{said:<48} # {origin}; {reload}"
