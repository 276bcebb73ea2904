"""`kvprefetchd status`, `health`, `stat`, `mode` and `reload`: look at a running daemon, or switch it."""

from __future__ import annotations

from typing import get_args

import click

from kvprefetch.client import Client
from kvprefetch.client.control import Unavailable, ask

from ...shmring.wire.admin import Segments, StatQuery
from ...shmring.wire.checks import Mode
from ..config.model import ConfigError
from ..telemetry import reader
from ..telemetry.digest import Digest
from ..telemetry.overview import describe
from ..telemetry.pretty import printable
from .common import (
    EX_UNAVAILABLE,
    Arguments,
    Real,
    SocketPage,
    declare,
    flag,
    option,
    show,
    socket_option,
)
from .help_page import CommandGroup
from .tail import MOMENTS, Moment, lines, named

STATUS = SocketPage(
    "print the daemon's mode, store and engines",
    details="Any user who may attach an engine may ask over the control socket, and sees the engines of this user; "
    "root and the daemon's own user see all. /healthz and /readyz of the metrics port say whether the daemon is well.",
    examples=(
        ("kvprefetchd status", "a few lines: mode, store, engines"),
        ("kvprefetchd status --since 10m", "and what happened in ten minutes, and what the log saved"),
        ("kvprefetchd status --json", "every number, for a program"),
        ("kvprefetchd status --wait 60", "of a daemon that is starting"),
        ("kvprefetchd status --socket /run/kvprefetch/kvprefetchd.sock", "of a certain daemon"),
    ),
    exits={0: "a daemon answered, even with bad news", 69: "no daemon answers, or it refused"},
    also="kvprefetchd health, top, doctor",
)

HEALTH = SocketPage(
    "say in one line whether engines can count on the daemon",
    details="Ready: the main loop and the master answer; /readyz of the metrics port says the same. With "
    "--alive it asks whether a restart would help, as /healthz does. It needs the control socket alone, so both serve "
    "as a container's probes.",
    examples=(
        ("kvprefetchd health", "now"),
        ("kvprefetchd health --wait 60", "a start script goes on as soon as the daemon is ready"),
        ("kvprefetchd health --engines 1 --wait 60", "and as soon as it serves an engine"),
        ("kvprefetchd health --alive", "a liveness probe"),
        ("kvprefetchd health --json", "for a program"),
    ),
    exits={0: "ready, or alive", 1: "not ready, too few engines, or no daemon answers; the line says why"},
    also="kvprefetchd status, doctor",
)

STAT = SocketPage(
    "print the numbers in the attached engines' shared memory as JSON",
    details="The daemon reads ring positions, flags by state, credits and heartbeats, and changes none of them. It "
    "shows the engines that status names. For a daemon that may be stuck, status and /healthz say more.",
    examples=(("kvprefetchd stat", "every engine's ring, flags, credits and heartbeats"),),
    exits={69: "no daemon answers, or it refused"},
    also="kvprefetchd status; docs/SHMRING.md has the layout",
)

MODE = SocketPage(
    "switch a running daemon on, to shadow or off",
    details="shadow: the daemon looks requests up and counts them in the log, but loads and saves nothing. off: it "
    "answers every request with a miss and asks no store. The mode holds until the next switch or restart; a start "
    "takes it from the key `mode` of the configuration. Requests in flight end as they began. Only root and the "
    "daemon's own user may switch.",
    arguments={"MODE": "the mode from now on"},
    examples=(
        ("kvprefetchd mode off", "take it out of the way without a restart"),
        ("kvprefetchd mode shadow", "see in the log what it would find"),
        ("kvprefetchd mode on", "back to work"),
    ),
    exits={0: "switched", 1: "the daemon could not", 69: "no daemon answers, or it refused"},
    also="kvprefetchd status",
)


RELOAD = SocketPage(
    "let a running daemon read its configuration again",
    details="As `systemctl reload kvprefetchd` and SIGHUP do; they also open the log's file again, after a rotation. "
    "The answer and the daemon's log say what changed, what needs a restart, or what is bad.",
    examples=(("kvprefetchd reload", "after an edit, and after check-config --config FILE"),),
    exits={
        0: "the daemon took over what may change",
        1: "it took over nothing: the line says why",
        69: "no daemon answers, or it is another user's",
    },
    also="kvprefetchd check-config; docs/reference/configuration.md says which keys a reload changes",
)


def add(commands: CommandGroup) -> None:
    socket = socket_option()

    def wait(until: str) -> click.Option:
        text = f"try for up to S seconds, until {until}"
        return option("--wait", metavar="S", type=Real(0, 3600), default=0.0, help=text)

    since = option("--since", metavar="TIME", type=Moment(), help=f"also what the log says since then: {MOMENTS}")
    json_flag = flag("--json", "all of it, as JSON")
    declare(commands, "status", run_status, STATUS, json_flag, since, wait("a daemon answers"), socket)
    text = "not ready until so many engines are attached, of whatever user (default: 0)"
    declare(
        commands,
        "health",
        run_health,
        HEALTH,
        flag("--json", "the same, as JSON"),
        flag(
            "--alive",
            "whether a restart would help, instead of whether it is ready: a daemon without its store is alive",
        ),
        option("--engines", metavar="COUNT", type=click.IntRange(min=0), default=0, help=text),
        wait("the daemon is ready"),
        socket,
    )
    declare(commands, "stat", run_stat, STAT, flag("--json", "no effect: it prints nothing else"), socket)
    declare(commands, "reload", run_command, RELOAD, socket)
    declare(commands, "mode", run_command, MODE, click.Argument(["mode"], type=click.Choice(get_args(Mode))), socket)


def run_status(arguments: Arguments) -> int:
    status = Client(arguments.socket).status(wait_s=arguments.wait, slowest=True)
    digests = None if arguments.since is None else digested(status.log, arguments.since)
    if arguments.json:
        parts = {} if digests is None else {"since": digests[0].figures, "whole_log": digests[1].figures}
        show(status.model_dump() | parts, ok=status.alive)
    else:
        print("\n".join(describe(status)))
        if digests is not None:
            now, whole = digests
            print("", f"since {arguments.since}:", *now.lines(), sep="\n")
            print("", f"in the log from {whole.since or '–'} on:", whole.saved(), sep="\n")
    return 0 if status.alive else EX_UNAVAILABLE


def digested(place: str, since: str) -> tuple[Digest, Digest]:
    """Return the log's part since then, and all of its files that reach there, which may be of several starts.

    Raises Unavailable.
    """
    now, whole = Digest(), Digest()
    try:
        where = named(place)
        source = lines(Arguments(**where, since=since if where["file"] else None))
    except ConfigError:
        raise Unavailable(f"the daemon's log cannot be read here: log={place!r}") from None
    for record in reader.records(filter(None, source)):
        whole.add(record)
        if record["ts"] >= since:
            now.add(record)
    return now, whole


def run_health(arguments: Arguments) -> int:
    word = "alive" if arguments.alive else "ready"
    found = Client(arguments.socket).health(engines=arguments.engines, wait_s=arguments.wait, alive=arguments.alive)
    what = word if found.well else f"not {word}"
    if (status := found.status) is not None:
        what += f": pid {status.pid}, mode {status.mode}, engines {status.engine_count}"
    if arguments.json:
        show({word: found.well}, ok=found.well, problems=found.problems)
    else:
        print(printable(": ".join([what, *found.problems])))
    return 0 if found.well else 1


def run_stat(arguments: Arguments) -> int:
    show({"engines": ask(arguments.socket, StatQuery(), Segments).engines})
    return 0


def run_command(arguments: Arguments) -> int:
    client, mode = Client(arguments.socket), getattr(arguments, "mode", None)
    report = client.reload() if mode is None else client.mode(mode)
    print(printable(report.text))
    return 0 if report.ok else 1
