"""`kvprefetchd store`: what a master's HTTP interface says is believed when it is whole, and never obeyed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from kvprefetch.daemon.cli import store
from kvprefetch.daemon.cli.main import main
from tests.lab.daemon import Daemon
from tests.lab.process import free_ports

KEYS = b"".join(b"model@tp_rank:0@%064x\n" % number for number in range(3))
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n"
Master = Callable[[bytes], str]


@pytest.fixture
def master() -> Iterator[Master]:
    """master(answer): the address of one that answers every question so."""
    answers = [b""]

    def serve() -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:  # the end of the test
                return
            with closing(sock):
                sock.recv(65536)
                sock.sendall(answers[-1])

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        port = listening.getsockname()[1]

        def address(answer: bytes) -> str:
            answers.append(answer)
            return f"127.0.0.1:{port}"

        yield address
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def sized(body: bytes) -> bytes:
    return OK + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("word", ["127.0.0.1:99999999999999999999", "127.0.0.1:x", "", "a b:1"])
@pytest.mark.parametrize("command", ["ls", "stat"])
def test_an_address_that_is_none_is_one_line(capfd: pytest.CaptureFixture[str], word: str, command: str) -> None:
    assert main(["store", command, f"--master-http={word}"]) == 78
    [line] = capfd.readouterr().err.splitlines()
    assert "--master-http must be HOST:PORT, with a port of 1 to 65535" in line


@pytest.mark.parametrize("host", ["a." * 50_000, "\udcff"], ids=["endless", "no UTF-8"])
def test_a_name_that_no_machine_has_is_one_short_line(capfd: pytest.CaptureFixture[str], host: str) -> None:
    assert main(["store", "ls", f"--master-http={host}:1"]) == 69
    [line] = capfd.readouterr().err.splitlines()
    assert len(line) < 2000


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 " + b"x" * 60_000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 \x1b[31mred\x1b]0;title\x07\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 \xc2\x9b31mred\r\nContent-Length: 0\r\n\r\n",
        b"GARBAGE " + b"y" * 60_000 + b"\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://" + b"z" * 60_000 + b"\xff\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nkey\r\n",
        sized(b"k" * 1_000_000),
    ],
)
def test_an_answer_that_is_no_list_is_one_short_line(
    capfd: pytest.CaptureFixture[str], master: Master, answer: bytes
) -> None:
    for command in ("ls", "stat"):
        assert main(["store", command, "--master-http", master(answer)]) == 69
        said = capfd.readouterr()
        [line] = said.err.splitlines()
        assert said.out == ""
        assert len(line) < 2000
        assert line.isprintable()


@pytest.mark.store
@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 1000000\r\n\r\n" + KEYS,
        OK + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n" + KEYS,
        CHUNKED % len(KEYS) + KEYS + b"\r\n",
        OK + b"Connection: close\r\n\r\n" + KEYS,
    ],
    ids=["shorter than it says", "in a chunk", "between chunks", "does not say where it ends"],
)
def test_a_list_that_breaks_off_is_not_taken_for_a_whole_one(
    capfd: pytest.CaptureFixture[str], master: Master, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """And purge removes nothing then: it would say that no such value is left."""
    at = ("--master-http", master(answer))
    with Daemon(staging="1MiB", memory="64MiB") as daemon:
        asked: list[object] = []
        monkeypatch.setattr(store, "remove", lambda *given: asked.append(given))
        purge = ("store", "purge", "--prefix", "model@", "--yes", "--socket", str(daemon.socket))
        for words in (("store", "ls"), ("store", "ls", "--json"), ("store", "stat"), purge):
            assert main([*words, *at]) == 69
            assert "breaks off" in capfd.readouterr().err
    assert asked == []


@pytest.mark.parametrize("answer", [sized(KEYS), CHUNKED % len(KEYS) + KEYS + b"\r\n0\r\n\r\n"])
def test_a_whole_list_is_printed_and_a_terminal_obeys_no_key(
    capfd: pytest.CaptureFixture[str], master: Master, answer: bytes
) -> None:
    assert main(["store", "ls", "--master-http", master(answer)]) == 0
    assert capfd.readouterr().out == KEYS.decode()
    assert main(["store", "ls", "--master-http", master(sized(b"u0@\x1b]0;title\x07@abc\n"))]) == 0
    assert "\x1b" not in capfd.readouterr().out


def test_no_proxy_is_asked(capfd: pytest.CaptureFixture[str], master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://{master(sized(b'from-the-proxy@abc'))}")
    [port] = free_ports(1)
    for command in ("ls", "stat"):
        assert main(["store", command, "--master-http", f"127.0.0.1:{port}"]) == 69
        assert "Connection refused" in capfd.readouterr().err
