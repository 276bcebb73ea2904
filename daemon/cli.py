"""The command line `kvprefetchd`: flags become the configuration model, errors become one line and an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

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
        return _serve(load(values))
    except ConfigError as error:
        print(f"kvprefetchd: {error}", file=sys.stderr)
        return EX_CONFIG


def _serve(config: DaemonConfig) -> int:
    # Imported late: `kvprefetchd --help` and configuration errors need no Mooncake.
    from .service import Daemon
    from .store import SettingsError, StoreError

    try:
        return Daemon(config, configure(config.log_level)).run()
    except SettingsError as error:
        raise ConfigError(str(error)) from None
    except StoreError as error:
        print(f"kvprefetchd: store: {error}", file=sys.stderr)
        return EX_UNAVAILABLE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvprefetchd", description="Event-driven KV-cache prefetch daemon.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    serve = commands.add_parser("serve", help="serve engines on a Unix socket", allow_abbrev=False)
    for name, field in DaemonConfig.model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        serve.add_argument(
            f"--{name.replace('_', '-')}", metavar="VALUE", help=f"{field.description or ''} (default: {default})"
        )
    return parser
