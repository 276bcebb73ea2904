"""The command line `kvprefetchd`: finds the command and turns errors into one line and an exit status."""

from __future__ import annotations

import signal
import sys

if sys.argv[1:2] == ["serve"]:
    # A reload that comes before the daemon can do it would end it: it waits until there is a handler (service.py).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from ... import __version__
from ...shmring.wire.checks import nearest
from ...shmring.wire.records import PROTOCOL
from ..config.model import ConfigError, Taken
from . import check_config, doctor, explain, install_unit, mode, serve, stat, status, store, tail, top, warm
from .client import EX_UNAVAILABLE, Unavailable
from .common import CONFIGURATION_ENVIRONMENT, CONFIGURATION_FILE, SOCKET_FILE
from .help_page import Formatter, Page

EX_CONFIG = 78

DETAILS = (
    "Fetches the cached KV of vLLM requests from a Mooncake store while they wait, and stages it in shared memory. One "
    "daemon per node serves all engines on it; in an engine the connector KVPrefetchConnector talks to it.\n\n"
    "`kvprefetchd COMMAND --help` has the options, examples, exit statuses, files and environment of each command."
)
PAGE = Page(
    examples=(
        ("kvprefetchd doctor", "is this machine fit for it?"),
        ("kvprefetchd serve --staging 8GiB --memory 16GiB", "serve engines"),
        ("kvprefetchd status", "is one attached?"),
        ("kvprefetchd tail -f kvprefetchd.log", "what happens?"),
        ("kvprefetchd explain REQUEST_ID kvprefetchd.log", "why was this one slow?"),
    ),
    exits={1: "an answer that is not good: doctor found something bad, an order was not carried out"},
    files=CONFIGURATION_FILE | SOCKET_FILE,
    environment=CONFIGURATION_ENVIRONMENT,
    also="README.md, docs/OPERATIONS.md, docs/TUNING.md",
)
COMMANDS = (serve, check_config, status, top, stat, tail, explain, mode, install_unit, doctor, store, warm)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is its own, 69 (store or daemon not available) or 78 (bad configuration)."""
    _fill_standard_streams()
    if not (sys.argv[1:] if arguments is None else arguments):
        _short_help()
    command = ""
    try:
        try:
            parsed, unknown = build_parser().parse_known_args(arguments)
        except SystemExit:  # argparse has printed the help or the version
            sys.stdout.flush()
            raise
        command = parsed.command
        if unknown:
            known = [option for action in parsed.parser._actions for option in action.option_strings]
            word = unknown[0].partition("=")[0]
            raise ConfigError(f"command line: unrecognized arguments: {' '.join(unknown)}{nearest(word, known)}")
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if command == "serve":  # its log survives that, so it is something else
            raise
        # Who read our output has left; Python flushes once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Taken, Unavailable) as error:
        _say(f"kvprefetchd: {error}")
        return EX_UNAVAILABLE
    except ConfigError as error:
        _say(f"kvprefetchd: {error}")
        return EX_CONFIG
    except KeyboardInterrupt:  # before the command handles it itself, or in one that ends with it
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:  # the plain install has what an engine needs, not what serves
        _say(
            f"kvprefetchd: {error.name} is not installed here: this command needs the daemon's environment; in a "
            "checkout: pip install '.[daemon-cpu]', or daemon-cuda12, daemon-cuda13"
        )
        return EX_UNAVAILABLE
    except ImportError as error:
        if error.name is None or not error.name.endswith("._atomics"):
            raise
        _say(f"kvprefetchd: {error}")
        return EX_UNAVAILABLE


def _short_help() -> None:
    """Usage and commands, on standard error, before the line that says that one is wanted."""
    parser = build_parser()
    parser.description = parser.epilog = None
    _say(parser.format_help())


def _say(line: str) -> None:
    """The last words, on standard error; the exit status says it to those who do not read."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # its reader has left; Python flushes once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _fill_standard_streams() -> None:
    """What was closed at our start: else the first sockets and files would get these numbers, and be written to as if
    they were streams."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is `fd`
            setattr(sys, name, os.fdopen(fd, "r" if fd == 0 else "w", closefd=False))


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command; each puts its function under `run`."""
    parser = _Parser(
        prog="kvprefetchd", description=DETAILS, epilog=PAGE.text(), formatter_class=Formatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvprefetchd {__version__}, protocol {PROTOCOL}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return parser
