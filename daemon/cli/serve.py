"""`kvprefetchd serve`: the daemon itself."""

from __future__ import annotations

import os
import resource
import sys

from kvprefetch.client.control import Unavailable

from ...shmring.wire.control_socket import SYSTEM_SOCKET
from .common import (
    CONFIGURATION_ENVIRONMENT,
    CONFIGURATION_FILE,
    EX_UNAVAILABLE,
    NO_COLOR,
    Arguments,
    accepted,
    configuration_options,
    configuration_sources,
    declare,
)
from .help_page import CommandGroup, HelpPage

SERVE = HelpPage(
    "serve engines on a Unix socket",
    details="Runs until SIGTERM or SIGINT, or with --exit-idle-s until its last engine has ended; then it lets calls "
    "to the store end and waits until the disk has everything. SIGHUP opens the log's file again, reads the "
    "configuration, and applies what may change while it runs. The log goes to standard output: JSON lines, readable "
    "ones on a terminal.\n\n"
    "Without --mooncake-config it starts a private Mooncake store on this machine. Sizes take a unit (512MiB, 4GB). An "
    "option wins over the environment, the environment over the file; check-config shows the outcome. It needs at "
    "least two cores.",
    examples=(
        ("kvprefetchd serve --staging 8GiB --memory 16GiB", "a private store in memory"),
        ("kvprefetchd serve --disk /var/lib/kvprefetch/disk:500GiB", "with a disk that a restart finds again"),
        ("kvprefetchd serve --mooncake-config mooncake.json", "join a Mooncake cluster"),
        ("kvprefetchd serve --config kvprefetchd.toml >> kvprefetchd.log", "as a service does it, with a log for tail"),
    ),
    exits={
        0: "a signal stopped it, or it was without an engine for exit_idle_s",
        69: "the store cannot be opened, or another process has the socket, a port or the disk's folder now",
    },
    files=CONFIGURATION_FILE
    | {
        SYSTEM_SOCKET: "the control socket, where no variable below names another place",
        "DIR of --disk": "the store's disk; only the daemon's user may read it",
    },
    environment=CONFIGURATION_ENVIRONMENT
    | {
        "NOTIFY_SOCKET, WATCHDOG_USEC": "the daemon reports to systemd that it is ready, alive, reloads and stops",
        "LISTEN_FDS": "the control socket, when systemd opened it",
        "JOURNAL_STREAM": "lines carry the journal's priorities when they go there",
    }
    | NO_COLOR,
    also="kvprefetchd check-config, install-unit, doctor; docs/OPERATIONS.md, docs/TUNING.md",
)


HARMLESS = (
    "kvprefetchd: at every start Mooncake says 'Logging before InitGoogleLogging()' and 'Local segment descriptor not "
    "found': both mean nothing"
)


def add(commands: CommandGroup) -> None:
    declare(commands, "serve", run_serve, SERVE, *configuration_options())


def run_serve(arguments: Arguments) -> int:
    sources = configuration_sources(arguments)
    config = accepted(sources).config
    os.umask(0o077)  # for everything made from here on, the files that Mooncake writes to disk included
    # A core file would hold all KV. The hard limit stays, so prlimit --core can raise the soft one again.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.stderr.isatty():  # Mooncake's lines come there, between ours
        print(HARMLESS, file=sys.stderr)
    # Imported late: `kvprefetchd --help` and configuration errors need neither Mooncake nor structlog.
    from ..telemetry.logs import unblock_streams

    unblock_streams()
    from ..runtime.service import Daemon
    from ..store.errors import StoreError
    from ..telemetry.logs import configure
    from ..telemetry.metrics import Metrics
    from ..telemetry.streams import settle

    try:
        metrics = Metrics()
        log = configure(config.log_level, metrics)
        well = Daemon(config, log, lambda: accepted(sources).config, metrics).run()
        if not well:
            print("kvprefetchd: the store's master ended: what was in memory alone is lost", file=sys.stderr)
        settle()
        # Everything is closed. With a disk, Mooncake's destructors would now wait about ten seconds for a thread.
        os._exit(0 if well else EX_UNAVAILABLE)
    except StoreError as error:
        raise Unavailable(f"store: {error}") from None
