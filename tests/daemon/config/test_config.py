"""Configuration: the source of each value, refused values, and the keys that a reload changes."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture, capture_logs

from kvprefetch.daemon.config.machine import available_bytes, quota_cores
from kvprefetch.daemon.config.model import ConfigError, DaemonConfig
from kvprefetch.daemon.config.sizes import parse_size, size, size_text, whole_mib
from kvprefetch.daemon.config.sources import PREFIX, Sources, resolve
from kvprefetch.daemon.runtime.reload import reloaded
from kvprefetch.daemon.telemetry.events import LEVELS
from kvprefetch.daemon.telemetry.logs import threshold
from tests.support.command import kvprefetchd


def sources(tmp_path: Path, text: str, flags: dict[str, str] | None = None, **environ: str) -> Sources:
    file = tmp_path / "kvprefetchd.toml"
    file.write_text(text)
    return Sources.of(flags or {}, file, {PREFIX + name: value for name, value in environ.items()})


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    text = 'staging = "1GiB"\nchunk = "1MiB"\nmax_engines = 3\nallow_uids = [7, 8]\n'
    effective = resolve(sources(tmp_path, text, {"staging": "3GiB"}, STAGING="2GiB", CHUNK="2MiB"))
    config, origin = effective.config, effective.origin
    assert (config.staging, config.chunk, config.max_engines, config.max_engines_per_uid) == (3 << 30, 2 << 20, 3, 8)
    assert config.allow_uids == (7, 8)
    file = str(tmp_path / "kvprefetchd.toml")
    assert [origin[key] for key in ("staging", "chunk", "max_engines", "max_engines_per_uid")] == [
        *("--staging", "$KVPREFETCHD_CHUNK", file, "default")
    ]


@pytest.mark.parametrize(
    ("text", "environ", "words"),
    [
        ("stagin = 1", {}, ["kvprefetchd.toml", "unknown key stagin", "did you mean staging?"]),
        ("", {"FETCH_THREAD": "2"}, ["KVPREFETCHD_FETCH_THREAD", "did you mean KVPREFETCHD_FETCH_THREADS?"]),
        ("max_engines = 0", {}, ["max_engines: should be 1 to 256: max_engines=0", "kvprefetchd.toml"]),
        ("", {"STAGING": "lots"}, ["staging", "'lots'", "512MiB", "$KVPREFETCHD_STAGING"]),
        ("staging = ", {}, ["not TOML", "kvprefetchd.toml"]),
        ("[daemon]\nstaging = 1", {}, ["keys stand at the top of the file, below no table: [daemon]"]),
        ("mode = 'on'\nstaging = 8GiB", {}, ['quoted: staging = "8GiB"', "line 2"]),
        ("socket_mode = 0660 # group", {}, ['an octal number is quoted: socket_mode = "0660"']),
        ("socket_mode = '999'", {}, ["socket_mode", "'999'", "such as 0660"]),
        ("staging = '" + "9" * 400 + "GiB'", {}, ["staging: should be 4KiB to 4TiB: staging="]),
        ('socket_group = "a\\u0000"', {}, ["socket_group: should have no zero byte"]),
        ('mooncake_config = "/a\\u0000"', {}, ["mooncake_config: should have no zero byte"]),
        ('door_token = "/a\\u0000"', {}, ["door_token: should have no zero byte"]),
        ("max_engines = true", {}, ["max_engines", "number", "True"]),
        ("allow_uids = [true]", {}, ["allow_uids.0", "number", "True"]),
        ("log_level = 'loud'", {}, ["log_level", "'debug', 'info', 'warning' or 'error'", "'loud'"]),
        ("", {"SOCKET": ""}, ["1 to 107 bytes", "$KVPREFETCHD_SOCKET"]),
        ("socket = '/" + "x" * 107 + "'", {}, ["socket", "107"]),
        # A reload reads the file on the main loop: no text may end or delay the daemon.
        ("a = " + "[" * 3000, {}, ["config: not TOML: "]),
        ("staging = " + "1" * 5000, {}, ["config: not TOML: "]),
        ("# " + "x" * (1 << 16), {}, ["config: is too large: max_bytes=65536 "]),
    ],
)
def test_bad_input_names_key_value_bound_and_place(
    tmp_path: Path, text: str, environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(sources(tmp_path, text, None, **environ))
    assert "\n" not in str(caught.value)
    assert "value error" not in str(caught.value)
    assert len(str(caught.value)) < 400
    for word in words:
        assert word in str(caught.value)


def test_a_former_key_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kvprefetchd.toml"
    file.write_text("spin_us = 1\nmax_engines = 3\n")
    effective = resolve(Sources({}, {"KVPREFETCHD_DEVICE_OWNER": "daemon"}, file))
    assert effective.config.max_engines == 3
    said = capsys.readouterr().err
    for key in ("spin_us", "device_owner"):
        assert f"the key {key} is gone, and ignored: the daemon" in said


def test_a_renamed_key_has_its_value_for_a_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In each source, and as an option that no help shows; a value under the key's own name comes first."""
    (file := tmp_path / "kvprefetchd.toml").write_text("hints_port = 7001\nhints_token = 'old'\ndoor_token = 'new'\n")
    found = resolve(Sources({}, {"KVPREFETCHD_HINTS": "off"}, file))
    assert (found.config.door, found.config.door_port, found.config.door_token) == ("off", 7001, Path("new"))
    assert found.origin["door"] == "$KVPREFETCHD_HINTS"
    assert "the key hints_port is door_port now" in capsys.readouterr().err
    said = check_config("--hints", "off")
    assert said.returncode == 0
    assert 'door = "off"' in said.stdout
    assert "hints is door now" in said.stderr


def test_a_file_of_a_windows_editor_is_read(tmp_path: Path) -> None:
    """It begins with a mark of three bytes."""
    assert resolve(sources(tmp_path, "\ufeffmax_engines = 3\n")).config.max_engines == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        resolve(Sources.of({}, tmp_path / "none.toml", {}))


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("max_engines = 7")
    assert resolve(Sources.of({}, None, {"KVPREFETCHD_CONFIG": str(tmp_path / "a.toml")})).config.max_engines == 7


check_config = functools.partial(kvprefetchd, "check-config")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--disk", "relative"], "relative"),
        (["--mooncake-config", "/nonexistent.json"], "/nonexistent.json"),
        (["--socket-group", "nobody-has-this"], "nobody-has-this"),
        (["--memory", "4TiB"], "more than this machine has"),
        (["--staging", "4TiB"], "more than this machine has"),
        (["--save-share", "-1"], "save_share='-1'\n"),
        (["--stagging", "1GiB"], "Did you mean one of: '--device-staging', '--staging'"),
    ],
)
def test_check_config_refuses_what_serve_would(arguments: list[str], word: str) -> None:
    result = check_config(*arguments)
    assert result.returncode == 78
    assert word in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_reload_applies_the_keys_that_may_change_and_names_the_others() -> None:
    """Sizes are logged as people write them."""
    before = DaemonConfig.model_validate({"memory": "1GiB"})
    changes = {"staging": "8GiB", "memory": "16GiB", "max_engines": 2, "log_level": "debug", "disk": "/var/x"}
    with capture_logs() as lines:
        after, report = reloaded(before, lambda: DaemonConfig.model_validate(changes), structlog.get_logger())
    threshold.set("info")
    taken, _, restart = report.text.partition("; needs a restart: ")
    assert (report.ok, set(restart.split(", "))) == (True, {"memory", "disk"})
    assert set(taken.removeprefix("the daemon took over: ").split(", ")) == {"staging", "max_engines", "log_level"}
    assert (after.staging, after.max_engines, after.log_level) == (8 << 30, 2, "debug")
    assert (after.memory, after.disk) == (1 << 30, None)
    assert {line["key"]: (line["event"], line["before"], line["after"]) for line in lines[1:]} == {
        "staging": ("config.changed", "1GiB", "8GiB"),
        "max_engines": ("config.changed", "16", "2"),
        "log_level": ("config.changed", "info", "debug"),
        "memory": ("config.kept", "1GiB", "16GiB"),
        "disk": ("config.kept", "None", "/var/x"),
    }
    assert {line["key"] for line in lines if line["log_level"] == "warning"} == {"memory", "disk"}


@pytest.mark.parametrize("before", LEVELS)
@pytest.mark.parametrize("after", LEVELS)
def test_each_change_of_a_reload_is_seen_whatever_the_level(before: Any, after: Any) -> None:
    seen = LogCapture()
    log = structlog.wrap_logger(None, processors=[threshold, seen], wrapper_class=structlog.BoundLogger)
    threshold.set(before)
    try:
        reloaded(DaemonConfig(log_level=before), lambda: DaemonConfig(log_level=after, chunk=8192), log)
        assert seen.entries.pop(0)["event"] == "config.read"
        assert {line["key"] for line in seen.entries} == {"chunk"} | ({"log_level"} if before != after else set())
        seen.entries.clear()
        for level in LEVELS:
            getattr(log, level)("x")
        assert [line["log_level"] for line in seen.entries] == list(LEVELS[LEVELS.index(after) :])
    finally:
        threshold.set("info")


def groups(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Write a tree of control groups; return its root and the file that names our own groups."""
    for name, text in {"own": own, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder, folder / "own"


def test_the_least_quota_of_the_groups_above_counts(tmp_path: Path) -> None:
    files = {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}
    assert quota_cores(*groups(tmp_path, "0::/a/b", files)) == 1.5
    assert quota_cores(*groups(tmp_path, "0::/a/b", {"a/cpu.max": "max 100000"})) is None
    assert quota_cores(tmp_path, tmp_path / "absent") is None


def test_available_memory_is_what_the_group_can_still_get(tmp_path: Path) -> None:
    """A group that writes files is at its limit all the time: the kernel reclaims its page cache."""
    files = {"a/b/memory.max": "max", "a/b/memory.current": "900", "a/memory.max": "1000", "a/memory.current": "990"}
    assert available_bytes(*groups(tmp_path, "0::/a/b", files)) == 10
    stat = "anon 300\nshmem 90\ninactive_file 400\nactive_file 200\nslab_reclaimable 5"
    assert available_bytes(*groups(tmp_path, "0::/a/b", {"a/memory.stat": stat})) == 615
    assert available_bytes(tmp_path, tmp_path / "absent") > 1 << 20


def test_available_memory_of_an_old_control_group(tmp_path: Path) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": "1000",
        "memory/a/memory.usage_in_bytes": "990",
        "memory/a/memory.stat": "cache 500\ninactive_file 1\ntotal_inactive_file 400\ntotal_active_file 200",
        "memory/a/b/memory.limit_in_bytes": f"{2**63 - 4096}",
        "memory/a/b/memory.usage_in_bytes": "990",
    }
    assert available_bytes(*groups(tmp_path, "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/", files)) == 610


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1000, "1000"), (1024, "1KiB"), (1536, "1536"), (3 << 20, "3MiB"), (5 << 30, "5GiB"), (1 << 40, "1TiB")],
)
def test_a_size_is_shown_as_it_may_be_written(count: int, text: str) -> None:
    assert size_text(count) == text
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["512B", "1KiB", "1.5MiB", "64MiB", "1GiB", "7.9GiB", "500GiB", "2TiB", "1500TiB"])
def test_a_screen_has_the_units_of_the_configuration(text: str) -> None:
    """1GiB is shown as 1 GiB, and what is shown may be written into the configuration."""
    shown = size(parse_size(text))
    assert shown.replace(" ", "") == text
    assert parse_size(shown) == parse_size(text)


def test_a_rounded_size_never_has_1024_of_a_unit() -> None:
    assert [size(count) for count in (0, 1023.99, (1 << 20) - 1, (1 << 40) - 1)] == ["0 B", "1 KiB", "1 MiB", "1 TiB"]


def test_a_size_that_was_measured_is_shown_rounded_down() -> None:
    assert [whole_mib(count) for count in (-1, 5, (3 << 20) + 7, 2 << 30)] == ["0", "0", "3MiB", "2GiB"]


def test_a_pipe_is_refused_since_a_reload_would_wait_for_it(tmp_path: Path) -> None:
    pipe = tmp_path / "kvprefetchd.toml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"config: is a pipe, .*kvprefetchd\.toml"):
        resolve(Sources({}, {}, pipe))
