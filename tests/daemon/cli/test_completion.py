"""`kvprefetchd completion`: what the shells offer, as the shells themselves say it."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest

from kvprefetch.daemon.cli.pages import SHELLS
from tests.support.command import COMMAND, kvprefetchd, run

# Bash sets these variables and calls the function that `complete -F` named; nothing else happens at a press of Tab.
TAB = """
. {script}
compopt() {{ echo "compopt $*"; }}  # of bash, for a press of Tab alone
COMP_WORDS=({words} {last}) COMP_CWORD={count} COMP_LINE={line} COMP_POINT={length}
$(complete -p kvprefetchd | sed 's/.* -F \\([^ ]*\\).*/\\1/') kvprefetchd {last} {before}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
needs_shell = {
    shell: pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed") for shell in SHELLS
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    (folder / "kvprefetchd").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (folder / "kvprefetchd").chmod(0o755)
    for shell in SHELLS:
        done = kvprefetchd("completion", shell)
        assert done.returncode == 0, done.stderr
        (folder / shell).write_text(done.stdout)
    return folder


def offered(script: Path, line: str) -> set[str]:
    """Return what bash offers after this line."""
    *words, last = line.split(" ")
    values = {"words": " ".join(words), "last": shlex.quote(last), "count": len(words), "before": words[-1]}
    text = TAB.format(script=script, line=shlex.quote(line), length=len(line), **values)
    done = run(["bash", "--norc", "-c", text], PATH=f"{script.parent}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "some", "never"),
    [
        ("kvprefetchd sta", {"stat", "status"}, {"serve"}),
        ("kvprefetchd store p", {"purge"}, {"ls"}),
        ("kvprefetchd serve --store-reach ", {"local", "any"}, {"serve"}),
        ("kvprefetchd tail --l", {"--level", "--lines"}, {"--event"}),
    ],
)
@needs_shell["bash"]
def test_bash_completes_commands_options_and_choices(scripts: Path, line: str, some: set[str], never: set[str]) -> None:
    found = offered(scripts / "bash", line)
    assert some <= found
    assert not never & found


@needs_shell["bash"]
def test_bash_completes_files(scripts: Path) -> None:
    """Bash itself does, when it is asked for its default."""
    assert {"compopt", "-o", "default"} <= offered(scripts / "bash", "kvprefetchd tail kv")
    assert {"compopt", "-o", "default"} <= offered(scripts / "bash", "kvprefetchd serve --config kv")


@needs_shell["fish"]
def test_fish_completes(scripts: Path) -> None:
    ask = f"source {scripts}/fish; complete -C 'kvprefetchd sta'; complete -C 'kvprefetchd store --'"
    done = run(["fish", "--no-config", "-c", ask], HOME=str(scripts), PATH=f"{scripts}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert {"stat", "status"} <= {line.split("\t")[0] for line in done.stdout.splitlines()}


@needs_shell["zsh"]
def test_zsh_takes_the_script_as_its_function_for_the_command(scripts: Path, tmp_path: Path) -> None:
    """From a folder in `fpath`, as the page says; zsh names the function that it would call at a press of Tab."""
    shutil.copy(scripts / "zsh", tmp_path / "_kvprefetchd")
    ask = (
        f"fpath+={tmp_path}; autoload -U compinit; compinit -u -d {tmp_path}/dump; print $_comps[kvprefetchd]; "
        f"zsh -n {tmp_path}/_kvprefetchd"
    )
    done = run(["zsh", "-fc", ask])
    assert (done.returncode, done.stdout) == (0, "_kvprefetchd\n"), done.stderr
