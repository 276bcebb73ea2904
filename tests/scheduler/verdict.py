"""The promises at rest: an engine keeps nothing, and every token and every stored byte is right."""

from __future__ import annotations

import functools
import hashlib

from kvprefetch.kv.keys import whole_prefix
from tests.scheduler.engine import Engine
from tests.scheduler.model import Truth
from tests.scheduler.shape import Shape, Site


def finish(engine: Engine) -> None:
    """Drain an engine beside a daemon, check all that must hold, and close it. Raises AssertionError."""
    try:
        engine.drain()
        engine.await_reset()
        wrong = [*_kept(engine), *_wrong_tokens(engine), *_of_the_connector(engine)]
        assert not wrong, "\n".join([f"{engine.shape}", *wrong])
    finally:
        engine.close()


def _kept(engine: Engine) -> list[str]:
    wrong = []
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    if free != engine.shape.blocks - 1:  # block 0 is vLLM's null block
        wrong.append(f"blocks stay in use: {engine.shape.blocks - 1 - free}")
    if engine.scheduler.requests:
        wrong.append(f"requests stay: {list(engine.scheduler.requests)}")
    return wrong


def _of_the_connector(engine: Engine) -> list[str]:
    assert engine.site is not None
    assert engine.oracle is not None
    site = engine.site
    wrong = [*engine.oracle.wrong, *engine.logged.texts, *engine.oracle.left_behind()]
    site.auditor.assert_idle(site.daemon.pid, site.daemon.socket)
    engine.counts.update(engine.side.counters)
    return wrong + _wrong_values(engine, site)


def _wrong_values(engine: Engine, site: Site) -> list[str]:
    """Each stored block against a plain computation of the same tokens with the weights that its key names."""
    assert engine.oracle is not None
    wrong = []
    for number, group in enumerate(engine.shape.groups.groups):
        known = [each for each in engine.oracle.tokens.items() if len(each[1]) % group.block_tokens == 0]
        for rank in engine.workers.ranks:
            prefix = rank.connector.keys.prefixes[number]
            named = [
                (weights, tokens, whole_prefix("", prefix, name) + digest.hex())
                for name, weights in engine.weights.items()
                for digest, tokens in known
            ]
            digests = site.reader.digests([key for *_, key in named])
            for (weights, tokens, _), found in zip(named, digests, strict=True):
                if found is None:
                    continue
                engine.counts["stored"] += 1
                engine.counts[f"stored_{group.kind.value}"] += 1
                if found != hashlib.sha256(engine.truth.block(weights, tokens, rank.number, number)).hexdigest():
                    wrong.append(f"stored value is wrong: rank={rank.number} group={number} tokens={len(tokens)}")
    return wrong


def _wrong_tokens(engine: Engine) -> list[str]:
    """Each request's tokens against those of vLLM's plain scheduler without a connector."""
    wrong = []
    for sent in engine.requests.values():
        if not sent.comparable:
            continue
        chunks = tuple(map(tuple, sent.chunks))
        right = list(plain_tokens(engine.truth, sent.weights, chunks, sent.out, sent.session))
        engine.counts["compared"] += 1
        cut = sent.aborted or sent.session
        if sent.received != (right[: len(sent.received)] if cut else right):
            wrong.append(f"tokens differ: {sent.name}: {sent.received} instead of {right}")
    return wrong


@functools.lru_cache(maxsize=512)
def plain_tokens(
    truth: Truth, weights: int, chunks: tuple[tuple[int, ...], ...], out: int, session: bool
) -> tuple[int, ...]:
    """The tokens of vLLM's plain scheduler, alone with one request and without a connector."""
    engine = Engine(Shape(groups=truth.groups, ranks=truth.ranks, blocks=64), None, truth, weights=weights)
    name = engine.add(list(chunks[0]), out, session=session)
    for chunk in chunks[1:]:
        engine.feed(name, list(chunk))
    engine.drain()
    return tuple(engine.requests[name].received)
