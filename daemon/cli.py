"""The command line `kvprefetchd`: flags become the configuration model, errors become one line and an exit status."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..shmring import protocol
from .config import ConfigError, DaemonConfig, load
from .logs import configure

EX_CONFIG = 78
EX_UNAVAILABLE = 69


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 69 (store unavailable) or 78 (bad configuration)."""
    try:
        parsed = _parser().parse_args(arguments)
        values = {key: value for key, value in vars(parsed).items() if value is not None and key != "command"}
        return _serve(load(values)) if parsed.command == "serve" else _status(load(values))
    except ConfigError as error:
        print(f"kvprefetchd: {error}", file=sys.stderr)
        return EX_CONFIG


def _serve(config: DaemonConfig) -> int:
    # Imported late: `kvprefetchd --help` and configuration errors need no Mooncake.
    from .embedded import EmbeddedError
    from .service import Daemon
    from .store import SettingsError, StoreError

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


def _status(config: DaemonConfig) -> int:
    """Ask the daemon behind the socket and print its answer as JSON."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5)
        try:
            sock.connect(str(config.socket))
            protocol.send_message(sock, protocol.StatusQuery())
            received = protocol.receive_message(sock)
        except OSError as error:
            print(f"kvprefetchd: no daemon answers: socket={str(config.socket)!r}: {error}", file=sys.stderr)
            return EX_UNAVAILABLE
    if received is None or not isinstance(received[0], protocol.Status):
        print(f"kvprefetchd: unexpected answer: {received}", file=sys.stderr)
        return EX_UNAVAILABLE
    print(received[0].model_dump_json(indent=2))
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
    status = commands.add_parser("status", help="print what the daemon holds, as JSON", allow_abbrev=False)
    status.add_argument("--socket", metavar="PATH")
    return parser
