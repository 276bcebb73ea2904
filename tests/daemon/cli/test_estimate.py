"""`kvprefetchd estimate` without a trace: its times by hand, its wait beside a queue, the bytes of a model's token."""

from __future__ import annotations

import heapq
import json
import statistics
from pathlib import Path

import pytest

from kvprefetch.daemon.cli.main import main
from tests.lab.checkpoint import PEERS, make_checkpoint

MEGABYTE = 1_000_000
PROMPT = ("--token-bytes", MEGABYTE // 10, "--tokens", 400, "--link", 0.8, "--prefill", 1000)
FETCH_S, RECOMPUTE_S = 0.4, 0.4


def estimated(capsys: pytest.CaptureFixture[str], *options: object) -> dict[str, float]:
    """Return the times of a prompt, by way."""
    assert main(["estimate", *map(str, (*PROMPT, *options)), "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)["times_s"]
    return found


@pytest.mark.parametrize("wait_s", [0.0, 0.1, FETCH_S, 2.0])
def test_only_arrival_hides_the_fetch_behind_the_wait(wait_s: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert estimated(capsys, "--waiting", 1, "--service", wait_s) == pytest.approx(
        {
            "local": wait_s,
            "kvprefetch": max(wait_s, FETCH_S),
            "on_demand": wait_s + FETCH_S,
            "recomputed": wait_s + RECOMPUTE_S,
        }
    )


@pytest.mark.parametrize("outstanding", [4, 8, 16])
def test_the_wait_is_that_of_a_queue(outstanding: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A closed loop: two places, and a request that ends is followed by the next one."""
    service_s, places, ends, waits = 0.5, [0.0, 0.25], list[float](), list[float]()
    for number in range(200):
        came_s = ends[number - outstanding] if number >= outstanding else 0.0
        begin_s = max(came_s, heapq.heappop(places))
        waits.append(begin_s - came_s)
        ends.append(begin_s + service_s)
        heapq.heappush(places, ends[-1])
    queue = ("--waiting", outstanding - 2, "--running", 2, "--service", service_s)
    assert estimated(capsys, *queue)["local"] == pytest.approx(statistics.median(waits))


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
