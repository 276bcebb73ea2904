"""Requests that wait: announced by the router of docs/examples, of a session, or behind others, which is explained."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvprefetch.daemon.config.model import door_socket
from tests.e2e.conftest import BLOCK, Site, answers, hits, whole_blocks
from tests.lab.engine import Engine
from tests.lab.process import REPO, free_ports
from tests.lab.prompts import make_prompts
from tests.lab.test_slow_requests import told
from tests.support.auditor import ask_daemon
from tests.support.waiting import eventually

PROMPTS = make_prompts(3, 300, seed=31)
TOKENS = 8
PAUSE_S = 1.0
[WHOLE] = make_prompts(1, 900, seed=57)
TURNS = [WHOLE[:tokens] for tokens in range(300, 900, 140)]  # no whole number of blocks


@contextmanager
def http_server(name: str, engine: Engine, may_begin: threading.Event) -> Iterator[str]:
    """Serve completions of this engine, one at a time, from the moment when they may begin."""

    class Completions(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            assert may_begin.wait(120)
            (tokens,) = engine.run([prompt], max_tokens=TOKENS).tokens
            text = json.dumps({"engine": name, "tokens": tokens}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Nothing in the tests' output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            may_begin.set()  # or its threads would wait on
            server.shutdown()
            thread.join()


@contextmanager
def router(site: Site, *engines: str) -> Iterator[str]:
    (port,) = free_ports(1)
    argv = [sys.executable, str(REPO / "docs/examples/router.py"), str(port), str(door_socket(site.daemon.socket))]
    process = subprocess.Popen([*argv, *engines], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        process.kill()
        process.wait()


def asked(url: str, prompt: list[int]) -> Any:
    body = json.dumps({"prompt": prompt, "max_tokens": TOKENS}).encode()

    def answer() -> Any:
        try:
            with urllib.request.urlopen(url, body, timeout=120) as response:
                return json.loads(response.read())
        except urllib.error.URLError:  # it does not listen yet
            return None

    return eventually(answer, what="the router's answer")


def test_what_waits_in_the_router_is_staged_when_it_comes(site: Site) -> None:
    engines = [site.bed(extra={"cache_prefix": "router"}) for _ in range(2)]
    names = [str(line["engine"]) for line in site.daemon.records("engine.attached")[-2:]]
    assert engines[0].run(PROMPTS, max_tokens=TOKENS).tokens == answers(PROMPTS, TOKENS)
    site.fresh(engines[0])
    before, may_begin = len(site.daemon.records("request.done")), threading.Event()
    with (
        http_server(names[0], engines[0], may_begin) as first,
        http_server(names[1], engines[1], may_begin) as second,
        router(site, f"{names[0]}={first}", f"{names[1]}={second}") as url,
        ThreadPoolExecutor(len(PROMPTS)) as clients,
    ):
        asked_for = [clients.submit(asked, url, prompt) for prompt in PROMPTS]
        blocks = [whole_blocks(prompt) // BLOCK for prompt in PROMPTS]
        eventually(
            lambda: sum(int(each["slots_idle"]) for each in ask_daemon(site.daemon.socket).engines) == sum(blocks),
            60,
            what="all announced blocks",
        )
        may_begin.set()
        found = [each.result() for each in asked_for]
        assert [each["tokens"] for each in found] == answers(PROMPTS, TOKENS)
        assert {each["engine"] for each in found} == set(names), "the load is shared out"
        assert site.daemon.wait_record("request.done", count=before + len(PROMPTS)) is not None
        lines = site.daemon.records("request.done")[before:]
        assert [(line["outcome"], line["announced_blocks"], line["announced_staged"]) for line in lines] == [
            ("loaded", each, each) for each in blocks
        ]
        assert min(line["announced_ms"] for line in lines) > 0
        of_first = [line["spared_ms"] or 0.0 for line in lines if line["engine"] == names[0]]
        assert min(of_first) > 0, "by the steps of the engine that computed before"
        again = asked(url, PROMPTS[0])
        assert again == found[0], "the engine that has the prompt"
    site.assert_idle()
    for engine in engines:
        engine.stop()


def test_a_session_that_comes_back_finds_its_prompt_staged(site: Site) -> None:
    """Each turn saves a part of its prompt, which staging never had before the pause.

    What one that does not come back costs: tests/daemon/engine/test_session_calls.py, where no minute is waited for.
    """
    engine = site.bed(extra={"cache_prefix": "sessions"})
    for turn, prompt in enumerate(TURNS):
        before = len(site.daemon.records("request.done"))
        served = engine.run([prompt], max_tokens=TOKENS, request_options={"session_id": "agent"})
        assert served.tokens == answers([prompt], TOKENS)
        assert site.daemon.wait_record("request.done", count=before + 1) is not None
        line = site.daemon.records("request.done")[before]
        if turn > 1:  # from the second one on a gap is known
            stored = whole_blocks(TURNS[turn - 1]) // 32
            assert (line["announced_blocks"], line["announced_staged"]) == (stored, stored)
            assert (line["found_blocks"], line["bytes"]) == (stored, 0)
            assert line["session_gap_ms"] > 1e3 * PAUSE_S
        site.fresh(engine)
        time.sleep(PAUSE_S)
    fetched = [int(each["fetched_blocks"]) for each in site.daemon.records("announcement.done")]
    assert sum(fetched) > 0, "what the turns before saved"
    site.assert_idle()
    engine.stop()


def test_full_places_are_named_with_the_client_s_trace(site: Site) -> None:
    """A request queues behind a long answer: its line has the cause, and the trace that the client gave."""
    engine = site.engine(site.spec(extra={"cache_prefix": "slow"}, max_num_seqs=1))
    engine.run(PROMPTS[:2])
    site.fresh(engine)
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    options = {"trace_headers": {"traceparent": traceparent}}
    # Half a second later: of two that arrive at once, the one whose KV comes first gets the place.
    outputs, arrivals = [600, 8], [0.0, 0.5]
    served = engine.run(PROMPTS[:2], max_tokens=outputs, arrivals_s=arrivals, request_options=options)
    assert served.cached_tokens == hits(PROMPTS[:2])
    name = served.requests[1].request_id
    cause = told(site.daemon, name, "places full")
    assert cause.startswith("Cause: the engine's places or tokens went to other requests for "), cause
    lines = [each for each in site.daemon.records("request.done") if name in each["request_id"]]
    assert [each["traceparent"] for each in lines] == [traceparent]
    site.assert_idle()
    engine.stop()
