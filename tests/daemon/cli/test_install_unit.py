"""`install-unit`: hardened units for the environment that wrote them, which systemd's own tools accept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvprefetch.daemon.cli import install_unit
from kvprefetch.daemon.cli.common import EX_UNAVAILABLE
from kvprefetch.daemon.cli.main import EX_CONFIG, main
from tests.support.command import kvprefetchd, run

UNITS = ("kvprefetchd.service", "kvprefetchd-user.service")
needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def install(root: Path, *arguments: str) -> str:
    result = kvprefetchd("install-unit", "--root", root, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def analyze(*arguments: object) -> str:
    result = run(["systemd-analyze", "--no-pager", *map(str, arguments)])
    assert (result.returncode, result.stderr.strip()) == (0, ""), result.stdout
    return result.stdout


def exposure(unit: Path) -> float:
    found = re.search(r"exposure level for \S+: ([\d.]+)", analyze("security", "--offline=true", unit))
    assert found is not None
    return float(found[1])


@needs_analyze
@pytest.mark.parametrize(
    "drop_ins", [(), ("--gpu",), ("--rdma",), ("--gpu", "--rdma", "--cluster", "--logfile", "--activation")]
)
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path, drop_ins: tuple[str, ...]) -> None:
    install(tmp_path, *drop_ins)
    units = sorted((tmp_path / "etc/systemd/system").glob("kvprefetchd.*"))
    analyze("verify", *[unit for unit in units if unit.is_file()])


@needs_analyze
@pytest.mark.parametrize(("drop_in", "most"), [(None, 1.5), ("--gpu", 2.0)])
def test_the_service_is_hardened(tmp_path: Path, drop_in: str | None, most: float) -> None:
    install(tmp_path, *([drop_in] if drop_in is not None else []))
    assert exposure(tmp_path / "etc/systemd/system/kvprefetchd.service") <= most


@needs_analyze
def test_the_user_s_unit_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/config")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    said = install(tmp_path, "--user")
    unit = tmp_path / "config/systemd/user/kvprefetchd.service"
    analyze("--user", "verify", unit)
    assert "systemctl --user enable --now kvprefetchd" in said
    assert "/config/kvprefetch/kvprefetchd.toml" in unit.read_text()


def test_what_is_written_starts_this_environment(tmp_path: Path) -> None:
    """The program of ExecStart runs, and accepts the configuration that was written beside it."""
    install(tmp_path)
    unit = (tmp_path / "etc/systemd/system/kvprefetchd.service").read_text()
    assert not re.search(r"@[A-Z_]+@", unit)
    command = re.search(r"^ExecStart=(.*) serve --config (\S+)$", unit, re.MULTILINE)
    assert command is not None
    config = tmp_path / command[2].lstrip("/")
    result = run([*command[1].split(), "check-config", "--config", str(config)])
    assert result.returncode == 0, result.stderr


def test_a_configuration_that_is_there_is_kept(tmp_path: Path) -> None:
    install(tmp_path)
    config = tmp_path / "etc/kvprefetch/kvprefetchd.toml"
    config.write_text("max_engines = 3\n")
    assert "kept" in install(tmp_path)
    assert config.read_text() == "max_engines = 3\n"


def test_the_package_has_every_file_of_the_folder() -> None:
    """In a checkout the folder is beside the code; in a wheel only what its patterns name."""
    root = Path(__file__).parents[3]
    [patterns] = re.findall(r'^"kvprefetch.systemd" = \[(.*)\]', (root / "pyproject.toml").read_text(), re.MULTILINE)
    packed = {path for each in re.findall('"(.*?)"', patterns) for path in (root / "systemd").glob(each)}
    assert {path for path in (root / "systemd").rglob("*") if path.is_file()} - packed == {root / "systemd/README.md"}


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    said = install(tmp_path, "--dry-run", "--activation")
    assert "ListenSequentialPacket=" in said
    assert "WatchdogSec=30" in said
    assert list(tmp_path.iterdir()) == []


def test_a_program_s_path_survives_the_unit_file() -> None:
    assert install_unit.quoted("/opt/a/bin/kvprefetchd") == "/opt/a/bin/kvprefetchd"
    assert install_unit.quoted("/opt/50%/my env/x") == '"/opt/50%%/my env/x"'
    files = install_unit.system_files([], ["/home/x/venv/bin/kvprefetchd"])
    assert "ProtectHome=read-only" in files[Path("/etc/systemd/system/kvprefetchd.service")]


@pytest.mark.parametrize("name", UNITS)
def test_failures_are_tried_again_however_often_and_nothing_dumps_core(name: str) -> None:
    """Five crashes are not the end for good; a stop waits 60 s for store calls, FLUSH_S for the disk, and some more."""
    from kvprefetch.daemon.runtime.backend import FLUSH_S

    values = dict(re.findall(r"^(\w+)=(.*)$", install_unit.template(name), re.MULTILINE))
    assert values["Restart"] == "on-failure"
    assert (int(values["RestartSec"]), values["StartLimitIntervalSec"]) == (5, "0")
    assert values["RestartPreventExitStatus"] == str(EX_CONFIG) != str(EX_UNAVAILABLE)
    assert values["LimitCORE"] == "0"
    assert int(values["TimeoutStopSec"]) > 60 + FLUSH_S + 10
    assert values["KillMode"] == "mixed", "a signal to the master as well would end the writing to disk"


@pytest.mark.parametrize(
    ("release", "arguments", "waits"),
    [
        ("252 (252.39-1)", [], False),
        ("253~rc1", ["--user"], True),
        ("257 (257.8-1)", [], True),
        ("257 (257.8-1)", ["--root", "image"], False),
    ],
)
def test_a_systemd_that_can_waits_for_a_reload(tmp_path: Path, release: str, arguments: list[str], waits: bool) -> None:
    """It sends the signal itself then. An image gets the unit that any systemd takes."""
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho 'systemd {release}'\n")
    systemctl.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = kvprefetchd("install-unit", "--dry-run", *arguments, PATH=path).stdout
    kind, other = ("notify-reload", "notify") if waits else ("notify", "notify-reload")
    assert f"\nType={kind}\n" in said
    assert f"\nType={other}\n" not in said
    assert ("ExecReload=" in said) is not waits


def test_a_program_that_the_service_s_user_cannot_reach_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    script = home / "venv/bin/kvprefetchd"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    tmp_path.chmod(0o755)
    home.chmod(0o700)
    monkeypatch.setattr(sys, "prefix", str(home / "venv"))
    image = str(tmp_path / "image")
    for arguments in (["--dry-run"], ["--root", image], ["--root", image, "--dry-run"]):
        assert main(["install-unit", *arguments]) == 0
        assert f"the user kvprefetch cannot start {script}" in capsys.readouterr().err
    assert install_unit.closed("/usr/bin/env") is None


def test_what_the_manual_removes_is_what_was_written(tmp_path: Path) -> None:
    manual = (Path(__file__).parents[3] / "docs/install/systemd.md").read_text()
    install(tmp_path, *(f"--{name}" for name in install_unit.DROP_INS))
    removal = next(line for line in manual.splitlines() if line.startswith("rm -r /etc/"))
    subprocess.run(["sh", "-ec", removal.replace(" /etc/", f" {tmp_path}/etc/")], timeout=10, check=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
