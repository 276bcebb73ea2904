"""The bed's oracle: each planted fault is found in the step that would read it, and nothing else is."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.lab.bed import oracle
from tests.lab.bed.device import Device
from tests.lab.bed.layouts import Group, Layer
from tests.lab.bed.step import Plan, Request

BLOCK, BLOCKS, VOCAB = 4, 40, 512


OUTSIDE = {"replayed": "window", "ring": "ring"}  # the prefix cache


def groups(*kinds: tuple[str, int]) -> tuple[Group, ...]:
    found = []
    for number, (kind, span) in enumerate(kinds):
        layers = []
        for index in range(2):
            name = f"layers.{2 * number + index}"
            words: NDArray[np.uint64] = np.zeros((BLOCKS, 2, BLOCK, 3), dtype=np.uint64)
            layers.append(Layer(name, oracle.key_of(name), words, range(2)))
        group = Group(number, BLOCK, OUTSIDE.get(kind, kind), span, tuple(layers), cached=kind not in OUTSIDE)
        found.append(group)
    return tuple(found)


def make(*kinds: tuple[str, int], every_step: bool = True) -> Device:
    return Device(groups(*kinds or (("full", 0),)), VOCAB, BLOCKS, every_step=every_step)


def step(device: Device, scheduled: dict[str, int], drafts: dict[str, list[int]] | None = None) -> Plan:
    plan = device.plan(scheduled, drafts or {})
    for group in device.groups:
        for layer in group.layers:
            device.run(plan, group, layer)
    device.sample(plan)
    return plan


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [random.Random(1000 * seed + at).randrange(16, VOCAB) for at in range(tokens)]


def prefilled(device: Device, name: str = "a", seed: int = 0, blocks: list[int] | None = None) -> Request:
    """A request with ten tokens, which its device has computed."""
    request = device.admit(name, prompt(10, seed), [blocks or [5, 6, 7, 8] for _ in device.groups], 0)
    step(device, {name: 10})
    return request


def test_tokens_and_kv_are_those_of_the_prefix() -> None:
    """Chunks, decodes and loaded prefixes give the tokens of the oracle, and no alarm."""
    device = make()
    prefilled(device)
    for _ in range(3):
        step(device, {"a": 1})
    assert device.requests["a"].tokens[10:14].tolist() == oracle.answer(prompt(10), 4, VOCAB)
    device.admit("b", prompt(10), [[5, 6, 9, 10]], 8)  # the first eight tokens are cached
    plan = step(device, {"b": 1})
    assert plan.work[0].sampled == []
    step(device, {"b": 1})
    assert device.requests["b"].tokens[10:].tolist()[:1] == oracle.answer(prompt(10), 1, VOCAB)
    assert device.faults == []
    assert device.counters["checked_tokens"] > 0


def test_a_request_may_read_what_another_computes_in_the_same_step() -> None:
    """vLLM counts blocks as cached once their step is scheduled."""
    device = make()
    device.admit("a", prompt(10), [[5, 6, 7]], 0)
    device.admit("b", prompt(10), [[5, 6, 9]], 8)
    assert step(device, {"b": 2, "a": 10}).copied.total() == 0
    assert device.faults == []


def swap(device: Device) -> None:
    for layer in device.groups[0].layers:
        layer.words[[5, 6]] = layer.words[[6, 5]]


def half(device: Device) -> None:
    for layer in device.groups[0].layers:
        layer.words[6, :, BLOCK // 2 :] = 0


def same_last_tokens(device: Device) -> None:
    """Put a block of another prefix, with the tokens that belong here, in its place."""
    tokens = prompt(10)
    other = oracle.prefixes([tokens[0] + 1, *tokens[1:]])
    for layer in device.groups[0].layers:
        layer.words[6] = oracle.rows(other[4:8], layer.key, layer.heads, 3).swapaxes(0, 1)


def of_another_rank(device: Device) -> None:
    request = device.requests["a"]
    for layer in device.groups[0].layers:
        layer.words[6] = oracle.rows(request.prefix[4:8], layer.key, range(2, 4), 3).swapaxes(0, 1)


def one_bit(device: Device) -> None:
    device.groups[0].layers[1].words[6, 1, 3, 2] ^= np.uint64(1 << 40)


def torn(device: Device) -> None:
    words = device.groups[0].layers[0].words
    words[6, :, :, 1:] = words[5, :, :, 1:]


def of_another_layer(device: Device) -> None:
    first, second = device.groups[0].layers
    second.words[6] = first.words[6]


@pytest.mark.parametrize(
    ("plant", "found", "token"),
    [
        (swap, "KV of request a, token 4, layer layers.0, head 0", 0),
        (half, "nothing: all bytes are 0", 6),
        (same_last_tokens, "bytes that the oracle never wrote", 4),
        (of_another_rank, "KV of request a, token 4, layer layers.0, head 2", 4),
        (one_bit, "a torn row: 2 words of KV of request a, token 7, layer layers.1, head 1", 7),
        (torn, "a torn row", 4),
        (of_another_layer, "KV of request a, token 4, layer layers.0, head 0", 4),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_planted_fault_is_found_in_its_first_step(plant: Callable[[Device], None], found: str, token: int) -> None:
    """Whose block it is, and what was there; the request's next tokens are wrong, and no other's."""
    device = make()
    prefilled(device)
    prefilled(device, "c", 3, [20, 21, 22, 23])
    plant(device)
    step(device, {"a": 1, "c": 1})
    first = device.faults[0]
    assert (first.request, first.group, first.token) == ("a", 0, token)
    assert (first.block, first.block_id) == (token // BLOCK, 5 + token // BLOCK)
    assert first.found.startswith(found)
    step(device, {"a": 1, "c": 1})
    right = [oracle.answer(prompt(10, seed), 3, VOCAB) for seed in (0, 3)]
    got = [device.requests[name].tokens[10:13].tolist() for name in ("a", "c")]
    assert got[0][1] != right[0][1]
    assert got[1] == right[1]
    assert {each.request for each in device.faults} == {"a"}


def test_a_load_that_is_late_by_a_step_is_found() -> None:
    """A step reads what is not there yet; that it is there one step later heals nothing."""
    device = make()
    prefilled(device)
    layers = device.groups[0].layers
    stored = [layer.words[[5, 6]].copy() for layer in layers]
    device.admit("b", prompt(10), [[15, 16, 17]], 8)
    step(device, {"b": 2})
    for layer, words in zip(layers, stored, strict=True):
        layer.words[[15, 16]] = words
    step(device, {"b": 1})
    assert [(each.request, each.step, each.block) for each in device.faults] == [("b", 2, 0), ("b", 2, 1)]
    assert device.requests["b"].tokens[10] != oracle.answer(prompt(10), 1, VOCAB)[0]


def test_kv_computed_after_a_wrong_block_is_wrong_for_others() -> None:
    """As a model's would be: who shares it is reported, too."""
    device = make()
    device.admit("a", prompt(12), [[5, 6, 7, 8]], 0)
    step(device, {"a": 4})
    for layer in device.groups[0].layers:
        layer.words[5] = 0
    step(device, {"a": 4})
    step(device, {"a": 4})
    device.admit("b", prompt(12), [[9, 6, 7, 10]], 0)
    step(device, {"b": 4})
    device.requests["b"].computed = 11  # the scheduler counts blocks 6 and 7 as cached
    step(device, {"b": 1})
    assert [(each.request, each.block) for each in device.faults] == [("a", 0), ("b", 2)]


def test_rejected_drafts_and_placeholders_are_no_alarm() -> None:
    """The KV of a rejected draft is overwritten before anything reads it."""
    device = make()
    device.draft_hits = 0.5
    request = prefilled(device, blocks=list(range(5, 20)))
    for _ in range(12):
        device.draft("a", 3)
        before = request.known
        step(device, {"a": 4}, {"a": [-1, -1, -1]})
        assert 1 <= request.known - before <= 4
        assert request.computed == request.known - 1
    assert request.tokens[10 : request.known].tolist() == oracle.answer(prompt(10), request.known - 10, VOCAB)
    assert device.faults == []


@pytest.mark.parametrize("kind", [("window", 6), ("chunk", 4)])
def test_blocks_behind_a_window_may_be_gone(kind: tuple[str, int]) -> None:
    """What a window or a chunk has left behind may be a null block or another request's; what it reads may not."""
    device = make(("full", 0), kind)
    request = prefilled(device)
    request.blocks[1][0] = 0
    step(device, {"a": 1})
    assert device.faults == []
    request.blocks[1][2] = 0
    step(device, {"a": 1})
    assert [(each.group, each.block, each.found) for each in device.faults] == [(1, 2, "no block: the null block")]


def replaying(device: Device, replay_start: int = 2) -> None:
    """A request hits the first eight tokens of another one, and computes six of them again in two steps."""
    device.admit("a", prompt(10), [[5, 6, 7], [10, 11, 12]], 0)
    step(device, {"a": 10})
    device.admit("b", prompt(10) + [99] * 4, [[5, 6, 17, 18], [20, 21, 22, 23]], 2, replay_start=replay_start)
    step(device, {"b": 3})
    step(device, {"b": 9})
    step(device, {"a": 1})


def test_a_window_that_is_computed_again_leaves_the_hit_alone() -> None:
    """Nothing of a hit is in a group outside the prefix cache, and what others share is not written."""
    device = make(("full", 0), ("replayed", 6))
    replaying(device)
    assert device.faults == []
    tokens = device.requests["b"].tokens[14:15].tolist()
    assert tokens == oracle.answer(prompt(10) + [99] * 4, 1, VOCAB)


def test_a_replay_that_rewrites_a_shared_block_is_found() -> None:
    """By the request that computes again, and by the one that computed first."""
    device = make(("full", 0), ("replayed", 6))
    device.rewrites = True
    replaying(device)
    assert {(each.request, each.group, each.token) for each in device.faults} >= {("a", 0, 2), ("b", 0, 2)}


def test_a_runner_that_knows_of_no_replay_is_found() -> None:
    """It reads a window that nobody filled."""
    device = make(("full", 0), ("replayed", 6))
    replaying(device, replay_start=0)
    first = device.faults[0]
    assert (first.request, first.group, first.token, first.found) == ("b", 1, 0, "nothing: all bytes are 0")


def test_a_ring_holds_what_is_not_compressed_yet() -> None:
    """A hit needs nothing of it; what a step left there the next one reads."""
    device = make(("full", 0), ("ring", 2))
    device.admit("a", prompt(10), [[5, 6, 7], [10]], 0)
    step(device, {"a": 7})
    step(device, {"a": 3})
    device.admit("b", prompt(10) + [99] * 4, [[5, 6, 17, 18], [20]], 8)
    step(device, {"b": 1})
    step(device, {"b": 2})
    assert device.faults == []
    device.groups[1].layers[0].words[20] = 0
    step(device, {"b": 1})
    assert [(each.request, each.group, each.token, each.block_id) for each in device.faults] == [("b", 1, 10, 20)]


def test_a_preempted_request_comes_back_with_the_tokens_it_has() -> None:
    device = make()
    prefilled(device)
    step(device, {"a": 1})
    tokens = device.requests["a"].tokens[:11].tolist()
    device.come_back("a", tokens, [[25, 26, 27]], 0)
    step(device, {"a": 11})
    assert device.requests["a"].tokens[10:12].tolist() == oracle.answer(prompt(10), 2, VOCAB)
    assert device.faults == []


def test_an_adapter_has_kv_of_its_own() -> None:
    """A block computed without the adapter is a wrong one with it."""
    device = make()
    prefilled(device)
    device.admit("b", prompt(10), [[5, 6, 9]], 8, "some adapter")
    step(device, {"b": 2})
    assert [each.request for each in device.faults] == ["b", "b"]


def test_loaded_bytes_are_those_that_the_device_did_not_fill() -> None:
    """Local hits are none; loaded blocks are, once."""
    device = make()
    prefilled(device)
    device.admit("local", prompt(10), [[5, 6, 9]], 8)
    assert step(device, {"local": 2}).copied.total() == 0
    for layer in device.groups[0].layers:
        layer.words[[15, 16]] = layer.words[[5, 6]]
    for name, expected in (("loaded", 2), ("again", 0)):
        device.admit(name, prompt(10), [[15, 16, 9]], 8)
        block_bytes = sum(layer.words[0].nbytes for layer in device.groups[0].layers)
        assert step(device, {name: 2}).copied.total() == expected * block_bytes


def test_a_bench_checks_what_a_request_comes_with() -> None:
    """Without `every_step` the step of its admission compares, later ones do not."""
    device = make(every_step=False)
    prefilled(device)
    device.admit("b", prompt(10), [[5, 6, 9]], 8)
    step(device, {"b": 2})
    checked = device.counters["checked_tokens"]
    assert checked == 2 * 8  # two layers
    step(device, {"a": 1, "b": 1})
    assert device.counters["checked_tokens"] == checked


@pytest.mark.vllm
def test_memory_that_was_taken_away_cannot_be_read() -> None:
    """Back again it is empty; a process that reads before ends at once."""
    import torch

    from tests.lab.bed import memory

    tensor = torch.ones(1 << 20, dtype=torch.uint8)
    memory.take_away([tensor])
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os._exit(int(tensor[1 << 19]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    memory.bring_back([tensor])
    assert int(tensor[1 << 19]) == 0


@pytest.mark.parametrize("dtype", [np.uint64, np.uint32, np.uint8])
def test_words_of_any_size_tell_tokens_apart(dtype: type) -> None:
    prefix = oracle.prefixes(prompt(200))
    found = oracle.rows(prefix, oracle.key_of("layers.0"), range(2), 24, dtype)
    assert len({each.tobytes() for token in found for each in token}) == 400
