"""Weights that change in place: a rank sees when, and what is in a key is what the weights are."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvprefetch.connector.attach.resets import News, Resets
from kvprefetch.connector.identity import updates
from kvprefetch.connector.identity.updates import Updates
from kvprefetch.connector.identity.weights import digest
from kvprefetch.connector.words.metadata import KVPrefetchMetadata, OfReset, RankWeights, SaveOrder
from kvprefetch.kv.keys import owner, whole_prefix

from .fakes import fails_with
from .test_worker import EPOCH, load, make


class Model(nn.Module):
    """Two layers, as vLLM's models load them."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.zeros(6000, dtype=torch.bfloat16), requires_grad=False)
        self.k = nn.Parameter(torch.zeros(64, 64), requires_grad=False)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor)
        return {name for name, _ in weights}


class Runner:
    def __init__(self) -> None:
        self.model = Model()

    def get_model(self) -> Model:
        return self.model

    def get_draft_model(self) -> None:
        return None

    def reload_weights(self, value: float) -> None:
        for each in self.model.parameters():
            each.fill_(value)


class Worker:
    """As vLLM's: RPCs reach these methods by their names."""

    def __init__(self) -> None:
        self.model_runner = Runner()

    def reload_weights(self, value: float) -> None:
        self.model_runner.reload_weights(value)

    def update_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.model_runner.model.load_weights(weights)

    def finish_weight_update(self) -> None: ...

    def compute_weight_checksums(self) -> dict[str, str]:
        return {}

    def weights_of_an_extension(self, value: float) -> None:
        """As of a `worker_extension_cls`: it writes to the parameters itself."""
        self.model_runner.model.k.fill_(value)


class Engine:
    """An engine of some ranks without requests: what its keys name, and the daemon that confirms at once."""

    def __init__(self, ranks: int = 1) -> None:
        link: Any = SimpleNamespace(send_reset=lambda *_: True)
        self.resets = Resets(link, ranks)
        self.workers = [Worker() for _ in range(ranks)]
        self.watched = [updates.of_worker(each, eplb=False) for each in self.workers]
        self.heard = list[News]()

    def update(self, value: float) -> None:
        for each in self.workers:
            each.update_weights([("k", torch.full((64, 64), value))])
            each.finish_weight_update()

    def step(self, *, computes: bool = True, ranks: slice = slice(None)) -> bool:
        """A step on these ranks; whether its loads and saves would be done."""
        step = self.resets.step._replace(computes=computes)
        for each in self.watched[ranks]:
            each.step_begins(step, loads=False)
        done = all(each.hold(step) for each in self.watched[ranks]) and self.usable
        reports = {rank: each.report for rank, each in enumerate(self.watched) if each.report is not None}
        for each in self.watched:
            each.report = None
        if reports:
            self.heard.append(news := self.resets.hear(reports))
            if news is News.CHANGED:
                self.resets.begin()
            self.resets.agree(reports)
        return done

    @property
    def usable(self) -> bool:
        """Whether anything is hinted, loaded or saved."""
        return self.resets.current.generation == self.resets.generation

    def keys(self) -> str:
        assert self.usable
        return whole_prefix(owner(1000, shared=False), "model@fp:1@", self.resets.current.id)


def trained(engine: Engine, value: float) -> str:
    """`/pause`, `update_weights`, `/resume`, and the first step."""
    engine.resets.begin()
    engine.update(value)
    engine.step()
    assert engine.step()
    return engine.keys()


def test_equal_weights_have_equal_keys_in_both_orders() -> None:
    """vLLM resets before it updates; somebody else may reset after it: the weights' id is that of the new ones."""
    one, other = Engine(2), Engine(2)
    before = [trained(each, 1.0) for each in (one, other)]
    after = trained(one, 2.0)
    other.update(2.0)
    other.resets.begin()
    other.step()
    assert other.keys() == after
    assert before == [before[0]] * 2
    assert after != before[0]
    assert trained(one, 1.0) == before[0], "the weights of before are back"


def test_a_name_that_is_used_again_finds_no_others_kv() -> None:
    """Two trainers that count steps alike, two runs of one, and a run that trains a step again."""
    mine, theirs = Engine(), Engine()
    assert trained(mine, 6.0) != trained(theirs, 7.0)
    today = Engine()
    assert trained(Engine(), 1.0) != trained(today, 2.0)
    again = [trained(today, value) for value in (3.0, 4.0, 3.0, 5.0)]
    assert again[1] != again[3]


def test_p39_the_digest_waits_for_a_step_that_computes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a paused engine, in which saves are acknowledged, come before the update."""

    def check() -> None:
        engine = Engine()
        engine.resets.begin()
        for _ in range(3):
            assert not engine.step(computes=False)
        engine.update(2.0)
        engine.step()
        assert engine.heard == [News.NOTHING]
        assert engine.keys() == trained(Engine(), 2.0)

    begins = Updates.step_begins

    def hasty(self: Updates, step: OfReset, *, loads: bool) -> None:
        begins(self, step._replace(computes=True), loads=loads)

    fails_with(check, monkeypatch, Updates, "step_begins", hasty)


@pytest.mark.parametrize("call", ["update_weights", "reload_weights", "load_weights", "runner", "extension"])
def test_an_update_without_a_reset_ends_what_the_keys_name(call: str) -> None:
    """In the very step that follows it, whichever way it came; then the weights get an id of their own."""
    engine = Engine(2)
    first = trained(engine, 1.0)
    for each in engine.workers:
        {
            "update_weights": lambda each=each: each.update_weights([("k", torch.full((64, 64), 2.0))]),
            "reload_weights": lambda each=each: each.reload_weights(2.0),
            "load_weights": lambda each=each: each.model_runner.model.load_weights([("q", torch.ones(6000))]),
            "runner": lambda each=each: each.model_runner.reload_weights(2.0),
            "extension": lambda each=each: each.weights_of_an_extension(2.0),
        }[call]()
    assert not engine.step()
    assert engine.heard[-1] is News.CHANGED
    assert not engine.usable
    assert not engine.step(), "the step in which the ranks take the digest"
    assert engine.step()
    assert engine.keys() != first


def test_an_update_of_one_rank_alone_counts_too() -> None:
    engine = Engine(2)
    trained(engine, 1.0)
    engine.workers[1].reload_weights(3.0)
    assert not engine.step()
    assert engine.heard[-1] is News.CHANGED


def test_reading_the_weights_is_no_update() -> None:
    engine = Engine()
    trained(engine, 1.0)
    engine.workers[0].compute_weight_checksums()
    assert engine.step()


def test_ranks_that_disagree_in_time_agree_late() -> None:
    engine = Engine(2)
    engine.resets.begin()
    engine.update(2.0)
    engine.step(ranks=slice(1))
    assert not engine.usable
    engine.step(ranks=slice(1, 2))
    assert engine.usable
    assert engine.keys() == trained(Engine(2), 2.0)


def test_an_update_while_the_digest_is_taken_makes_it_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a thread of the trainer's: what half of the weights were is in no key."""
    engine = Engine()
    (worker,) = engine.workers

    def interrupted(models: Any) -> bytes:
        found = digest(models)
        worker.reload_weights(9.0)
        return found

    trained(engine, 1.0)
    engine.resets.begin()
    monkeypatch.setattr(updates, "digest", interrupted)
    engine.step()
    monkeypatch.undo()
    assert not engine.step()
    assert engine.heard[-1] is News.CHANGED
    engine.step()
    assert engine.step()
    other = Engine()
    other.workers[0].reload_weights(9.0)
    other.resets.begin()
    other.step()
    assert engine.keys() == other.keys()


def test_nothing_is_done_while_an_update_runs() -> None:
    engine = Engine()
    trained(engine, 1.0)
    (worker,), (watched,) = engine.workers, engine.watched
    runner, seen = worker.model_runner, list[bool]()
    whole = runner.model

    def get_model() -> Model:
        seen.append(watched.hold(engine.resets.step))
        return whole

    runner.get_model = get_model  # type: ignore[method-assign]
    assert watched.hold(engine.resets.step)
    watched.watch(runner, ["get_model"])
    runner.get_model()
    assert seen == [False]


def test_an_update_that_changes_nothing_that_is_compared_shares_nothing() -> None:
    """Also the first one since the start, before which no step took a digest."""
    engine, plain = Engine(), Engine()
    plain.resets.begin()
    plain.step()
    engine.resets.begin()
    engine.update(0.0)
    engine.step()
    assert engine.usable
    assert engine.keys() != plain.keys()


def test_weights_that_were_updated_before_the_first_step_are_not_those_of_the_start() -> None:
    engine = Engine(2)
    engine.update(2.0)
    assert not engine.step()
    assert engine.heard == [News.OTHERS]
    assert engine.step()
    assert engine.keys() == trained(Engine(2), 2.0)


def test_a_start_without_updates_takes_no_digest() -> None:
    engine = Engine()
    for _ in range(3):
        assert engine.step()
    assert engine.keys() == "u1000@model@fp:1@"
    assert engine.heard == []


@pytest.mark.parametrize("what", ["worker", "models", "eplb", "error"])
def test_weights_that_cannot_be_compared_are_an_engines_own(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line says why, once."""
    worker = Worker()
    if what == "error":
        worker.model_runner.model.k = nn.Parameter(torch.empty(0))
    engine, keys = Engine(), set[str]()
    engine.workers = [worker]
    with caplog.at_level(logging.WARNING, "vllm.kvprefetch"):
        found = {"worker": None, "models": SimpleNamespace(model_runner=None)}.get(what, worker)
        engine.watched = [updates.of_worker(found, eplb=what == "eplb")]
        for _ in range(3):
            engine.resets.begin()
            engine.step()
            assert engine.step()
            keys.add(engine.keys())
    assert len(keys) == 3
    assert [record.getMessage().count("cannot be compared") for record in caplog.records] == [1]


def test_a_step_that_is_for_other_weights_loads_and_saves_nothing() -> None:
    """The worker side reports it as failed: vLLM computes the load's blocks, and the save's slots go back."""
    side, cache, _, _ = make()
    runner = Runner()
    side.updates = Updates(lambda: [runner.model])
    side.updates.watch(runner, ["reload_weights"])

    def step(number: int = 0, *, agreed: bool = False) -> KVPrefetchMetadata:
        saves = [SaveOrder(9, EPOCH, [4], [2])]
        return KVPrefetchMetadata([load()], saves, (EPOCH,), OfReset(number, agreed=agreed, computes=True))

    def does(meta: KVPrefetchMetadata) -> tuple[bool, RankWeights | None]:
        side.step_begins(meta)
        side.load(meta)
        side.save(meta)
        report = side.report()
        assert report is not None
        failed = {len(report.failed_loads), len(report.failed_saves), int(bool(side.failed_blocks()))}
        return failed == {0}, report.weights.get(0)

    assert does(step()) == (True, None)
    runner.reload_weights(1.0)
    assert does(step()) == (False, RankWeights(0))
    assert int(cache[5].max()) == 4, "of the step before"
    done, weights = does(step(1))
    assert (done, weights and len(weights.digest)) == (False, 16)
    assert does(step(1, agreed=True)) == (True, None)
    assert does(step()) == (False, None), "a step of before the reset"


def test_a_trainers_loop_of_1000_steps() -> None:
    """Two engines that agree share each step's KV; one with another update, of a few values, never finds any of it."""
    one, same, other = Engine(), Engine(), Engine()
    seen = set[str]()
    generator = torch.Generator().manual_seed(1)
    for number in range(1000):
        k = torch.randn(64, 64, generator=generator)
        for each in (one, same, other):
            each.resets.begin()
            each.workers[0].update_weights([("k", k if each is not other else k.clone().index_fill_(0, KEPT, 0.5))])
            if each is same and number % 2:
                each.resets.begin()
            each.step()
        assert one.keys() == same.keys() != other.keys()
        assert seen.isdisjoint({one.keys(), other.keys()})
        seen |= {one.keys(), other.keys()}


KEPT = torch.tensor([3])
