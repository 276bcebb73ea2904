"""`kvprefetchd config init` and `check-config`: a file that is written is read back as it was meant."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.daemon.cli.configuration import as_toml, commented
from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.config.sources import Effective, Sources, resolve
from tests.support.command import kvprefetchd, one_line

NOTHING: dict[str, str] = {}
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "staging": st.integers(4096, 1 << 42),
        "disk": TEXT,
        "allow_uids": st.lists(st.integers(0, 1 << 31), max_size=3),
        "socket_group": TEXT,
        "mooncake_config": st.just('/a "b"/c'),
        "save_share": st.floats(0, 0.9),
        "lease_ms": st.integers(100, 3_600_000),
        "mode": st.sampled_from(["on", "shadow", "off"]),
    },
)


def read(text: str, folder: Path) -> Effective:
    file = folder / "kvprefetchd.toml"
    file.write_text(text, encoding="utf-8")
    return resolve(Sources.of({}, file, NOTHING))


@settings(max_examples=40, deadline=None)
@given(flags=FLAGS)
def test_a_file_is_read_back_unchanged(tmp_path_factory: pytest.TempPathFactory, flags: dict[str, Any]) -> None:
    """Any configuration is the same after the file of either command, and only its own keys are set."""
    folder, wanted = tmp_path_factory.mktemp("config"), resolve(Sources.of(flags, None, NOTHING))
    back = read(commented(wanted), folder)
    assert back.config == wanted.config
    assert {name for name, origin in back.origin.items() if origin != "default"} == flags.keys()
    assert read("\n".join(as_toml(wanted)), folder).config == wanted.config


def test_every_key_is_there_and_its_comment_can_be_taken_away(tmp_path: Path) -> None:
    """Each key stands in a line of its own; with every `#` before a key gone the file still means the defaults."""
    text = commented(resolve(Sources.of({}, None, NOTHING)))
    assert re.findall(r"^# (\w+) = ", text, re.MULTILINE) == list(DaemonConfig.model_fields)
    unset = [name for name, value in DaemonConfig().model_dump().items() if value is None]
    assert re.findall(r"^# (\w+) = …$", text, re.MULTILINE) == unset
    bare = re.sub(r"^# (\w+ = [^…\n]*)$", r"\1", text, flags=re.MULTILINE)
    assert bare.count("\n# ") < text.count("\n# ") - 20
    assert read(bare, tmp_path).config == DaemonConfig()


def test_the_file_is_written_once_and_serve_would_take_it(tmp_path: Path) -> None:
    file = tmp_path / "kvprefetchd.toml"
    assert kvprefetchd("config", "init", "--staging", "512MiB", file).stdout == f"wrote {file}\n"
    written = file.read_text()
    assert '\nstaging = "512MiB"\n' in written
    again = kvprefetchd("config", "init", file)
    assert again.returncode == 69
    assert one_line(again.stderr)
    assert "File exists" in again.stderr
    assert file.read_text() == written
    assert kvprefetchd("config", "init", "--staging", "512MiB").stdout == written
    shown = json.loads(kvprefetchd("check-config", "--json", "--config", file).stdout)["keys"]
    assert shown["staging"] == {"value": 512 << 20, "from": str(file)}
    assert shown["memory"] == {"value": 1 << 30, "from": "default"}


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = kvprefetchd("config", "init", tmp_path / "none" / "kvprefetchd.toml")
    assert done.returncode == 69
    assert one_line(done.stderr)
