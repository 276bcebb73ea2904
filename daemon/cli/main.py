"""The command line `kvprefetchd`: finds the command, and turns errors into one line and an exit status."""

from __future__ import annotations

import signal
import sys

if sys.argv[1:2] == ["serve"]:
    # An early SIGHUP would end the daemon: block it until the daemon has its handler (runtime/signals.py).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

import argparse
import os
import re
from collections.abc import Sequence
from typing import NoReturn

from ... import __version__
from ...shmring.wire.checks import nearest
from ...shmring.wire.records import PROTOCOL
from ..config.model import ConfigError, Taken
from . import completion, configuration, doctor, install_unit, latency, serve, status, store, tail, top, warm
from .client import EX_UNAVAILABLE, Unavailable
from .common import CONFIGURATION_ENVIRONMENT, CONFIGURATION_FILE, NO_COLOR, SOCKET_FILE
from .findings import commit, versions
from .help_page import HelpFormatter, HelpPage

EX_CONFIG = 78

PAGE = HelpPage(
    "fetches the cached KV of vLLM requests from a Mooncake store while they wait, and stages it in shared memory",
    details="One daemon per node serves all engines on it; in an engine the connector KVPrefetchConnector talks to "
    "it.\n\n`kvprefetchd COMMAND --help` has the options, examples, exit statuses, files and environment of each "
    "command.",
    examples=(
        ("kvprefetchd doctor", "is this machine fit for it?"),
        ("kvprefetchd serve --staging 8GiB --memory 16GiB", "serve engines"),
        ("kvprefetchd health --wait 60", "is it ready?"),
        ("kvprefetchd status", "is one attached?"),
        ("kvprefetchd tail -f kvprefetchd.log", "what happens?"),
        ("kvprefetchd explain REQUEST_ID kvprefetchd.log", "why was this one slow?"),
    ),
    exits={
        1: "a bad answer: doctor found something bad, the daemon is not ready, or did not carry a command out",
        130: "interrupted",
    },
    files=CONFIGURATION_FILE | SOCKET_FILE,
    environment=CONFIGURATION_ENVIRONMENT | NO_COLOR,
    also="README.md, docs/OPERATIONS.md, docs/TUNING.md, docs/reference/command-line.md",
)
COMMANDS = (serve, configuration, status, top, tail, install_unit, doctor, latency, store, warm, completion)


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError."""

    @property
    def commands(self) -> dict[str, Parser]:
        """The parser of each command by its words: `store`, `store ls`."""
        found: dict[str, Parser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, parser in action.choices.items():
                    found |= {name: parser} | {f"{name} {more}": each for more, each in parser.commands.items()}
        return found

    def options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def error(self, message: str) -> NoReturn:
        hint = ""
        if bad := re.search(r"invalid choice: '(.*?)' ", message):
            hint = nearest(bad[1], [str(choice) for action in self._actions for choice in action.choices or ()])
        raise ConfigError(f"command line: {message}{hint}; see {self.prog} --help")


class ShowVersion(argparse.Action):
    """Prints version, commit and protocol, and the libraries' versions; finding them takes a moment."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        version = ", ".join(filter(None, (f"kvprefetchd {__version__}", commit(), f"protocol {PROTOCOL}")))
        libraries = (f"{name} {text}" for name, text in versions().items() if name != "kvprefetch")
        print(version, ", ".join(libraries), sep="\n")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status, 69 (store or daemon not available) or 78 (bad configuration)."""
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
            hint = nearest(unknown[0].partition("=")[0], parsed.parser.options())
            raise ConfigError(f"command line: unrecognized arguments: {' '.join(unknown)}{hint}")
        status = int(parsed.run(parsed))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if command == "serve":  # the log of serve survives it, so this is another pipe
            raise
        # The reader of our output left; Python flushes once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:  # before the command handles it itself, or in one that ends with it
        return 128 + signal.SIGINT
    except (Taken, Unavailable) as error:  # before ConfigError: Taken is one
        status, line = EX_UNAVAILABLE, str(error)
    except ConfigError as error:
        status, line = EX_CONFIG, str(error)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):  # an engine's environment lacks the packages of the daemon
            text = "is not installed here: this command needs the daemon's environment; in a checkout:"
            line = f"{error.name} {text} pip install '.[daemon-cpu]', or daemon-cuda12, daemon-cuda13"
        elif error.name is not None and error.name.endswith("._atomics"):
            line = str(error)
        else:
            raise
        status = EX_UNAVAILABLE
    _say(f"kvprefetchd: {line}")
    return status


def _short_help() -> None:
    """Print usage and commands on standard error, before the error line that asks for a command."""
    parser = build_parser()
    parser.description = parser.epilog = None
    _say(parser.format_help())


def _say(line: str) -> None:
    """Print a line on standard error; the exit status says the same."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # the reader left; Python flushes once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _fill_standard_streams() -> None:
    """Open the streams that were closed at our start: else a socket or file would get such a number and its output."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # Python found it closed
            # The lowest free number: `fd`, unless an import keeps a file open there, as libffi does for ctypes.
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "r" if fd == 0 else "w", closefd=False))


def build_parser() -> Parser:
    """Return the parser of all commands; each command puts its function under `run`."""
    parser = Parser("kvprefetchd", description=PAGE.description, formatter_class=HelpFormatter, allow_abbrev=False)
    parser.epilog = PAGE.sections()
    parser.set_defaults(page=PAGE)
    text = "print version, commit, protocol, and the libraries' versions"
    parser.add_argument("-V", "--version", action=ShowVersion, nargs=0, help=text)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return parser
