"""The sources of the configuration: flags, environment, TOML file, defaults; and the values that result."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...shmring.wire.checks import first_error, living, nearest
from .model import FORMER, GONE, ConfigError, DaemonConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "KVPREFETCHD_"
FILE_VARIABLE = PREFIX + "CONFIG"
MAX_FILE_BYTES = 1 << 16  # the main loop reads it; the parser's time may grow with the square of its size


@dataclass(frozen=True)
class Sources:
    """The sources, flags first. A running daemon keeps them for reloads."""

    flags: Mapping[str, Any]
    environ: Mapping[str, str]
    file: Path | None

    @classmethod
    def of(cls, flags: Mapping[str, Any], file: Path | None, environ: Mapping[str, str] = os.environ) -> Sources:
        """Return the flags that are not None, the variables, and the file of `--config` or $KVPREFETCHD_CONFIG."""
        given = {name: value for name, value in flags.items() if value is not None}
        if file is None and environ.get(FILE_VARIABLE):
            file = Path(environ[FILE_VARIABLE])
        return cls(given, {name: value for name, value in environ.items() if name.startswith(PREFIX)}, file)


@dataclass(frozen=True)
class Effective:
    """A valid configuration, and the source of each key's value."""

    config: DaemonConfig
    origin: Mapping[str, str]


def resolve(sources: Sources) -> Effective:
    """Read and validate. Raises ConfigError: one line with key, value, bound and source."""
    values: dict[str, Any] = {}
    origin = dict.fromkeys(DaemonConfig.model_fields, "default")
    layers: list[tuple[str, dict[str, Any]]] = []
    if sources.file is not None:
        layers.append((str(sources.file), _read(sources.file)))
    variables = {PREFIX + key.upper(): key for key in (*DaemonConfig.model_fields, *FORMER, *GONE)}
    for variable, value in sources.environ.items():
        if variable != FILE_VARIABLE:
            _check(variable.upper(), "environment", variables)
            layers.append((f"${variable}", {variables[variable.upper()]: value}))
    layers += [(f"--{name.replace('_', '-')}", {name: value}) for name, value in sources.flags.items()]
    for place, layer in layers:
        for name, value in living(layer, GONE, partial(print, file=sys.stderr), FORMER).items():
            if isinstance(value, dict) and name not in DaemonConfig.model_fields:
                raise ConfigError(f"{place}: keys stand at the top of the file, below no table: [{name}]")
            _check(name, place, DaemonConfig.model_fields)
            values[name], origin[name] = value, place
    try:
        return Effective(DaemonConfig.model_validate(values), origin)
    except ValidationError as error:
        key = str(error.errors(include_url=False)[0]["loc"][0])
        place = origin[key]
        raise ConfigError(
            first_error(error, DaemonConfig) + ("" if place.startswith("--") else f" (from {place})")
        ) from None


def _check(name: str, place: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"{place}: unknown key {name}{nearest(name, known)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.is_fifo():
            raise ConfigError(f"config: is a pipe, which a reload cannot read again: config={str(path)!r}")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"config: is too large: max_bytes={MAX_FILE_BYTES} config={str(path)!r}")
        text = data.decode("utf-8-sig")  # Windows' editors write a mark at the start
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"config: cannot be read: {error.strerror or error}: config={str(path)!r}") from None
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, brackets a thousand deep
        raise ConfigError(f"config: not TOML: {error}{_slip(str(error), data)}: config={str(path)!r}") from None


def _slip(error: str, data: bytes) -> str:
    """Say what TOML wants in the line that its parser names, for the two commonest slips."""
    number = re.search(r"at line (\d+)", error)
    line = data.splitlines()[int(number[1]) - 1].decode(errors="replace") if number else ""
    slip = re.match(r"\s*(\w+)\s*=\s*([\w.]+)\s*(#.*)?$", line)
    if slip is None:
        return ""
    octal = "an octal number is" if slip[2].isdecimal() else "text and a number with a unit are"
    return f'; {octal} quoted: {slip[1]} = "{slip[2]}"'
