"""The pages of docs/install: their commands are scripts, and what an installation leaves is found."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks, files, traces

PAGES = sorted(f"docs/install/{path.name}" for path in (ROOT / "docs/install").glob("[!R]*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_are_a_script(page: str) -> None:
    script = "\n".join(blocks(page, r"\w+"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(("page", "marks"), [("docs/install/venv.md", "user"), ("docs/tutorial.md", "root")])
def test_a_wait_for_an_engine_that_ended_is_over_and_shows_its_log(page: str, marks: str, tmp_path: Path) -> None:
    """In a shell that goes on after an error, as a user's does: without `break` the wait has no end."""
    [wait] = re.findall(r"^until .*$", "\n".join(blocks(page, marks)), re.MULTILINE)
    for name, text in (("sleep", ""), ("curl", "exit 7")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".kvprefetch").mkdir()
    for log in (tmp_path / "vllm.log", tmp_path / ".kvprefetch/vllm.log"):
        log.write_text("out of memory\n")
    environ = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = f"true &\nENGINE=$!\nwait\n{wait}"
    done = subprocess.run(
        ["bash"], input=script, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True, timeout=20, check=True
    )
    assert done.stdout == "out of memory\n"


def test_the_index_has_each_page() -> None:
    text = (ROOT / "docs/install/README.md").read_text()
    assert [page for page in PAGES if f"]({Path(page).name})" not in text] == []


def test_what_is_left_is_found(tmp_path: Path) -> None:
    """A new file, another mode, another target and a file that is gone; not logs, and not the folders left out."""
    for name in ("etc/kept", "etc/opened", "etc/gone", "home/somebody", "var/log/daemon"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch(mode=0o600)
    (tmp_path / "link").symlink_to("here")
    before = files(tmp_path, "home")
    (tmp_path / "etc/opened").chmod(0o644)
    (tmp_path / "etc/gone").unlink()
    (tmp_path / "etc/new").touch()
    (tmp_path / "var/log/more").touch()
    (tmp_path / "home/more").touch()
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("there")
    left = [trace.split(":")[0] for trace in traces(before, files(tmp_path, "home"))]
    assert left == ["etc/gone", "etc/new", "etc/opened", "link"]
