"""`kvprefetchd docs` and `reload`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvprefetch.daemon.cli.pages import FILES
from tests.lab.daemon import Daemon
from tests.support.command import kvprefetchd
from tests.support.pages import ROOT
from tests.support.waiting import eventually


@pytest.mark.parametrize("name", FILES)
def test_a_page_is_printed_and_in_the_wheel(name: str) -> None:
    assert kvprefetchd("docs", name).stdout == (ROOT / "docs" / FILES[name]).read_text()
    packaged = next(
        line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"kvprefetch.docs" = [' in line
    )
    assert f'"{FILES[name]}"' in packaged


def test_a_reload_is_told_to_the_daemon(serve: Callable[..., Daemon], tmp_path: Path) -> None:
    config = tmp_path / "kvprefetchd.toml"
    config.write_text("max_engines = 3\n")
    daemon = serve(extra=("--config", str(config)))
    config.write_text("max_engines = 4\n")
    done = kvprefetchd("reload", "--socket", daemon.socket)
    assert (done.returncode, done.stdout[:20]) == (0, "the daemon took over"), done
    eventually(lambda: daemon.records("config.changed"), what="the change")
    assert daemon.records("config.changed")[0]["after"] == "4"
    absent = kvprefetchd("reload", "--socket", tmp_path / "none")
    assert absent.returncode == 69
