"""docs/HINTS.md pasted from top to bottom beside a served engine, and the router of docs/examples before it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serve.server import Server
from kvprefetch.client import Client
from kvprefetch.daemon.config.model import door_socket
from tests.e2e.conftest import Site
from tests.e2e.serving import ARGUMENTS
from tests.lab import process
from tests.lab.daemon import Daemon
from tests.lab.process import REPO, free_ports
from tests.lab.template import Template
from tests.support.pages import blocks
from tests.support.waiting import eventually

PROMPT = " ".join(map(str, range(1, 201)))  # the page's


class ForkedServer(Server):
    """The server, forked of a template."""

    template: Template

    def _spawn(self, arguments: list[str], log: Path, environ: dict[str, str]) -> process.Child:
        given = {process.CHILD_VARIABLE: "tests.e2e.serving", ARGUMENTS: json.dumps(arguments)}
        with log.open("wb") as output:
            child = self.template.fork({**os.environ, **environ, **given}, output.fileno())
        child.stdin.close()
        child.stdout.close()
        return child


@pytest.fixture
def served(site: Site, template: Template) -> Iterator[Server]:
    server = ForkedServer(site.spec(extra={"cache_prefix": "page"}), {})
    server.template = template
    with server:
        assert Client(site.daemon.socket).health(engines=1, wait_s=120).well
        yield server


def ask(url: str, **changes: object) -> list[str]:
    """Return the pieces of text of a streamed completion; a busy server sends several tokens in one."""
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True, **changes}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        events = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {")]
    return [json.loads(event)["choices"][0]["text"] for event in events]


def test_the_page_and_the_router_work_as_they_stand(site: Site, served: Server, tmp_path: Path) -> None:
    daemon, before = site.daemon, len(site.daemon.records("save.done"))
    right = ask(f"{served.url}/v1/completions")
    assert len(right) > 1
    eventually(lambda: len(daemon.records("save.done")) > before, 60, "what is to be found")
    said = paste("\n".join(blocks("docs/HINTS.md", "test engine", "test attached")), daemon, served, tmp_path)
    outcomes = re.findall(r'"outcome": ?"(\w+)"', said)
    assert outcomes[1] == "completed", said
    router = REPO / "docs/examples/router.py"
    name = str(daemon.records("engine.attached")[-1]["engine"])
    (port,) = free_ports(1)
    argv = [sys.executable, str(router), str(port), str(door_socket(daemon.socket)), f"{name}={served.url}"]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}/v1/completions"
            eventually(lambda: listens(url), 30, "the router")
            count = len(daemon.records("announcement.done"))
            assert "".join(ask(url)) == "".join(right)
            eventually(lambda: len(daemon.records("announcement.done")) > count, 30, "the router's announcement")
            with pytest.raises(urllib.error.HTTPError, match="404"):
                ask(url, model="another")
        finally:
            process.kill()


def listens(url: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, b"{"), timeout=5)
    except urllib.error.HTTPError as error:
        return error.code == 400
    except urllib.error.URLError:
        return False
    return True


def paste(text: str, daemon: Daemon, server: Server, folder: Path) -> str:
    """Run it in a shell that has the `kvprefetchd` of these sources, and return what it says."""
    program = folder / "kvprefetchd"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvprefetch.daemon "$@"\n')
    program.chmod(0o755)
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "KVPREFETCHD_SOCKET": str(daemon.socket), "VLLM": server.url}
    done = subprocess.run(["bash", "-ec", text], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
