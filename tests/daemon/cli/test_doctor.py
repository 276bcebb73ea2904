"""`doctor`, its bundle, and `store`: with a real daemon, a real store, and with missing ones."""

from __future__ import annotations

import grp
import json
import os
import re
import shutil
import socket
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import CapturingLogger

from kvprefetch.client import Unavailable
from kvprefetch.daemon.cli import doctor, findings, measure
from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.cli.store import stored_keys
from kvprefetch.daemon.config import machine
from kvprefetch.daemon.config.machine import machine_bytes
from kvprefetch.daemon.config.model import ConfigError, DaemonConfig
from kvprefetch.daemon.config.sizes import size
from kvprefetch.daemon.control.listener import check_place
from kvprefetch.daemon.runtime import requirements
from kvprefetch.daemon.store import window
from tests.daemon.stores import absent_cluster, blocks, stored
from tests.lab.daemon import Daemon
from tests.lab.process import free_ports
from tests.support.command import kvprefetchd, run
from tests.support.fake_engine import FakeEngine
from tests.support.ordinary import AS_NOBODY
from tests.support.telemetry import answering


def test_doctor_sees_a_daemon_a_store_round_trip_and_bundles_it(
    serve: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    daemon = serve(extra=("--metrics-port", str(port)))
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(daemon.lines))
    (tmp_path / "bundle.tar.gz").touch(0o644)
    monkeypatch.setenv("KVPREFETCHD_SOCKET", str(daemon.socket))
    sizes = ("--staging", "64MiB", "--memory", "64MiB", "--metrics-port", port)
    result = kvprefetchd("doctor", *sizes, "--bundle", tmp_path / "bundle.tar.gz", "--log", log)
    assert result.returncode == 0, result.stdout + result.stderr
    for words in (f"daemon answers: pid {daemon.pid}", "round trip through a private store", "fetch_threads="):
        assert words in result.stdout
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        assert (tmp_path / "bundle.tar.gz").stat().st_mode & 0o777 == 0o600
        parts = {member.name: archive.extractfile(member).read().decode() for member in archive}  # type: ignore[union-attr]
    assert json.loads(parts["kvprefetch/status.json"])["pid"] == daemon.pid
    assert "daemon.ready" in parts["kvprefetch/log.jsonl"]
    assert "# HELP kvprefetch" in parts["kvprefetch/metrics.txt"]
    assert 'staging = "64MiB"' in parts["kvprefetch/config.toml"]
    assert "kvprefetch" in json.loads(parts["kvprefetch/versions.json"])


def test_doctor_knows_how_large_the_file_system_is(tmp_path: Path) -> None:
    more = shutil.disk_usage(tmp_path).free - (100 << 20)  # 256 MiB stay free
    (finding,) = findings.disk(DaemonConfig.model_validate({"disk": f"{tmp_path}:{more}"}))
    assert finding.level == "bad"
    assert f"up to {size(more)}, room for" in finding.what
    (tmp_path / "1.bucket").symlink_to("gone")  # listed, and not there any more when it is looked at
    (finding,) = findings.disk(DaemonConfig.model_validate({"disk": f"{tmp_path}:64MiB"}))
    assert finding.level == "ok"


def test_a_user_without_access_to_the_socket_is_never_sent_into_root_s_group() -> None:
    others = next(group.gr_gid for group in grp.getgrall() if group.gr_gid != 0)
    kept_out = [(0, 0o660, False), (others, 0o600, False), (4_000_000_000, 0o660, False)]
    for gid, mode, joins in (*kept_out, (others, 0o660, True)):
        advice = findings.way_in(os.stat_result((mode, 1, 1, 1, 0, gid, 0, 0, 0, 0)), 1234)
        if joins:
            assert advice == f"join the group {grp.getgrgid(gid).gr_name}"
        else:
            assert "--socket-group GROUP" in advice
            assert "--allow-uids 1234" in advice


def broken_places(folder: Path, port: int) -> dict[str, tuple[str, ...]]:
    """Options of serve by the words of its refusal; each names a place that it cannot use."""
    (folder / "file").write_text("precious")
    for name in ("another's", "open"):
        (folder / name).mkdir()
        (folder / name / "1.bucket").touch()
    os.chown(folder / "another's", 65534, -1)
    (folder / "open").chmod(0o777)
    (folder / "secret").write_text("a token of this test")
    (folder / "secret").chmod(0o600)
    return {
        "metrics_port: cannot be bound": ("--metrics-port", str(port)),
        "door_port: cannot be bound": ("--door-port", str(port), "--door-token", f"{folder}/secret"),
        "the path exists and is not a socket": ("--socket", f"{folder}/file"),
        "other users could replace it in its folder": ("--socket", f"{folder}/another's/s.sock"),
        "socket: cannot be bound: Not a directory": ("--socket", f"{folder}/file/below/s.sock"),
        "the folder above it is not there": ("--disk", f"{folder}/missing/disk"),
        "disk: the folder belongs to another user": ("--disk", f"{folder}/another's"),
        "disk: others may write to the folder": ("--disk", f"{folder}/open"),
        "disk: cannot be used: Not a directory": ("--disk", f"{folder}/file"),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
@pytest.mark.store
def test_doctor_passes_only_where_serve_would_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each port, socket and folder that serve refuses is bad for doctor, which changes none of them."""
    monkeypatch.delitem(findings.CHECKS, "store")
    (free,) = free_ports(1)
    fine = ["--socket", f"{tmp_path}/s.sock", "--staging", "64MiB", "--memory", "64MiB", "--metrics-port", str(free)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = broken_places(tmp_path, taken.getsockname()[1])
        before = sorted((str(path), path.stat().st_mode) for path in tmp_path.rglob("*"))
        assert main(["doctor", *fine]) == 0, capsys.readouterr()
        for words, place in places.items():
            refused = kvprefetchd("serve", *fine, *place)
            assert refused.returncode in (69, 78)
            assert words in refused.stderr, place
            capsys.readouterr()
            assert main(["doctor", *fine, *place]) == 1, place
            bad = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bad")]
            assert len(bad) == 1, (place, bad)
        assert sorted((str(path), path.stat().st_mode) for path in tmp_path.rglob("*")) == before


def test_a_folder_in_which_a_user_may_make_no_socket_is_refused(tmp_path: Path) -> None:
    """An ordinary user gets the refusal that serve would give, for a folder that is there and for one that is not."""
    script = "import sys; from pathlib import Path; from kvprefetch.daemon.control.listener import check_place\n"
    for folder in (tmp_path, tmp_path / "missing"):
        tmp_path.chmod(0o555)
        refused = run([*AS_NOBODY, sys.executable, "-c", f"{script}check_place(Path(sys.argv[1]))", f"{folder}/s.sock"])
        assert f"ConfigError: socket: cannot be bound: this user may not write to {tmp_path}" in refused.stderr
    tmp_path.chmod(0o755)
    check_place(tmp_path / "s.sock")


@pytest.mark.store
def test_doctor_says_what_is_bad_and_what_to_do(tmp_path: Path) -> None:
    config = absent_cluster(tmp_path, metadata_server="http://operator:hunter2@127.0.0.1/x")
    where = ("--socket", tmp_path / "none.sock", "--mooncake-config", config, "--metrics-port", 0)
    result = kvprefetchd("doctor", *where, "--staging", machine_bytes(), "--bundle", tmp_path / "b.tar.gz")
    assert result.returncode == 1, result.stdout + result.stderr
    bad = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("bad")]
    assert bad == ["memory", "master", "store"]
    assert "cluster.conf" in result.stdout
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        text = b"".join(archive.extractfile(member).read() for member in archive).decode()  # type: ignore[union-attr]
    assert "hunter2" not in text
    assert "[removed]@127.0.0.1" in text
    assert "no metrics: " in text


def test_without_mooncake_only_that_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "DISTRIBUTIONS", ())
    monkeypatch.setattr(measure, "find_spec", lambda _: None)
    (libraries,) = findings.libraries(DaemonConfig())
    (store,) = findings.store(DaemonConfig())
    assert "pip install '.[daemon-cpu]'" in libraries.advice
    assert "Mooncake is not installed here: run this in the daemon's environment" in store.what


@pytest.mark.parametrize(
    ("reads", "found", "name", "event"),
    [
        ("usable_cores", 1, "cores", ""),
        ("address_bytes", 1 << 20, "limits", ""),
        ("startable_threads", 3, "limits", ""),
        ("quota_cores", 0.5, "cores", "cores.few"),
        ("available_bytes", 1 << 20, "memory", "memory.short"),
    ],
)
def test_what_the_machine_lacks_is_one_list_for_doctor_and_serve(
    monkeypatch: pytest.MonkeyPatch, reads: str, found: Any, name: str, event: str
) -> None:
    config, log = DaemonConfig(staging=4096, memory=16 << 20, fetch_threads=1), CapturingLogger()
    monkeypatch.setattr(machine, reads, lambda *_: found)
    [said] = [each for each in findings.CHECKS[name](config) if each.level != "ok"]
    assert said.advice
    if event:
        requirements.check(config, log)
        assert [call.args for call in log.calls] == [(event,)]
    else:
        with pytest.raises(ConfigError, match=re.escape(said.what)):
            requirements.check(config, log)


def test_secrets_are_removed() -> None:
    text = 'x = "redis://me:pass@host:1"\n"api_key": "abc def",\nAUTH_TOKEN=xyz chunk = 5'
    assert doctor.without_secrets(text) == (
        'x = "redis://[removed]@host:1"\n"api_key": [removed],\nAUTH_TOKEN=[removed] chunk = 5'
    )


def test_a_master_that_is_no_http_server_is_one_line() -> None:
    """The likely case is the master's own port, one digit or so away from its HTTP port."""
    refusal = pytest.raises(Unavailable, match=r"^the master does not answer[^\n\x00]*garbage$")
    with answering(b"\x00\x01garbage\n\n") as stranger, refusal:
        list(stored_keys(stranger, ""))
    with pytest.raises(Unavailable, match="nonnumeric port"):
        list(stored_keys("localhost:abc", ""))


# Three engines are attached, and a purge takes nothing out of their staging.
STAGED = "attached engines still load what is staged for them, until the daemon restarts"


def counted(*at: Any) -> list[str]:
    """The counts of `store stat`, without the store's fill."""
    *lines, last = kvprefetchd("store", "stat", *at).stdout.splitlines()
    assert last.startswith("memory ")
    return " ".join(lines).split()


def test_values_are_listed_counted_and_purged_by_the_begin_of_their_keys(serve: Callable[..., Daemon]) -> None:
    daemon = serve()
    engine = FakeEngine(daemon.socket, engine_id="one-3f2a", prefix="one", ranks=2)
    other = FakeEngine(daemon.socket, engine_id="two", prefix="two")
    values, me = blocks("purged", 300), f"u{os.getuid()}@"  # more than one slice of a removal
    for part in range(0, 300, 20):
        engine.save(dict(list(values.items())[part : part + 20]))
    other.save(blocks("kept", 2))
    stored(daemon, 302)
    at = ("--socket", daemon.socket)

    listed = kvprefetchd("store", "ls", "--prefix", f"{me}one@tp_rank:0", *at)
    assert sorted(listed.stdout.split()) == sorted(f"{me}one@tp_rank:0@{digest.hex()}" for digest in values)
    everything = ["300", f"{me}one@tp_rank:0@", "300", f"{me}one@tp_rank:1@", "2", f"{me}two@tp_rank:0@"]
    assert counted(*at) == [*everything, "602", "in", "all"]
    refused = kvprefetchd("store", "purge", "--engine", "one", *at)
    assert refused.returncode == 78
    assert "--yes" in refused.stderr
    for wrong in (("--prefix", ""), ("--engine", "none")):
        assert kvprefetchd("store", "purge", *wrong, "--yes", *at).returncode == 78
    like = FakeEngine(daemon.socket, engine_id="one-77", prefix="one-77")
    several = kvprefetchd("store", "purge", "--engine", "one-", "--yes", *at)
    assert "several engines have an id that begins so: engine='one-'" in several.stderr
    # The daemon's answer has 256 bytes of an engine's namespaces, and these would be another's.
    long = FakeEngine(daemon.socket, engine_id="long", prefix="x" * (255 - len(me)))
    many = kvprefetchd("store", "purge", "--engine", "long", "--yes", *at)
    assert "too many namespaces to name here: engine='long': use --prefix" in many.stderr
    purged = kvprefetchd("store", "purge", "--engine", "one-3", "--yes", *at)
    assert (purged.returncode, purged.stdout) == (0, f"600 values removed; {STAGED}\n"), purged.stderr
    again = kvprefetchd("store", "purge", "--prefix", f"{me}one@", "--yes", *at)
    assert (again.returncode, again.stdout) == (0, f"0 values removed; {STAGED}\n")
    assert counted(*at) == ["2", f"{me}two@tp_rank:0@", "2", "in", "all"]
    for each in (engine, like, long, other):
        each.close()
