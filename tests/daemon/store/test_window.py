"""Which Mooncake is served: a line for versions that no test has run, a refusal for one that lacks what we call."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvprefetch.daemon.cli import findings
from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.store import joining, window
from tests.lab.daemon import Daemon

NAME = window.DISTRIBUTIONS[0]


@pytest.mark.parametrize("version", [*window.TRIED, f"{window.TRIED[0]}.post1", f"{window.TRIED[-1]}.post2"])
def test_a_version_that_was_run_needs_no_line(version: str) -> None:
    assert window.untried({NAME: version}) == ""


@pytest.mark.parametrize("versions", [{NAME: "0.3.99"}, {NAME: "0.4.0"}, {NAME: "0.3.1"}, {}])
def test_another_version_is_one_line_with_what_was_run(versions: dict[str, str]) -> None:
    line = window.untried(versions)
    assert "\n" not in line
    assert "tried=" + ", ".join(window.TRIED) in line
    assert all(f"{name}={version}" in line for name, version in versions.items())


def test_doctor_names_a_version_that_no_test_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "installed", lambda: {NAME: "0.3.99"})
    (finding,) = findings.libraries(DaemonConfig())
    assert (finding.level, "0.3.99" in finding.what) == ("note", True)


@pytest.mark.store
def test_the_installed_client_has_all_that_the_daemon_calls() -> None:
    pytest.importorskip("mooncake")
    assert window.lacks(joining.import_client()) == []


def test_what_a_client_lacks_is_named() -> None:
    class Client:
        def setup(self) -> None:
            """Set up: engine: object, tenant_id: str, enable_ssd_offload: bool."""

    lacking = window.lacks(Client)
    assert "client.batch_get_into" in lacking
    assert "client.setup(ssd_offload_path=)" in lacking
    assert "client.setup" not in lacking
    assert "client.setup(engine=)" not in lacking


def test_a_daemon_says_so_at_its_start_and_serves(patched: Callable[..., Daemon]) -> None:
    """Once, with the version that is installed."""
    daemon = patched("from kvprefetch.daemon.store import window\nwindow.TRIED = ('0.0.1',)\n")
    [said] = daemon.records("mooncake.untried")
    assert "tried=0.0.1" in said["error"]
