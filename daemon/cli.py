"""The command line `kvprefetchd`: finds the command and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from .client import Unavailable
from .commands import check_config, doctor, explain, install_unit, mode, serve, stat, status, store, tail, top
from .config import ConfigError
from .sources import nearest

EX_UNAVAILABLE = 69
EX_CONFIG = 78

COMMANDS = (serve, check_config, status, top, stat, tail, explain, mode, install_unit, doctor, store)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is its own, 69 (store or daemon not available) or 78 (bad configuration)."""
    try:
        parsed, unknown = build_parser().parse_known_args(arguments)
        if unknown:
            known = [option for action in parsed.parser._actions for option in action.option_strings]
            word = unknown[0].partition("=")[0]
            raise ConfigError(f"command line: unrecognized arguments: {' '.join(unknown)}{nearest(word, known)}")
        status: int = parsed.run(parsed)
        return status
    except ConfigError as error:
        print(f"kvprefetchd: {error}", file=sys.stderr)
        return EX_CONFIG
    except Unavailable as error:
        print(f"kvprefetchd: {error}", file=sys.stderr)
        return EX_UNAVAILABLE


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command; each puts its function under `run`."""
    parser = _Parser(prog="kvprefetchd", description="Event-driven KV-cache prefetch daemon.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for module in COMMANDS:
        module.add(commands)
    return parser
