"""Files that standard output and standard error lead to stop nobody: a full disk, one that stands still."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.stores import blocks
from tests.daemon.telemetry.test_log_writer import serve
from tests.lab.process import descendants, wait_gone
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually


def run(script: str, stdout: int, stderr: int | None = None, **options: object) -> subprocess.Popen[str]:
    preamble = "import os, sys, time\nfrom kvprefetch.daemon.telemetry.streams import never_wait, settle\n"
    command = [sys.executable, "-c", preamble + textwrap.dedent(script)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_a_full_disk_loses_lines_joins_none_and_counts_them_when_there_is_room(tmp_path: Path) -> None:
    """The limit on the size of files is a full disk that one test can have for itself."""
    path = tmp_path / "log"
    script = """
        import resource
        from kvprefetch.daemon.telemetry.streams import LogWriter
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        never_wait(1)
        writer = LogWriter(1, limit_bytes=100_000)
        for i in range(5000):
            writer.write(f"{i:04} " + "x" * 94)
        print(writer.take_lost(), writer.dropped_lines, file=sys.stderr, flush=True)
        sys.stdin.readline()
        writer.drain(20)
        print(writer.take_lost(), file=sys.stderr, flush=True)
    """
    with path.open("wb") as file, run(script, file.fileno(), subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        said, lost = map(int, process.stderr.readline().split())
        assert (said, lost > 1000) == (0, True), "while none gets through, it is known and not said"
        assert path.stat().st_size <= 100
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        process.stdin.write("there is room\n")
        process.stdin.flush()
        assert int(process.stderr.readline()) == lost
        assert process.wait(20) == 0
    lines = path.read_text().splitlines()
    numbers = [int(line[:4]) for line in lines]
    assert len(numbers) == 5000 - lost
    assert numbers == sorted(set(numbers)), "in order, none twice"
    assert {len(line) for line in lines} == {99}


def test_both_streams_to_one_file_keep_their_order_and_it_has_all_at_the_end(tmp_path: Path) -> None:
    script = """
        never_wait(1), never_wait(2)
        for i in range(50):
            os.write(1 + i % 2, f"{i}\\n".encode())
        print("last words", file=sys.stderr)
    """
    path = tmp_path / "log"
    with path.open("wb") as file, run(script, file.fileno(), file.fileno()) as process:
        assert process.wait(20) == 0
    assert path.read_text().splitlines() == [*map(str, range(50)), "last words"]


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_file_that_is_cut_goes_on_at_its_beginning(tmp_path: Path, mode: str) -> None:
    """logrotate's copytruncate; a shell's `>` opens a file without O_APPEND."""
    path = tmp_path / "log"
    script = """
        never_wait(1)
        os.write(1, b"before\\n")
        sys.stdin.readline()
        os.write(1, b"after\\n")
    """
    with path.open(mode) as file, run(script, file.fileno()) as process:
        eventually(lambda: path.read_bytes() == b"before\n", what="the first line")
        os.truncate(path, 0)
        process.communicate("\n", timeout=20)
    assert path.read_bytes() == b"after\n"


def test_a_rotated_file_gets_no_further_line_and_no_line_is_torn(tmp_path: Path) -> None:
    """Lines longer than a pipe takes at once, while the file is renamed again and again."""
    path = tmp_path / "log"
    script = """
        import signal
        from kvprefetch.daemon.telemetry.streams import LogWriter, open_again
        signal.signal(signal.SIGHUP, lambda *_: open_again())
        never_wait(1)
        writer = LogWriter(1)
        for i in range(400):
            writer.write(f"{i:04} " + "x" * (i * 37 % 9000))
            time.sleep(0.002)
        writer.drain(20)
    """
    with path.open("ab") as file, run(script, file.fileno()) as process:
        for i in range(20):
            eventually(lambda: path.exists() and path.stat().st_size, what="the first lines of the new file")
            path.rename(tmp_path / f"{i:02}")
            process.send_signal(signal.SIGHUP)
        assert process.wait(20) == 0
    files = [*sorted(tmp_path.glob("[0-9][0-9]")), path]
    assert len(files) == 21
    texts = [file.read_text() for file in files]
    assert all(text.endswith("\n") for text in texts)
    lines = "".join(texts).splitlines()
    assert lines == [f"{i:04} " + "x" * (i * 37 % 9000) for i in range(400)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which can be made to stand still."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("mkfs.ext4", "mount", "fsfreeze"))):
        pytest.skip("a disk that stands still needs root, mkfs.ext4 and fsfreeze")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=False, capture_output=True).returncode:
        pytest.skip("no loop device can be mounted here")
    yield folder
    subprocess.run(["fsfreeze", "-u", str(folder)], check=False, capture_output=True)
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.store
def test_a_log_on_a_disk_that_stands_still_keeps_nobody_from_serving_and_ending(disk: Path, tmp_path: Path) -> None:
    """A write to it waits in the kernel, and neither SIGTERM nor SIGKILL ends that. 50 lines fit the pipe.

    The daemon gives up all that it has, and its main thread ends; the kernel keeps the entry of the process.
    """
    path, socket = disk / "log", tmp_path / "s"
    with path.open("ab") as log:
        process = serve(tmp_path, log.fileno(), log.fileno())
    try:
        engine = FakeEngine(socket)
        eventually(lambda: "engine.attached" in path.read_text(), what="the log")
        subprocess.run(["fsfreeze", "-f", str(disk)], check=True)
        for i in range(50):
            assert engine.load(list(blocks("still", 1)), name=f"r{i}") is None
        assert ask_daemon(socket).engines
        engine.close()
        [master] = descendants(process.pid)
        process.terminate()
        eventually(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "Z", 20, "its end")
        assert not socket.exists()
        assert wait_gone([master]) == []
        subprocess.run(["fsfreeze", "-u", str(disk)], check=True)
        assert process.wait(20) == 0
    finally:  # before it is waited for: a process that waits for its disk does not end
        subprocess.run(["fsfreeze", "-u", str(disk)], check=False, capture_output=True)
        process.kill()
        process.wait()
    records = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    done = [each["request_id"] for each in records if each["event"] == "request.done"]
    assert done == [f"r{i}" for i in range(len(done))], "whole lines, in order; the rest is lost at the end"
