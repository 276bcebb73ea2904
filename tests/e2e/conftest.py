"""Fixtures for tests against a real vLLM engine, a real daemon and a real Mooncake store."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import vllm

from tests.lab import control
from tests.lab.bed import engine as bed
from tests.lab.bed import oracle
from tests.lab.checkpoint import TINY, make_checkpoint
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.passes import Abort, Pass
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.lab.template import Template
from tests.support.auditor import Auditor
from tests.support.command import kvprefetchd
from tests.support.waiting import eventually

BLOCK = 32
RUNS_GRANITE = pytest.mark.skipif(
    vllm.__version__.startswith("0.31."), reason="vLLM 0.31's CPU build does not run Granite 4"
)
VOCAB = 2048
# Tests that count hits: a fetch may take long on a machine with no core to spare.
PATIENT = ("--call-timeout-ms", "60000")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a real engine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny seeded float32 model whose tokens depend on every block of the prompt."""
    return make_checkpoint(tmp_path_factory.mktemp("models"), TINY)


@dataclass(frozen=True)
class Site:
    """One daemon and how to start engines beside it."""

    daemon: Daemon
    model: Path
    auditor: Auditor
    engines: Callable[..., Engine]

    def engine(self, spec: EngineSpec | None = None, **changes: Any) -> Engine:
        """Start an engine: of `spec`, or of :meth:`spec` with these changes."""
        return self.engines(spec or self.spec(**changes))

    def bed(self, *, extra: dict[str, Any] | None = None, role: str = "kv_both", **changes: Any) -> Engine:
        """Start an engine that computes nothing and checks each block: its tokens are `answers` while none is wrong.

        It has a worker that no installed package has, and shares KV with other engines in vLLM's format alone.
        """
        transfer = ours(self.daemon.socket, role=role, **{"key_format": "vllm", **(extra or {})})
        return self.engines(bed.spec(connector=transfer, **changes))

    def spec(self, *, extra: dict[str, Any] | None = None, role: str = "kv_both", **changes: Any) -> EngineSpec:
        spec = EngineSpec(model=self.model, kv_transfer=ours(self.daemon.socket, role=role, **(extra or {})))
        return spec.but(**changes)

    def fresh(self, engine: Engine) -> None:
        """Once every save has reached the store: forget the engine's own prefix cache."""
        self.assert_idle()
        assert engine.reset_prefix_cache()

    def assert_idle(self, timeout_s: float = 60.0) -> None:
        self.auditor.assert_idle(self.daemon.pid, self.daemon.socket, timeout_s)

    def a_foreign_block_shows(
        self, engine: Engine, prompts: list[list[int]], right: list[list[int]], index: int = 1, **options: Any
    ) -> None:
        """All prompts but the first load a block of the first: their tokens differ, so equal tokens mean something."""
        self.fresh(engine)
        engine.call("tests.e2e.probes:load_a_foreign_block", index)
        spoiled = engine.run(prompts, **{**options, "concurrency": 1})
        assert min(spoiled.cached_tokens) > 0
        changed = [got != want for got, want in zip(spoiled.tokens, right, strict=True)]
        assert changed == [False] + [True] * (len(prompts) - 1)


At = Callable[[Daemon], Site]


@pytest.fixture(scope="session")
def template(model: Path) -> Iterator[Template]:
    """Forks engines: to import vLLM, in the scheduler's process and the worker's, takes 20 s of CPU."""
    with Template(EngineSpec(model=model).environment()) as template:
        yield template


@pytest.fixture(scope="session")
def plain(model: Path, template: Template) -> Iterator[Engine]:
    """The engine without a connector: its tokens are right."""
    with Engine(EngineSpec(model=model, max_model_len=4096), template=template) as engine:
        yield engine


@pytest.fixture(scope="module")
def module_auditor(plain: Engine) -> Iterator[Auditor]:
    """All that a module starts must be gone at its end; the plain engine stays."""
    auditor = Auditor()
    yield auditor
    auditor.assert_nothing_left(timeout_s=30)


@pytest.fixture(scope="module")
def engines(module_auditor: Auditor, template: Template) -> Iterator[Callable[..., Engine]]:
    """Starts engines that are stopped at the end of the module."""
    started: list[Engine] = []

    def start(spec: EngineSpec, *, attached: bool = True, forked: bool = True) -> Engine:
        engine = Engine(spec, template=template if forked else None)
        started.append(engine)
        engine.start()
        if attached and "KVPrefetchConnector" in str(spec.kv_transfer):
            wait_attached(engine)
        return engine

    yield start
    for engine in reversed(started):
        engine.stop()


@pytest.fixture(scope="module")
def cluster(module_auditor: Auditor) -> Iterator[Store]:
    """A Mooncake store that the daemons of a module join."""
    with Store(memory="512 MB") as store:
        yield store


@pytest.fixture(scope="module")
def shared(cluster: Store) -> Iterator[Daemon]:
    """A daemon on the cluster's store."""
    with Daemon(mooncake_config=cluster.config, staging="64MiB", extra=PATIENT) as daemon:
        yield daemon
        assert daemon.sigterm(30) == 0


@pytest.fixture(scope="module")
def at(model: Path, module_auditor: Auditor, engines: Callable[..., Engine]) -> At:
    """at(daemon): the site of a test with a daemon of its own."""
    return lambda daemon: Site(daemon, model, module_auditor, engines)


@pytest.fixture(scope="module")
def site(at: At) -> Iterator[Site]:
    """A daemon with an embedded store, shared by the tests of a module."""
    with Daemon(memory="512MiB", staging="128MiB", extra=PATIENT) as daemon:
        yield at(daemon)
        assert daemon.sigterm(60) == 0


def wait_attached(engine: Engine, timeout_s: float = 15.0) -> None:
    """Check the promise: an engine attaches to a running daemon within five seconds, on a machine with a free core."""
    eventually(lambda: engine.call("tests.e2e.probes:attached"), timeout_s, "an attached engine", pause_s=0.05)


def fingerprint(engine: Engine) -> dict[str, str]:
    """Return the properties that engines must have to share stored KV, from the engine's log."""
    text = engine.log.read_text()
    said = re.findall(r"kvprefetch: stored KV is shared with engines that have all of this: (.*)", text)
    assert len(said) == 1, "\n".join(line for line in text.splitlines() if "kvprefetch" in line) or text
    return dict(part.split("=", 1) for part in said[0].split())


def answers(prompts: Sequence[Sequence[int]], max_tokens: int = 32) -> list[list[int]]:
    """The right tokens of an engine of the bed."""
    return [oracle.answer(prompt, max_tokens, VOCAB) for prompt in prompts]


def hits(prompts: Sequence[list[int]]) -> list[int]:
    """The prompt tokens of each that a store can serve."""
    return [whole_blocks(prompt) for prompt in prompts]


def served(result: Pass, tokens: list[list[int]], hit_tokens: list[int] | None = None) -> Pass:
    """Check a pass: each request ran to its length with these tokens, and loaded or kept so many of its prompt."""
    assert {request.finish_reason for request in result.requests} == {"length"}
    assert result.tokens == tokens
    assert hit_tokens is None or result.cached_tokens == hit_tokens
    return result


def saved_then_loaded(
    site: Site,
    plain: Engine,
    engine: Engine,
    prompts: list[list[int]],
    longer: Sequence[list[int]] = (),
    foreign: Sequence[int] = (1,),
    **options: Any,
) -> list[list[int]]:
    """Check that loads give the tokens of the plain engine, and that blocks of another prompt would not; return them.

    `longer`: prompts that begin with those, and load the rest beside local hits; `foreign`: which blocks of a load.
    """
    right = plain.run(prompts, **options).tokens
    served(engine.run(prompts, **options), right, [0] * len(prompts))
    if longer:
        beside = plain.run(longer, **options)  # vLLM's own local hits, one block less for some windows
        assert engine.run(longer, **options).tokens == beside.tokens
    site.fresh(engine)
    served(engine.run(prompts, **options), right, hits(prompts))
    if longer:
        loads = engine.call("tests.e2e.probes:counters")["load_blocks"]
        served(engine.run(longer, **options), beside.tokens, hits(longer))
        loads = engine.call("tests.e2e.probes:counters")["load_blocks"] - loads
        assert loads == (sum(hits(longer)) - sum(beside.cached_tokens)) // BLOCK
    for index in foreign:
        site.a_foreign_block_shows(engine, prompts, right, index, **options)
    site.assert_idle()
    return right


def abort_every_other(
    engine: Engine, prompts: list[list[int]], right: list[list[int]], steps: int, **options: Any
) -> None:
    """Run prompts, abort every other one, each after more steps than the last; check the tokens of the rest."""
    aborts = [Abort(index, after_steps=steps + index) for index in range(0, len(prompts), 2)]
    partly = engine.run(prompts, aborts=aborts, **options)
    for request in partly.requests[1::2]:
        assert request.tokens == right[request.index]


def preempted_and_aborted(site: Site, prompts: list[list[int]], max_tokens: int, layout: str, **options: Any) -> None:
    """With a KV pool too small for its answers, and aborted requests, an engine of the bed has the right tokens."""
    right = answers(prompts, max_tokens)
    sizes: dict[str, Any] = {"num_gpu_blocks": 28, "max_model_len": 384, **options}
    engine = site.bed(layout=layout, extra={"cache_prefix": f"preempted-{layout}"}, **sizes)
    engine.call("tests.e2e.probes:count_preemptions")
    assert engine.run(prompts, max_tokens=max_tokens).tokens == right
    for steps in range(3):
        site.fresh(engine)
        abort_every_other(engine, prompts, right, steps, max_tokens=max_tokens)
    assert engine.call("tests.e2e.probes:preemptions") > 0
    site.fresh(engine)
    served(engine.run(prompts, max_tokens=max_tokens), right)
    counters = engine.call("tests.e2e.probes:counters")
    assert counters["loads"] >= len(prompts)
    assert counters["failed_loads"] == 0
    site.assert_idle()
    engine.stop()


def failed_loads_are_recomputed(
    site: Site, engine: Engine, prompts: list[list[int]], right: list[list[int]], **options: Any
) -> None:
    """Every second load fails on the worker, also among aborted requests: tokens stay right."""
    engine.run(prompts, **options)
    site.fresh(engine)
    engine.call("tests.e2e.probes:break_loads", 2)
    before = Counter(engine.call("tests.e2e.probes:counters"))
    served(engine.run(prompts, **options), right)
    new = Counter(engine.call("tests.e2e.probes:counters")) - before
    assert (new["loads"], new["failed_loads"]) == (len(prompts), len(prompts) // 2)
    for steps in range(3):
        site.fresh(engine)
        abort_every_other(engine, prompts, right, steps, **options)
    site.assert_idle()


def whole_blocks(prompt: list[int]) -> int:
    """Return the prompt tokens that a store can serve: full blocks, without the last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def loaded_on_two_ranks(site: Site, prompts: list[list[int]], layout: str) -> None:
    """Each of two tensor-parallel ranks loads its own bytes: a wrong block on either makes both their tokens wrong."""
    engine = site.bed(layout=layout, extra={"cache_prefix": f"ranks-{layout}"}, tensor_parallel=2)
    assert engine.call("tests.e2e.probes:workers_found") == [True, True]
    assert engine.run(prompts).tokens == answers(prompts)
    site.fresh(engine)
    served(engine.run(prompts), answers(prompts), hits(prompts))
    site.assert_idle()
    engine.stop()


def each_reads_what_the_other_wrote(
    cluster: Store,
    right: Callable[[list[list[int]]], list[list[int]]],
    mine: Engine,
    theirs: Engine,
    stored: int,
    seed: int,
    written: Mapping[int, int | None] = MappingProxyType({0: None, 1: None}),
    dcp: int = 1,
) -> None:
    """Loads of either connector's values give the right tokens, and both store the same keys with the same bytes.

    `right`: the tokens of these prompts; `stored`: the keys of a prompt of 300 tokens, in all groups; `written`: of
    each group, how many bytes mean something; `dcp`: how many ranks share the tokens of a block.
    """

    def write(writer: Engine, prompts: list[list[int]]) -> list[list[int]]:
        wanted = cluster.keys + len(prompts) * stored
        tokens = writer.run(prompts, concurrency=1).tokens
        assert cluster.wait_keys(wanted) == wanted
        return tokens

    for writer, reader in ((mine, theirs), (theirs, mine)):
        prompts, seed = make_prompts(4, 300, seed=seed), seed + 1
        tokens = right(prompts)
        assert write(writer, prompts) == tokens
        served(reader.run(prompts), tokens, hits(prompts))
    prompts, digests = make_prompts(2, 300, seed=seed), []
    keys = {
        each: [
            control.block_keys(mine.spec.model, prompt, group=each, tp_rank=rank, dcp=dcp)
            for rank in range(dcp)
            for prompt in prompts
        ]
        for each in written
    }
    names = {each: [name for some in found for name in some] for each, found in keys.items()}
    for writer in (mine, theirs):
        assert writer.reset_prefix_cache()
        write(writer, prompts)
        digests.append([control.read_digests(cluster.config, names[each], size) for each, size in written.items()])
        for some, found in zip(names.values(), digests[-1], strict=True):
            control.remove(cluster.config, [name for name, digest in zip(some, found, strict=True) if digest])
    assert digests[0] == digests[1]


def warmed_prompts_are_hits(
    site: Site, engine: Engine, prompts: list[list[int]], right: list[list[int]], file: Path
) -> Any:
    """`kvprefetchd prefetch` with prompts: their requests fetch nothing, and tokens stay. Returns its counts."""
    assert engine.run(prompts).tokens == right
    site.fresh(engine)
    file.write_text("".join(json.dumps({"token_ids": prompt}) + "\n" for prompt in prompts))
    before = len(site.daemon.records("request.done"))
    engine_id = str(site.daemon.records("engine.attached")[-1]["engine"])
    result = kvprefetchd("prefetch", file, "--engine", engine_id, "--json", "--socket", site.daemon.socket)
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)
    assert counts["missing"] == 0
    site.assert_idle()
    served(engine.run(prompts), right, hits(prompts))
    assert site.daemon.wait_record("request.done", count=before + len(prompts)) is not None
    lines = site.daemon.records("request.done")[before:]
    assert {(line["outcome"], line["bytes"]) for line in lines} == {("loaded", 0)}
    site.assert_idle()
    return counts
