"""Bad input on the command line: one line with key, value and bound, and exit status 78."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvprefetch.client.control import Unavailable, ask
from kvprefetch.daemon.cli import status
from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.config.sizes import parse_size
from kvprefetch.shmring.wire.admin import Status, StatusQuery
from tests.support.command import COMMAND, run

# An engine's environment lacks the packages of the daemon-… extras.
PLAIN = """
import sys
for name in ("structlog", "prometheus_client", "rich", "mooncake"):
    sys.modules[name] = None
from kvprefetch.daemon.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--help"], 0, ""),
        (["check-config"], 0, ""),
        (["mode", "on", "--socket", "/nonexistent"], 69, "no daemon answers"),
        (["prefetch", "--help"], 0, ""),
        (["serve", "--metrics-port", "0", "--socket", "/tmp/none"], 69, "pip install '.[daemon-cpu]'"),
    ],
)
def test_in_an_engine_s_environment(arguments: list[str], status: int, words: str) -> None:
    result = run([sys.executable, "-c", PLAIN, *arguments])
    assert result.returncode == status, result
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == (1 if words else 0)


@pytest.mark.parametrize(
    ("arguments", "status", "cure"),
    [
        ([], 78, "Missing command. (see kvprefetchd --help)"),
        (["store"], 78, "Missing command. (see kvprefetchd store --help)"),
        (["store", "ls", "--yes"], 78, "No such option '--yes'."),
        (["statsu"], 78, "'status'?) (see kvprefetchd --help)"),
        (["version"], 78, "No such command 'version': kvprefetchd --version (see kvprefetchd --help)"),
        (["mode", "of"], 78, "'of' is not one of 'on', 'shadow', 'off'. (see kvprefetchd mode --help)"),
        (["status", "--wait", "nan"], 78, "Invalid value for '--wait': 'nan' is no number."),
        (["status", "--socket", "/nonexistent"], 69, "start it (kvprefetchd serve"),
        (["stat", "--socket", "/nonexistent"], 69, "socket='/nonexistent'"),
    ],
)
def test_a_first_mistake_gets_advice(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, cure: str
) -> None:
    assert main(arguments) == status
    assert cure in capsys.readouterr().err


def test_without_arguments_the_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 78
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("Usage: kvprefetchd ")
    assert [name for name in ("serve", "doctor", "explain") if f"\n  {name} " not in shown.err] == []
    assert shown.err.splitlines()[-1].startswith("kvprefetchd: command line: ")


def test_a_socket_of_others_names_its_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:  # root may use any socket, so the test gives the kernel's answer
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(Unavailable, match=r"Permission denied; .* members of the socket's group"):
        ask(tmp_path / "s.sock", StatusQuery(), Status)


def test_mooncake_s_harmless_lines_are_explained_where_they_appear(tmp_path: Path) -> None:
    """On a terminal, at every start; elsewhere docs/symptoms.md does."""
    primary, secondary = os.openpty()
    try:
        command = [*COMMAND, "serve", "--socket", str(tmp_path / "s.sock"), "--disk", "/proc/none"]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=secondary, check=False, timeout=60)
        first = os.read(primary, 4096).decode().splitlines()[0]
    finally:
        os.close(primary)
        os.close(secondary)
    assert done.returncode != 0
    assert "'Local segment descriptor not found': both mean nothing" in first


def test_an_extension_that_is_not_built_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: object) -> int:
        raise ImportError("the C extension is not built here", name="kvprefetch.shmring._atomics")

    monkeypatch.setattr(status, "run_stat", missing)
    assert main(["stat"]) == 69
    assert capsys.readouterr().err == "kvprefetchd: the C extension is not built here\n"


def test_sizes_are_read_with_their_units() -> None:
    sizes = {"64KiB": 65536, "8Gi": 8 << 30, "1.5G": 1_500_000_000, "4GB": 4 * 10**9, 7: 7, "12": 12}
    assert {text: parse_size(text) for text in sizes} == sizes
    with pytest.raises(ValueError, match="such as"):
        parse_size("12 parsecs")


@pytest.mark.parametrize("command", ["check-config", "--help", "install-unit --dry-run"])
def test_a_reader_that_leaves_early_is_no_error(command: str) -> None:
    """As with `| head`."""
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([*COMMAND, *command.split()], stdout=write, stderr=-1, text=True, timeout=60, check=False)
    os.close(write)
    # install-unit may note that the checkout lies where the service's user cannot reach it.
    said = [line for line in result.stderr.splitlines() if not line.startswith(("note: ", "      "))]
    assert (result.returncode, said) == (0, [])


# As an import does that keeps a file open: libffi 3.5 does, which ctypes loads.
EARLY = "import os, sys; os.open('/', 0); from kvprefetch.daemon.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("command", "closed", "said"),
    [
        (COMMAND, "1", "the path exists and is not a socket"),
        (COMMAND, "2", ""),
        ([sys.executable, "-c", EARLY], "0 1 2", ""),
    ],
    ids=["1", "2", "all, and taken by an import"],
)
def test_streams_that_were_closed_are_nowhere(tmp_path: Path, command: list[str], closed: str, said: str) -> None:
    """No file or socket gets their numbers, and nothing is missing."""
    path = tmp_path / "file"
    path.write_text("precious")
    redirect = " ".join(f"{fd}>&-" for fd in closed.split())
    result = run(["sh", "-c", f"{shlex.join(command)} serve --metrics-port 0 --socket {path} {redirect}"])
    assert result.returncode == 78, result
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert path.read_text() == "precious"
