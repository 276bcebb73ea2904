"""The command line `kvprefetchd`: finds the command, and turns errors into one line and an exit status."""

from __future__ import annotations

import signal
import sys

if sys.argv[1:2] == ["serve"]:
    # An early SIGHUP would end the daemon: block it until the daemon has its handler (runtime/signals.py).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

import os
from collections.abc import Sequence

import click
from click.shell_completion import shell_complete

from kvprefetch import __version__
from kvprefetch.client.control import Unavailable

from ...shmring.wire.records import PROTOCOL
from ..config.model import ConfigError, Taken
from ..telemetry.pretty import fitting
from . import configuration, doctor, estimate, install_unit, pages, prefetch, serve, status, store, tail, top
from .common import CONFIGURATION_ENVIRONMENT, CONFIGURATION_FILE, EX_UNAVAILABLE, NO_COLOR, SOCKET_FILE
from .findings import commit, versions
from .help_page import CommandGroup, HelpPage

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
COMMANDS = (serve, configuration, status, top, tail, install_unit, doctor, estimate, store, prefetch, pages)
ALIASES = {"warm": "prefetch"}  # names of earlier releases


def build() -> CommandGroup:
    text = "print version, commit, protocol, and the libraries' versions"
    version = click.Option(
        ["-V", "--version"], is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help=text
    )
    group = CommandGroup("kvprefetchd", PAGE, params=[version])
    for module in COMMANDS:
        module.add(group)
    return group


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print version, commit and protocol, and the libraries' versions; finding them takes a moment."""
    if wanted and not context.resilient_parsing:
        version = ", ".join(filter(None, (f"kvprefetchd {__version__}", commit(), f"protocol {PROTOCOL}")))
        libraries = (f"{name} {text}" for name, text in versions().items() if name != "kvprefetch")
        print(version, ", ".join(libraries), sep="\n")
        context.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status, 69 (store or daemon not available) or 78 (bad configuration)."""
    _fill_standard_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    words[:1] = [ALIASES.get(word, word) for word in words[:1]]
    try:
        return _run(words)
    except BrokenPipeError:
        if words[:1] == ["serve"]:  # the log of serve survives it, so this is another pipe
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
    except click.UsageError as error:
        if not words and error.ctx is not None:
            _say(error.ctx.get_help() + "\n")
        where = error.ctx.command_path if error.ctx is not None else "kvprefetchd"
        status, line = EX_CONFIG, f"command line: {' '.join(error.format_message().split())} (see {where} --help)"
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):  # an engine's environment lacks the packages of the daemon
            text = "is not installed here: this command needs the daemon's environment; in a checkout:"
            line = f"{error.name} {text} pip install '.[daemon-cpu]', or daemon-cuda12, daemon-cuda13"
        elif error.name is not None and error.name.endswith("._atomics"):
            line = str(error)
        else:
            raise
        status = EX_UNAVAILABLE
    _say(f"kvprefetchd: {fitting(line)}")
    return status


def _run(words: list[str]) -> int:
    group = build()
    if instruction := os.environ.get(pages.VARIABLE):
        return shell_complete(group, {}, "kvprefetchd", pages.VARIABLE, instruction)
    try:
        with group.make_context("kvprefetchd", words) as context:
            status = int(group.invoke(context))
    except click.exceptions.Exit as ended:  # the help or the version has been printed
        status = ended.exit_code
    sys.stdout.flush()
    return status


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
