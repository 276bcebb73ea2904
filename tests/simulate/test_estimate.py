"""`kvprefetchd estimate` against the simulated engine, store and link."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulate.events import NS
from benchmarks.simulate.run import simulate
from benchmarks.simulate.waiting import POLICIES
from benchmarks.simulate.workload import fixed
from kvprefetch.daemon.cli.main import main
from tests.lab.checkpoint import PEERS, make_checkpoint
from tests.simulate.small import ENGINE, MEGABYTE, NODE, SMALL, run

TOLERANCE = 0.05  # docs/comparison.md names it
BLOCK_TOKENS, STORED, TAIL = 10, 40, 10  # a prompt has 40 blocks in the store, and 10 tokens more
MEMORY = replace(NODE.memory, latency_s=0.0002)
SCENARIO = replace(
    SMALL, engine=replace(ENGINE, copy_bytes_per_s=20e9), node=replace(NODE, memory=MEMORY, look_up_s=0.001)
)
OWN_S = ENGINE.step_s + TAIL / ENGINE.prefill_tokens_per_s  # of a request whose KV is there
# The ways of the command, and the policies of the simulation.
WAYS = {"local": "local", "kvprefetch": "wait", "on_demand": "no-prefetch", "recomputed": "recompute"}


def estimated(capsys: pytest.CaptureFixture[str], *options: object) -> dict[str, float]:
    """Return the times of the prompt, by way."""
    prompt = ("--token-bytes", MEGABYTE // BLOCK_TOKENS, "--tokens", STORED * BLOCK_TOKENS)
    link = ("--link", MEMORY.bytes_per_s * 8 / 1e9, "--prefill", ENGINE.prefill_tokens_per_s)
    assert main(["estimate", *map(str, (*prompt, *link, *options)), "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)["times_s"]
    return found


def last_ttft_s(policy: str, outputs: int) -> float:
    """Return the time to first token of the prompt, behind two requests that hold both places."""
    requests = [(100, 0, outputs), (100, 0, outputs), (STORED * BLOCK_TOKENS + TAIL, STORED, 1)]
    return run(policy, requests, [0.0, 0.0, 0.3], SCENARIO).ttft_ns[0][-1] / NS


@pytest.mark.parametrize("outputs", [20, 40, 60, 200])
@pytest.mark.parametrize("way", WAYS)
def test_the_ways_differ_as_in_the_simulation(way: str, outputs: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The wait for a place is shorter than the fetch, as long, or longer."""
    wait_s = last_ttft_s("local", outputs) - OWN_S
    expected_s = estimated(capsys, "--waiting", 1, "--service", wait_s)[way] + OWN_S
    assert last_ttft_s(WAYS[way], outputs) == pytest.approx(expected_s, rel=TOLERANCE)


@pytest.mark.parametrize("outstanding", [4, 8, 16])
def test_the_wait_is_that_of_a_simulated_queue(outstanding: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A closed loop: two requests run, and the others wait."""
    outputs, count = 50, 60
    lengths = [(STORED * BLOCK_TOKENS + TAIL, STORED, outputs)] * count
    requests = fixed(lengths, [0.0] * count, BLOCK_TOKENS)
    result = simulate(SCENARIO, POLICIES["local"], requests=requests, outstanding=outstanding)
    service_s = OWN_S + (outputs - 1) * (ENGINE.step_s + 2 * ENGINE.sequence_s)
    queue = ("--waiting", outstanding - 2, "--running", 2, "--service", service_s)
    expected_s = estimated(capsys, *queue)["local"] + OWN_S
    assert statistics.median(result.ttft_ns[0]) / NS == pytest.approx(expected_s, rel=TOLERANCE)


def test_the_model_says_the_bytes_of_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path, PEERS)
    assert main(["estimate", "--model", str(model), "--tokens", "1000", "--link", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 1000 * PEERS.kv_bytes_per_token
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}'
    )
    assert main(["estimate", "--model", str(tmp_path), "--tokens", "1", "--link", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 61 * 576 * 2


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ("", 78, "name one of --model and --token-bytes"),
        ("--model /nonexistent", 69, "/nonexistent/config.json: cannot be read: No such file or directory; name"),
        ("--token-bytes 0", 78, "0 is not in the range x>=1"),
        ("--token-bytes 1 --link 0", 78, "0.0 is not in the range x>0"),
    ],
)
def test_bad_input_is_one_line(options: str, status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--tokens", "1", "--link", "1", *options.split()]) == status
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
