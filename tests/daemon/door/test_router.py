"""docs/examples/router.py, which is there to be copied: errors, streams, clients that leave, one more try, timeouts."""

from __future__ import annotations

import http.client
import http.server
import importlib.util
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.lab.process import free_ports
from tests.support.waiting import eventually

Behaviour = Callable[[http.server.BaseHTTPRequestHandler, dict[str, Any]], None]
PROMPT = {"prompt": list(range(200)), "max_tokens": 4}


@contextmanager
def served(handler: type[http.server.BaseHTTPRequestHandler], server: Any = http.server.ThreadingHTTPServer) -> Any:
    with server(("127.0.0.1", 0), handler) as running:
        running.daemon_threads = True
        running.block_on_close = False
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield running.server_port
        finally:
            running.shutdown()
            thread.join()


def engine(behave: Behaviour) -> type[http.server.BaseHTTPRequestHandler]:
    """An engine's HTTP server, which answers a completion so."""

    class Completions(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            behave(self, body)

        def log_message(self, *_: object) -> None:
            """Nothing in the tests' output."""

    return Completions


def answer(handler: http.server.BaseHTTPRequestHandler, status: int, **fields: Any) -> None:
    text = json.dumps(fields).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)


def well(handler: http.server.BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    answer(handler, 200, served=body, session=handler.headers["X-Session-ID"])


def hangs_up(handler: http.server.BaseHTTPRequestHandler, _body: object) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Start the router before engines that behave so, or that listen at this port; return its URL. There is no door."""
    with ExitStack() as stack:

        def start(*engines: Behaviour | int, **settings: float) -> str:
            path = Path(__file__).parents[3] / "docs/examples/router.py"
            spec = importlib.util.spec_from_file_location("router", path)
            assert spec is not None
            assert spec.loader is not None
            module: ModuleType = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            ports = [each if isinstance(each, int) else stack.enter_context(served(engine(each))) for each in engines]
            module.__dict__.update(DOOR=str(tmp_path / "none.sock"), **settings)
            module.__dict__["ENGINES"] = [
                module.Engine(f"e{number}", f"http://127.0.0.1:{port}") for number, port in enumerate(ports)
            ]
            module.Router.log_message = lambda *_: None
            return f"http://127.0.0.1:{stack.enter_context(served(module.Router, module.Server))}/v1/completions"

        yield start


def post(url: str, body: object = PROMPT, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_a_request_reaches_its_engine_with_its_headers_though_there_is_no_door(router: Callable[..., str]) -> None:
    url = router(well)
    assert post(url, PROMPT, **{"X-Session-ID": "a"}) == (200, {"served": PROMPT, "session": "a"})


@pytest.mark.parametrize("body", [b"{", b"[]", b"7"])
def test_a_body_that_is_no_request_is_refused(router: Callable[..., str], body: bytes) -> None:
    status, said = post(router(well), body)
    assert (status, said["error"]["code"]) == (400, 400)


@pytest.mark.parametrize("status", [400, 404, 429, 500])
def test_an_engine_s_error_is_passed_on_as_it_is(router: Callable[..., str], status: int) -> None:
    said = {"error": {"message": "max_tokens is too large", "code": status}}
    assert post(router(lambda handler, _: answer(handler, status, **said))) == (status, said)


def test_a_stream_comes_piece_by_piece(router: Callable[..., str]) -> None:
    """The engine writes its second event once the client has the first."""
    may_go_on = threading.Event()

    def streams(handler: http.server.BaseHTTPRequestHandler, _body: object) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for data in (b"data: one\n\n", b"data: [DONE]\n\n"):
            handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            handler.wfile.flush()
            assert may_go_on.wait(20)
        handler.wfile.write(b"0\r\n\r\n")

    with urllib.request.urlopen(router(streams), json.dumps(PROMPT | {"stream": True}).encode(), timeout=20) as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        assert stream.readline() == b"data: one\n"
        may_go_on.set()
        assert stream.read() == b"\ndata: [DONE]\n\n"


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_ends_its_request_in_the_engine(router: Callable[..., str], begun: bool) -> None:
    """Before the first byte of the answer, and after it; the place is another request's then."""
    came, left = threading.Event(), threading.Event()

    def slow(handler: http.server.BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if body["max_tokens"] == 1:
            return well(handler, body)
        if begun:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        came.set()
        assert handler.connection.recv(1) == b""
        left.set()
        handler.close_connection = True
        return None

    url = router(slow)
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=20)
    connection.request("POST", "/v1/completions", json.dumps(PROMPT))
    assert came.wait(20)
    connection.close()
    assert left.wait(20)
    assert post(url, PROMPT | {"max_tokens": 1})[0] == 200


def test_a_client_that_leaves_the_queue_never_reaches_the_engine(router: Callable[..., str]) -> None:
    seen: list[int] = []
    may_end = threading.Event()

    def busy(handler: http.server.BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        seen.append(body["max_tokens"])
        assert may_end.wait(20)
        well(handler, body)

    url = router(busy)
    first, second = (http.client.HTTPConnection(url.split("/")[2], timeout=20) for _ in range(2))
    first.request("POST", "/v1/completions", json.dumps(PROMPT))
    eventually(lambda: seen, what="the first request")
    second.request("POST", "/v1/completions", json.dumps(PROMPT | {"max_tokens": 5}))
    second.close()
    threading.Event().wait(0.5)  # longer than the router's look
    may_end.set()
    assert first.getresponse().status == 200
    first.close()
    assert post(url, PROMPT | {"max_tokens": 6})[0] == 200
    assert seen == [4, 6]


@pytest.mark.parametrize("gone", [hangs_up, "closed"])
def test_a_request_that_an_engine_did_not_answer_is_sent_once_more(router: Callable[..., str], gone: Any) -> None:
    """Where the engine had the prompt before, which draws the request to it."""
    dead: Any = free_ports(1)[0] if gone == "closed" else gone
    url = router(dead, well)
    assert post(url)[0] == 200
    status, said = post(router(dead))
    assert (status, said["error"]["type"]) == (502, "router")


def test_an_answer_that_breaks_off_is_not_begun_anew(router: Callable[..., str]) -> None:
    tries: list[object] = []

    def breaks(handler: http.server.BaseHTTPRequestHandler, body: object) -> None:
        tries.append(body)
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        hangs_up(handler, body)

    with pytest.raises(http.client.IncompleteRead):
        post(router(breaks, breaks))
    assert len(tries) == 1


def test_an_engine_that_says_nothing_and_one_without_a_place_are_given_up(router: Callable[..., str]) -> None:
    may_end = threading.Event()

    def silent(handler: http.server.BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if body["max_tokens"] == 4:
            may_end.wait(20)
        else:
            well(handler, body)

    url = router(silent, ANSWER_S=0.6, PLACE_S=0.1, LOOK_S=0.05)
    first = http.client.HTTPConnection(url.split("/")[2], timeout=20)
    first.request("POST", "/v1/completions", json.dumps(PROMPT))
    threading.Event().wait(0.1)
    assert post(url)[0] == 503
    assert first.getresponse().status == 504
    first.close()
    assert post(url, PROMPT | {"max_tokens": 1})[0] == 200
    may_end.set()


def test_tokens_of_text_are_those_of_the_engine(router: Callable[..., str], tmp_path: Path) -> None:
    """Its /tokenize gets what decides them; the announcement has them."""
    questions: list[Any] = []
    announced: list[Any] = []

    def tokenizes(handler: http.server.BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if handler.path == "/tokenize":
            questions.append(body)
            answer(handler, 200, tokens=[1, 2, 3])
        else:
            well(handler, body)

    class Door(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            announced.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer(self, 202)

        def log_message(self, *_: object) -> None:
            """Nothing in the tests' output."""

        def address_string(self) -> str:
            return "door"

    class UnixServer(http.server.ThreadingHTTPServer):
        address_family = socket.AF_UNIX

        def server_bind(self) -> None:
            self.socket.bind(str(tmp_path / "none.sock"))
            self.server_port = 0

    with served(Door, UnixServer):
        chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        assert post(router(tokenizes), chat)[0] == 200
        payload = eventually(lambda: announced, what="the announcement")[0]["actions"][0]["payload"]
    assert payload == {"engine": "e0", "token_ids": [1, 2, 3]}
    assert questions == [{name: chat[name] for name in ("model", "messages")}]
