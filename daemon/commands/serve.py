"""`kvprefetchd serve`: serve engines on a Unix socket until told to stop."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ..client import Unavailable
from ..config import ConfigError, DaemonConfig, load
from ..logs import configure
from .common import Commands, declare


def add(commands: Commands) -> None:
    parser = declare(commands, "serve", "serve engines on a Unix socket", run)
    for name, field in DaemonConfig.model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="VALUE", help=f"{field.description or ''} (default: {default})"
        )


def run(arguments: argparse.Namespace) -> int:
    flags = {name: getattr(arguments, name) for name in DaemonConfig.model_fields}
    config = load({name: value for name, value in flags.items() if value is not None})
    # Imported late: `kvprefetchd --help` and configuration errors need no Mooncake.
    from ..embedded import EmbeddedError
    from ..service import Daemon
    from ..store import StoreError
    from ..store_settings import SettingsError

    try:
        Daemon(config, configure(config.log_level)).run()
        # Everything is closed. With a disk tier Mooncake's destructors would now wait about ten seconds for a thread.
        sys.stdout.flush()
        os._exit(0)
    except SettingsError as error:
        raise ConfigError(str(error)) from None
    except (StoreError, EmbeddedError) as error:
        raise Unavailable(f"store: {error}") from None
