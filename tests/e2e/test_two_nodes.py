"""Data-parallel ranks on two nodes, a daemon on each, one store: each rank loads what the other stored.

A node is a network namespace with memory files, a host name and a boot id of its own.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve.server import SERVE
from tests.e2e.conftest import BLOCK, PATIENT
from tests.lab import link, process
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import EngineSpec
from tests.lab.link import LimitedLink
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.stress,
    pytest.mark.timeout(900),
    pytest.mark.skipif(link.available() is not None, reason=f"no second node: {link.available()}"),
]

# The second node's part of `vllm serve --headless`, which no package on PyPI installs for CPUs under that name.
HEADLESS = """
from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
run_headless(make_arg_parser(FlexibleArgumentParser()).parse_args())
"""
SET_UP = """
mount --make-rprivate / && mount -t tmpfs none /dev/shm && hostname "$0" && echo "$1" > "$2" &&
mount --bind "$2" /proc/sys/kernel/random/boot_id && echo up && exec sleep infinity
"""
START_S = 300.0


class Node:
    """A node of this name; `far`: behind the link, else on this side of it."""

    def __init__(self, name: str, folder: Path, far: LimitedLink | None) -> None:
        argv = ["unshare", "--mount", "--uts", "sh", "-c", SET_UP, name, str(uuid.uuid4()), str(folder / f"{name}.id")]
        self.log = folder / f"{name}.log"
        self.holder = process.spawn(far.in_namespace(argv) if far else argv, log=self.log)

    def inside(self, argv: Sequence[str]) -> list[str]:
        """Return this command as it runs on the node."""
        enter = ["nsenter", f"--target={self.holder.pid}", "--mount", "--uts", "--net", f"--wd={process.REPO}"]
        return [*enter, *argv]


@contextlib.contextmanager
def node(name: str, folder: Path, far: LimitedLink | None = None) -> Iterator[Node]:
    made = Node(name, folder, far)
    try:
        assert process.comes_up(made.holder, lambda: "up" in made.log.read_text(), 20), made.log.read_text()
        yield made
    finally:
        process.reap(made.holder)


class NodesDaemon(Daemon):
    """A daemon on a node."""

    def __init__(self, on: Node, store: Store) -> None:
        super().__init__(mooncake_config=store.config, extra=PATIENT)
        self.argv = on.inside(self.argv)


class Ranks:
    """Two data-parallel ranks, one on each node; the first one's node has the HTTP server."""

    def __init__(self, spec: EngineSpec, nodes: Sequence[Node], daemons: Sequence[Daemon], wire: LimitedLink) -> None:
        self.port, rpc = process.free_ports(2)
        self._children = list[subprocess.Popen[bytes]]()
        every = ["--data-parallel-size=2", "--data-parallel-size-local=1", f"--data-parallel-address={wire.host_ip}"]
        every += [f"--data-parallel-rpc-port={rpc}", f"--model={spec.model}", "--served-model-name=model"]
        every += ["--dtype=float32", f"--block-size={BLOCK}", "--max-model-len=1024", "--enforce-eager"]
        every += ["--num-gpu-blocks-override=80", "--distributed-executor-backend=uni", "--generation-config=vllm"]
        first = [*SERVE, f"--port={self.port}", "--host=127.0.0.1"]
        second = [sys.executable, "-c", HEADLESS, "--headless", "--data-parallel-start-rank=1"]
        second += ["--api-server-count=0"]
        places = zip(nodes, daemons, (first, second), (wire.host_ip, wire.remote_ip), strict=True)
        for number, (on, daemon, argv, address) in enumerate(places):
            log = on.log.with_name(f"rank{number}.log")
            environment = {**spec.but(host_ip=address).environment()}
            del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
            given = [f"{name}={value}" for name, value in environment.items()]
            transfer = f"--kv-transfer-config={json.dumps(ours(daemon.socket))}"
            self._children.append(process.spawn(on.inside(["env", *given, *argv, *every, transfer]), log=log))
        logs = [on.log.with_name(f"rank{number}.log") for number, on in enumerate(nodes)]
        if not process.comes_up(self._children[0], self._answers, START_S):
            raise AssertionError("\n".join(f"--- {log}\n{process.tail(log, 60)}" for log in logs))

    def _answers(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
            return bool(answer.status == 200)

    def complete(self, rank: int, prompt: list[int]) -> list[int]:
        """Serve a prompt on this rank; return the tokens."""
        asked: dict[str, Any] = {"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(asked).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            tokens: list[int] = json.loads(answer.read())["choices"][0]["token_ids"]
        return tokens

    def close(self) -> None:
        for child in reversed(self._children):
            process.reap(child, term_s=10)


@pytest.mark.shows("data-parallel ranks on two nodes")
def test_ranks_on_two_nodes_load_what_the_other_stored(model: Path, tmp_path: Path) -> None:
    prompts = make_prompts(4, 300, seed=131)
    whole = 300 // BLOCK
    with (
        LimitedLink() as wire,
        Store(link=wire) as store,
        node("here", tmp_path) as here,
        node("there", tmp_path, wire) as there,
        NodesDaemon(here, store) as first,
        NodesDaemon(there, store) as second,
        contextlib.closing(Ranks(EngineSpec(model=model), (here, there), (first, second), wire)) as ranks,
    ):
        daemons = (first, second)
        right = [ranks.complete(number % 2, prompt) for number, prompt in enumerate(prompts)]
        eventually(lambda: store.keys == len(prompts) * whole, 60, "all prompts in the store")
        again = [ranks.complete(1 - number % 2, prompt) for number, prompt in enumerate(prompts)]
        assert again == right
        for daemon in daemons:
            eventually(lambda each=daemon: len(each.records("request.done")) == 4, 20, "its requests' lines")
            loaded = [line["loaded_blocks"] for line in daemon.records("request.done")]
            assert loaded == [0, 0, whole, whole], "its own two prompts, then those of the other node's rank"
            assert {line["outcome"] for line in daemon.records("request.done")[2:]} == {"loaded"}
