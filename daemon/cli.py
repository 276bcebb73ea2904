"""The command line `kvprefetchd`: flags become the configuration model, errors become one line and an exit status."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from ..shmring import protocol, view
from .config import ConfigError, DaemonConfig, load
from .logs import configure

EX_CONFIG = 78
EX_UNAVAILABLE = 69
MAX_STAT = 64  # engines shown


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 69 (store or daemon not available) or 78 (bad configuration)."""
    try:
        parsed = _parser().parse_args(arguments)
        config = load({key: value for key, value in vars(parsed).items() if value is not None and key != "command"})
        if parsed.command == "serve":
            return _serve(config)
    except ConfigError as error:
        print(f"kvprefetchd: {error}", file=sys.stderr)
        return EX_CONFIG
    try:
        return {"status": _status, "stat": _stat}[parsed.command](config)
    except (OSError, protocol.ProtocolError) as error:
        print(f"kvprefetchd: no daemon answers: socket={str(config.socket)!r}: {error}", file=sys.stderr)
        return EX_UNAVAILABLE


def _serve(config: DaemonConfig) -> int:
    # Imported late: `kvprefetchd --help` and configuration errors need no Mooncake.
    from .embedded import EmbeddedError
    from .service import Daemon
    from .store import StoreError
    from .store_settings import SettingsError

    try:
        Daemon(config, configure(config.log_level)).run()
        # Everything is closed. With a disk tier Mooncake's destructors would now wait about ten seconds for a thread.
        sys.stdout.flush()
        os._exit(0)
    except SettingsError as error:
        raise ConfigError(str(error)) from None
    except (StoreError, EmbeddedError) as error:
        print(f"kvprefetchd: store: {error}", file=sys.stderr)
        return EX_UNAVAILABLE


def _ask(config: DaemonConfig, query: protocol.Message) -> tuple[protocol.Message, list[int]]:
    """One question to the daemon behind the socket. Raises OSError or ProtocolError when it does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5)
        sock.connect(str(config.socket))
        protocol.send_message(sock, query)
        received = protocol.receive_message(sock, max_fds=MAX_STAT)
    if received is None:
        raise OSError("the daemon hung up")
    return received


def _status(config: DaemonConfig) -> int:
    """Print the daemon's own account."""
    answer, _ = _ask(config, protocol.StatusQuery())
    print(answer.model_dump_json(indent=2))
    return 0


def _stat(config: DaemonConfig) -> int:
    """Print what the control segments say, read here and not by the daemon."""
    answer, fds = _ask(config, protocol.StatQuery())
    names = {state.value: state.name.lower() for state in protocol.FlagState}
    shown = []
    for fd, engine in zip(fds, answer.engines if isinstance(answer, protocol.Segments) else [], strict=False):
        try:
            shown.append({"engine": engine, **view.read(fd, time.monotonic_ns(), names)})
        finally:
            os.close(fd)
    print(json.dumps(shown, indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvprefetchd", description="Event-driven KV-cache prefetch daemon.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    serve = commands.add_parser("serve", help="serve engines on a Unix socket", allow_abbrev=False)
    for name, field in DaemonConfig.model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        serve.add_argument(
            f"--{name.replace('_', '-')}", metavar="VALUE", help=f"{field.description or ''} (default: {default})"
        )
    for command, text in (
        ("status", "print what the daemon says it holds, as JSON"),
        ("stat", "print what the shared memory of the attached engines says, read-only, as JSON"),
    ):
        asking = commands.add_parser(command, help=text, allow_abbrev=False)
        asking.add_argument("--socket", metavar="PATH")
    return parser
