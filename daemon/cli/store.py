"""`kvprefetchd store ls`, `stat` and `purge`: list or count the store's keys by namespace, or remove a namespace."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from ...shmring.wire.admin import KnownNamespaces, Namespace, NamespacesQuery, Purge, Status, StatusQuery
from ..config.model import ConfigError
from ..store.fill import StoreFill, read
from ..store.namespaces import name_of
from ..telemetry.overview import filled
from ..telemetry.pretty import printable
from .client import Conversation, Unavailable, ask
from .common import Commands, SocketPage, add_socket, command_daemon, declare

PAGE = SocketPage(
    "list, count or remove what the store holds",
    details="A namespace is the part of a block's key before the hash: model, rank and fingerprint, with "
    "`cache_prefix` first. ls and stat ask the Mooncake master's HTTP interface, so they list the keys of all users: "
    "the embedded store's, or --master-http.",
    examples=(
        ("kvprefetchd store stat", "values of each namespace, and how full the store is"),
        ("kvprefetchd store ls --prefix some-model", "keys that begin so"),
        ("kvprefetchd store purge --engine ENGINE --yes", "remove what an attached engine stored"),
    ),
    exits={1: "purge: not confirmed", 69: "the daemon or the master does not answer"},
    also='kvprefetchd status; docs/OPERATIONS.md, "What is kept, and for how long"',
)
LS = SocketPage(
    "print the store's keys, one a line",
    details="They come from the Mooncake master's HTTP interface, and are the keys of all users.",
    examples=(
        ("kvprefetchd store ls --prefix some-model", "keys that begin so"),
        ("kvprefetchd store ls --master-http 10.0.0.1:9003", "of a cluster, by its master"),
    ),
    exits={69: "the daemon or the master does not answer"},
)
STAT = SocketPage(
    "count the values of each namespace, and say how full the store is",
    details="The counts come from the Mooncake master's HTTP interface; each namespace's user and meaning come from "
    "the daemon. Root and the daemon's own user see those of all namespaces, other users of their own.",
    examples=(
        ("kvprefetchd store stat", "every namespace"),
        ("kvprefetchd store stat --json", "sizes in bytes, for a program"),
    ),
    exits={69: "the daemon or the master does not answer"},
)
PURGE = SocketPage(
    "remove every value of a namespace",
    details="It takes all ranks' parts, goes through the daemon, reaches the embedded store's disk too, and leaves "
    "attached engines running: staged blocks stay valid, and later saves are stored again (keys that were on disk: in "
    "memory only, until the daemon restarts). Afterwards a namespace without an engine belongs to nobody. Root and the "
    "daemon's own user may remove all; other users may remove their own.",
    examples=(
        (
            "kvprefetchd store purge --prefix some-model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@ --yes",
            "one namespace, as stat prints it",
        ),
        ("kvprefetchd store purge --engine ENGINE --yes", "an attached engine's, as `status` names it"),
    ),
    exits={0: "done and confirmed", 1: "not confirmed", 69: "the daemon does not answer"},
)
_HASH = re.compile(r"[0-9a-fA-F]{16,128}$")
PURGE_TIMEOUT_S = 60


def add(commands: Commands) -> None:
    actions = declare(commands, "store", None, PAGE).add_subparsers(metavar="ACTION", required=True)
    ls, stat = declare(actions, "ls", run_ls, LS), declare(actions, "stat", run_stat, STAT)
    purge = declare(actions, "purge", run_purge, PURGE)
    for parser in (ls, stat):
        parser.add_argument("--prefix", metavar="TEXT", default="", help="only keys that begin so")
        text = "a cluster's master (its --metrics_port)"
        parser.add_argument("--master-http", metavar="HOST:PORT", help=text)
    ls.add_argument("--json", action="store_true", help="each key as a JSON string")
    stat.add_argument("--json", action="store_true", help="as JSON, sizes in bytes")
    which = purge.add_mutually_exclusive_group(required=True)
    which.add_argument("--prefix", metavar="TEXT", help="this namespace, as `store stat` prints it")
    which.add_argument("--engine", metavar="ID", help="those of this engine: its id or the start of it")
    purge.add_argument("--yes", action="store_true", help="do it")
    for parser in (ls, stat, purge):
        add_socket(parser)


def run_ls(arguments: argparse.Namespace) -> int:
    for key in stored_keys(master_of(arguments)[0], arguments.prefix):
        sys.stdout.write((json.dumps(key) if arguments.json else key) + "\n")
    return 0


def run_stat(arguments: argparse.Namespace) -> int:
    master, fill = master_of(arguments)
    keys = stored_keys(master, arguments.prefix)
    begin = name_of(arguments.prefix)
    known = [each for each in known_namespaces(arguments.socket) if each.name.startswith(begin)]
    fill = fill or read(master)
    print("\n".join((stat_json if arguments.json else stat_lines)(Counter(map(namespace, keys)), known, fill)))
    return 0


def stat_json(counts: Counter[str], known: Sequence[Namespace], fill: StoreFill | None) -> list[str]:
    """Return values by prefix, the known namespaces, and how full the store is, as JSON."""
    whole = fill.model_dump() if fill is not None else None
    about = {each.name: each.model_dump(exclude={"name"}) for each in known}
    answer = {"values": counts.total(), "namespaces": counts, "known": about, "store": whole}
    return [json.dumps(answer, indent=2, sort_keys=True)]


def stat_lines(counts: Counter[str], known: Sequence[Namespace], fill: StoreFill | None) -> list[str]:
    """Return the same as lines for people."""
    prefixes: dict[str, list[str]] = {each.name: [] for each in known}
    for prefix in sorted(counts):
        prefixes.setdefault(name_of(prefix), []).append(prefix)
    about = {each.name: described(each) for each in known}
    lines = []
    for name in sorted(prefixes):
        lines += [f"{counts[prefix]:>10}  {printable(prefix)}" for prefix in prefixes[name] or [name]]
        lines += [f"{'':12}{about[name]}"] if name in about else []
    lines.append(f"{counts.total():>10}  in all" if counts else "nothing is stored")
    return [*lines, filled(fill) if fill is not None else "how full it is, the master does not say"]


def described(known: Namespace) -> str:
    """Return a line with a namespace's user and meaning."""
    last = time.strftime("%Y-%m-%d %H:%M", time.gmtime(known.last_attached_s))
    parts = [f"uid={known.uid}", f"last attached {last} UTC", *(f"{k}={v}" for k, v in known.fingerprint.items())]
    return ", ".join(parts)


def known_namespaces(socket: Path) -> list[Namespace]:
    """Ask the daemon for the namespaces that this user may see; without a daemon there are none."""
    found: list[Namespace] = []
    with contextlib.suppress(Unavailable), Conversation(socket) as daemon:
        more = True
        while more:
            page = daemon.ask(NamespacesQuery(after=found[-1].name if found else ""), KnownNamespaces)
            found += page.namespaces
            more = page.more and bool(page.namespaces)
    return found


def run_purge(arguments: argparse.Namespace) -> int:
    prefixes = [arguments.prefix] if arguments.prefix else []
    try:
        command = Purge(engine=arguments.engine or "", prefixes=prefixes, timeout_ms=PURGE_TIMEOUT_S * 1000)
    except ValidationError:
        raise ConfigError(
            f"store purge: prefix should be a whole namespace, as `store stat` prints it, up to the last @: "
            f"prefix={arguments.prefix!r}"
        ) from None
    if not arguments.yes:
        raise ConfigError("store purge: removes stored KV for every engine of the namespace; say --yes to do it")
    return command_daemon(command, arguments.socket, PURGE_TIMEOUT_S + 10)


def namespace(key: str) -> str:
    """Return a key without its hash."""
    return _HASH.sub("", key)


def master_of(arguments: argparse.Namespace) -> tuple[str, StoreFill | None]:
    """Return host:port of the master's HTTP interface, and how full the daemon knows the store. Raises Unavailable."""
    if arguments.master_http:
        return str(arguments.master_http), None
    status = ask(arguments.socket, StatusQuery(), Status)
    if status.master_http:
        return status.master_http, None if status.store is None else StoreFill.model_validate(status.store)
    raise Unavailable("the daemon joined a cluster: name its master's HTTP interface with --master-http HOST:PORT")


def stored_keys(master: str, prefix: str) -> Iterator[str]:
    """Yield the store's keys, as the master streams them. Raises Unavailable."""
    url = f"http://{urllib.parse.quote(master, safe=':[]')}/get_all_keys"
    try:
        with urllib.request.urlopen(url, timeout=30) as page:
            for line in page:
                key = line.decode(errors="replace").rstrip("\n")
                if key.startswith(prefix) and key:
                    yield key
    except urllib.error.HTTPError as error:
        with error:
            standby = error.code == http.HTTPStatus.SERVICE_UNAVAILABLE
        why = "another master leads: name that one" if standby else f"the master refuses: {error}"
        raise Unavailable(f"{why}: {url}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # the last: no HTTP server answers there
        raise Unavailable(f"the master does not answer: {url}: {printable(str(error).strip())}") from None
