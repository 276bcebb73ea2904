"""`kvprefetchd estimate TRACE`: logs of three systems, a store that drops what was not used for longest, a real one."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.cli.reuse import FILLED, LogPrompt, Reuse, prompts
from kvprefetch.daemon.config.model import ConfigError
from kvprefetch.kv.hashing import block_digests
from tests.lab.daemon import Daemon
from tests.lab.store import Store
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

UNIT = 32  # tokens of a block


def conversations(count: int, seed: int = 7) -> list[LogPrompt]:
    """Turns of conversations that grow, under a few system prompts, one turn of any after the other."""
    choose, open_ones, made = random.Random(seed), list[list[str]](), list[LogPrompt]()
    while len(made) < count:
        if len(open_ones) < 24 or choose.random() < 0.1:
            open_ones.append([f"system {choose.randrange(4)} {at}" for at in range(choose.randrange(2, 6))])
            open_ones = open_ones[-48:]
        blocks = open_ones[min(choose.randrange(len(open_ones)), choose.randrange(len(open_ones)))]
        blocks += [f"{len(made)} {at}" for at in range(choose.randrange(1, 6))]
        made.append(LogPrompt(len(blocks) * UNIT + 5, blocks[:24], UNIT))
    return made


@pytest.mark.parametrize("blocks", [1, 20, 60, 150, 400])
def test_one_pass_has_the_hits_of_a_store_of_each_size(blocks: int) -> None:
    """As a cache of so many blocks has them that uses the blocks of a prompt from its last to its first."""
    seen, cache, expected = Reuse(), OrderedDict[object, None](), 0
    for prompt in conversations(300):
        seen.add(prompt)
        for block in prompt.blocks:
            if block not in cache:
                break
            expected += UNIT
        for block in reversed(prompt.blocks):
            cache[block] = None
            cache.move_to_end(block)
            while len(cache) > blocks:
                cache.popitem(last=False)
    assert seen.found(blocks * UNIT) == expected


def test_prompts_are_read_from_the_logs_of_three_systems() -> None:
    """Names of blocks as the log has them, or vLLM's own hashes of token ids, which are those of our keys."""
    ids = list(range(40))
    lines = [
        "a line of another kind",
        json.dumps({"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]}),
        json.dumps({"input_length": 70, "hash_ids": [7], "block_size": 64}),
        json.dumps({"seq_len": 600, "chunk_size": 256, "chunk_hashes": ["0xa", "0xb"], "model_name": "m"}),
        f"DEBUG 11-29 Request cmpl-1 details: prompt: 'x', prompt_token_ids: {ids}, prompt_embeds shape: None.",
        json.dumps({"prompt": ids}),
    ]
    hashed = LogPrompt(40, [*block_digests(ids, 16)], 16)
    assert len(hashed.blocks) == 2
    assert [*prompts(lines, 16)] == [
        *(LogPrompt(1100, [7, 8], 512), LogPrompt(70, [7], 64), LogPrompt(600, ["0xa", "0xb"], 256), hashed, hashed)
    ]
    with pytest.raises(ConfigError, match="line 1 of the trace is no prompt: KeyError"):
        [*prompts(['{"hash_ids": [1]}'], 16)]


@pytest.mark.vllm
def test_the_names_of_blocks_are_vllm_s_own() -> None:
    from kvprefetch.connector.attach.hellos import start_and_probe
    from kvprefetch.kv.hashing import START

    start, _ = start_and_probe("sha256")
    assert bytes.fromhex(start) == hashlib.sha256(pickle.dumps(START, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def test_the_command_prints_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond the engine's own cache, in seconds of computing without those of the fetch; a bar for each size."""
    trace = tmp_path / "trace.jsonl"
    line = {"input_length": 1025, "hash_ids": [1, 2]}
    trace.write_text("\n".join(json.dumps(line) for _ in range(4)))
    command = ["estimate", str(trace), "--token-bytes", "1024", "--prefill", "1000", "--plot"]
    assert main([*command, "--size", "512KiB", "--size", "2MiB"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "4 prompts, 4100 tokens; all of their KV: 1.1 MiB",
        "STORE    HIT   SAVED",
        "512 KiB  0 %   0.00 s",
        f"2 MiB    75 %  3.07 s  {'█' * 37}",
    ]
    assert main([*command, "--local", "2MiB", "--size", "2MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"][0]["saved_s"] == 0
    trace.write_text("nothing\n")
    assert main(command) == 78
    assert main(["estimate", str(tmp_path / "none"), "--token-bytes", "1"]) == 69


def replayed(made: Sequence[LogPrompt], memory: str, block_bytes: int) -> float:
    """Send the prompts through a real daemon and a real store of this size; return the part of blocks that it found."""
    with (
        Store(memory=memory, lease_ms=200) as store,
        Daemon(mooncake_config=store.config, staging="16MB", extra=("--lease-ms", "200")) as daemon,
    ):
        engine, sent = FakeEngine(daemon.socket, block_bytes=block_bytes), 0
        for number, prompt in enumerate(made):
            digests = [hashlib.sha256(str(block).encode()).digest() for block in prompt.blocks]
            engine.load(digests, name=f"r{number}")
            for start in range(0, len(digests), 8):
                part = digests[start : start + 8]
                engine.save({digest: digest * (block_bytes // 32) for digest in part}, save_id=sent + 1)
                sent += 1
            eventually(lambda: len(daemon.records("save.done")) >= sent, what="the saves")  # noqa: B023
        eventually(lambda: len(daemon.records("request.done")) >= len(made), what="the lines of the requests")
        engine.close()
        found = sum(line["found_blocks"] for line in daemon.records("request.done"))
        return found / sum(len(prompt.blocks) for prompt in made)


@pytest.mark.store
@pytest.mark.parametrize("mib", [32, *(pytest.param(each, marks=pytest.mark.stress) for each in (64, 128))])
def test_it_is_within_five_points_of_a_real_store(mib: int) -> None:
    made, block_bytes, seen = conversations(160), 256 << 10, Reuse()
    for prompt in made:
        seen.add(prompt)
    expected = seen.found((mib << 20) * FILLED / block_bytes * UNIT) / UNIT / sum(len(each.blocks) for each in made)
    measured = replayed(made, f"{mib << 20}", block_bytes)
    print(f"{mib} MiB: expected {expected:.3f}, measured {measured:.3f}")
    assert abs(measured - expected) < 0.05
