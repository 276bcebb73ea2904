"""`kvprefetchd serve`: serve engines on a Unix socket until told to stop."""

from __future__ import annotations

import argparse
import os

from ..client import Unavailable
from ..config import ConfigError
from ..logs import configure
from ..sources import resolve
from .common import Commands, add_configuration, configuration_sources, declare


def add(commands: Commands) -> None:
    add_configuration(declare(commands, "serve", "serve engines on a Unix socket", run))


def run(arguments: argparse.Namespace) -> int:
    sources = configuration_sources(arguments)
    config = resolve(sources).config
    # Imported late: `kvprefetchd --help` and configuration errors need no Mooncake.
    from ..embedded import EmbeddedError
    from ..service import Daemon
    from ..store import StoreError
    from ..store_settings import SettingsError

    try:
        Daemon(config, configure(config.log_level), lambda: resolve(sources).config).run()
        # Everything is closed. With a disk tier Mooncake's destructors would now wait about ten seconds for a thread.
        os._exit(0)
    except SettingsError as error:
        raise ConfigError(str(error)) from None
    except (StoreError, EmbeddedError) as error:
        raise Unavailable(f"store: {error}") from None
