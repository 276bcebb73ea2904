"""`kvprefetchd store ls`, `stat` and `purge`: list, count or remove what the store holds, by the begin of its keys."""

from __future__ import annotations

import http.client
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import click

from kvprefetch.client.control import Conversation, Unavailable, ask

from ...kv.keys import name_of
from ...shmring.wire.admin import MAX_NAMESPACE_BYTES, MAX_REMOVED, Remove, Removed, Status, StatusQuery
from ...shmring.wire.codec import MAX_MESSAGE_BYTES
from ..config.model import ConfigError
from ..store import addresses
from ..store.fill import StoreFill, read
from ..telemetry.overview import filled
from ..telemetry.pretty import printable
from .common import Arguments, SocketPage, declare, flag, option, show, socket_option
from .help_page import CommandGroup

PAGE = SocketPage(
    "list, count or remove what the store holds",
    details="A namespace is the part of a block's key before the hash: user, `cache_prefix`, model, rank, fingerprint "
    "and, after a reset, the weights. All three ask the Mooncake master's HTTP interface, which lists the keys of all "
    "users: the embedded store's, or --master-http.",
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
    details="The counts come from the Mooncake master's HTTP interface. A key that begins with `u1000@` is of an "
    "engine of the user with this number.",
    examples=(
        ("kvprefetchd store stat", "every namespace"),
        ("kvprefetchd store stat --json", "sizes in bytes, for a program"),
    ),
    exits={69: "the daemon or the master does not answer"},
)
PURGE = SocketPage(
    "remove values, by the begin of their keys",
    details="It removes a few hundred values at a time, so that look-ups of engines hardly wait for it, and says how "
    "far it is. Attached engines go on: staged blocks stay valid, and later saves are stored again. A value that a "
    "disk holds as well is there again once the disk's owner has started anew; to be rid of those, stop it and remove "
    "its folder. Root and the daemon's own user may remove all values, other users those of their own engines.",
    examples=(
        (
            "kvprefetchd store purge --prefix u1000@some-model@ --yes",
            "a model of one user's engines, as stat prints it",
        ),
        ("kvprefetchd store purge --engine ENGINE --yes", "an attached engine's, as `status` names it"),
    ),
    exits={0: "no such value is left", 1: "some are left", 69: "the daemon or the master does not answer"},
)
_HASH = re.compile(r"[0-9a-fA-F]{16,128}$")
SLICE_TIMEOUT_S = 60  # a slice waits for the put that runs
TIMEOUT_S = 30  # for the next part of the list
MAX_KEY_BYTES = 65536
PASSES = 3  # over all keys: engines may store on meanwhile
PROGRESS_S = 1.0


def add(commands: CommandGroup) -> None:
    actions = CommandGroup("store", PAGE)
    commands.add_command(actions)
    prefix = option("--prefix", metavar="TEXT", default="", help="only keys that begin so")
    where = (
        option("--master-http", metavar="HOST:PORT", help="a cluster's master (its --metrics_port)"),
        socket_option(),
    )
    declare(actions, "ls", run_ls, LS, prefix, flag("--json", "all of them, as JSON"), *where)
    declare(actions, "stat", run_stat, STAT, prefix, flag("--json", "as JSON, sizes in bytes"), *where)
    which = (
        option("--prefix", metavar="TEXT", help="values whose keys begin so, as `store stat` prints them"),
        option("--engine", metavar="ID", help="or those of this engine: its id or the start of it"),
    )
    declare(actions, "purge", run_purge, PURGE, *which, flag("--yes", "do it"), *where)


def run_ls(arguments: Arguments) -> int:
    keys = stored_keys(master_of(arguments)[0], arguments.prefix)
    if arguments.json:
        show({"keys": list(keys)})
    else:
        sys.stdout.writelines(f"{printable(key)}\n" for key in keys)
    return 0


def run_stat(arguments: Arguments) -> int:
    master, fill = master_of(arguments)
    counts = Counter(map(namespace, stored_keys(master, arguments.prefix)))
    fill = fill or read(master)
    if arguments.json:
        whole = fill.model_dump() if fill is not None else None
        show({"values": counts.total(), "namespaces": dict(sorted(counts.items())), "store": whole})
        return 0
    for prefix in sorted(counts):
        print(f"{counts[prefix]:>10}  {printable(prefix)}")
    print(f"{counts.total():>10}  in all" if counts else "nothing is stored")
    print(filled(fill) if fill is not None else "how full it is, the master does not say")
    return 0


def run_purge(arguments: Arguments) -> int:
    if (arguments.prefix is None) == (arguments.engine is None):
        raise click.UsageError("name either --prefix or --engine.", click.get_current_context())
    if not arguments.yes:
        raise ConfigError("store purge: removes stored KV for every engine that shares it; say --yes to do it")
    if arguments.prefix == "":
        raise ConfigError("store purge: prefix should have at least 1 character: prefix=''")
    master = master_of(arguments)[0]
    names = namespaces_of(arguments) if arguments.engine else set()
    removed = 0
    with Conversation(arguments.socket, SLICE_TIMEOUT_S) as daemon:
        for _ in range(PASSES):
            stored = stored_keys(master, arguments.prefix or "")
            keys = [key for key in stored if not names or name_of(namespace(key)) in names]
            if not keys:
                count = ask(arguments.socket, StatusQuery(), Status).engine_count
                staged = (
                    "; attached engines still load what is staged for them, until the daemon restarts" if count else ""
                )
                print(f"{removed} values removed{staged}")
                return 0
            removed += remove(daemon, keys)
    print(f"{removed} values removed; some are left: engines store on, or the store does not answer")
    return 1


def remove(daemon: Conversation, keys: list[str]) -> int:
    """Remove these values slice by slice; return how many are gone. Writes how far it is."""
    done = gone = 0
    shown_s = time.monotonic()
    waiting = iter(keys)
    most = MAX_MESSAGE_BYTES // 2 // max(len(json.dumps(key)) for key in keys)
    while part := list(islice(waiting, min(MAX_REMOVED, most))):
        answer = daemon.ask(Remove(keys=part), Removed)
        done, gone = done + len(part), gone + answer.removed
        if time.monotonic() - shown_s >= PROGRESS_S:
            shown_s = time.monotonic()
            print(f"{done} of {len(keys)} values", file=sys.stderr)
    return gone


def namespaces_of(arguments: Arguments) -> set[str]:
    """Return the namespaces of the attached engine with this id, or with one that begins so. Raises ConfigError."""
    status = ask(arguments.socket, StatusQuery(), Status)
    found = {str(each["engine"]): str(each["namespace"]) for each in status.engines}
    named = [names for engine, names in found.items() if engine.startswith(arguments.engine)]
    named = [found[arguments.engine]] if arguments.engine in found else named
    if len(named) != 1:
        how = "several engines have" if named else "no attached engine has"
        raise ConfigError(f"store purge: {how} an id that begins so: engine={arguments.engine!r}")
    names = set(named[0].split(", "))
    if len(named[0].encode()) > MAX_NAMESPACE_BYTES - 4 or not all(name.endswith("@") for name in names):
        raise ConfigError(
            f"store purge: the engine has too many namespaces to name here: engine={arguments.engine!r}: "
            "use --prefix, with each that `store stat` prints"
        )
    return names


def namespace(key: str) -> str:
    """Return a key without its hash."""
    return _HASH.sub("", key)


def master_of(arguments: Arguments) -> tuple[str, StoreFill | None]:
    """Return host:port of the master's HTTP interface, and how full the daemon knows the store. Raises Unavailable."""
    if arguments.master_http is not None:
        if addresses.split(arguments.master_http) is None:
            text = "must be HOST:PORT, with a port of 1 to 65535 ([…]:PORT for IPv6)"
            raise ConfigError(f"store: --master-http {text}: master_http={arguments.master_http!r}")
        return str(arguments.master_http), None
    status = ask(arguments.socket, StatusQuery(), Status)
    if status.master_http:
        return status.master_http, None if status.store is None else StoreFill.model_validate(status.store)
    raise Unavailable("the daemon joined a cluster: name its master's HTTP interface with --master-http HOST:PORT")


def stored_keys(master: str, prefix: str) -> Iterator[str]:
    """Yield the store's keys, as the master streams them. Raises Unavailable, at the end of a list that breaks off.

    It asks no proxy, and follows no redirection: what another server says of itself is no key.
    """
    where = f"master_http={master!r}"
    try:
        with closing(http.client.HTTPConnection(master, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", "/get_all_keys")
            answer = connection.getresponse()
            if answer.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
                raise Unavailable(f"another master leads: name that one: {where}")
            if answer.status != http.HTTPStatus.OK:
                raise Unavailable(f"the master refuses: {where}: HTTP {answer.status} {answer.reason}")
            for line in _lines(answer):
                if (key := line.decode(errors="replace")).startswith(prefix) and key:
                    yield key
    except (OSError, ValueError, http.client.HTTPException) as error:  # the last: no HTTP server answers there
        why = printable(str(error).strip())
        raise Unavailable(f"the master does not answer, or breaks off: {where}: {why}") from None


def _lines(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the lines of an answer, the last one only if it is whole. Raises ValueError, HTTPException."""
    rest = b""
    while part := answer.read(1 << 16):
        *whole, rest = (rest + part).split(b"\n")
        yield from whole
        if len(rest) > MAX_KEY_BYTES:
            raise ValueError(f"a line is no key: bytes={len(rest)} max={MAX_KEY_BYTES}")
    if answer.length or (answer.length is None and not answer.chunked):  # without either an end is no end
        raise ValueError(f"the list breaks off: missing_bytes={answer.length or 'not known'}")
    yield rest
