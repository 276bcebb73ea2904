"""How long an engine's start reads the files of a large model for its fingerprint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvprefetch.connector.identity import checkpoint, fingerprint
from tests.connector.test_checkpoint import write_tensors
from tests.connector.test_identity import configured
from tests.lab.checkpoint import TINY, make_checkpoint

LAYERS, HIDDEN, KEYS, INNER, VOCABULARY = 80, 8192, 1024, 28672, 128256
FILE_BYTES = 46 * 10**8


def tensors() -> Iterator[tuple[str, int]]:
    """Names and bytes of a model of 70B parameters in bfloat16: Llama 3's."""
    yield "embed", 2 * VOCABULARY * HIDDEN
    widths = {"q": HIDDEN, "k": KEYS, "v": KEYS, "o": HIDDEN, "gate": INNER, "up": INNER, "down": INNER, "norm": 1}
    for layer in range(LAYERS):
        yield from ((f"layers.{layer}.{name}", 2 * width * HIDDEN) for name, width in widths.items())
        yield f"layers.{layer}.post_norm", 2 * HIDDEN
    yield from (("norm", 2 * HIDDEN), ("head", 2 * VOCABULARY * HIDDEN))


def write_large(folder: Path) -> None:
    """Put sparse files of that model in the place of this one's weights."""
    (folder / "model.safetensors").unlink()
    files: list[dict[str, int]] = [{}]
    for name, size in tensors():
        if sum(files[-1].values()) > FILE_BYTES:
            files.append({})
        files[-1][name] = size
    for at, each in enumerate(files):
        write_tensors(folder / f"model-{at:05}.safetensors", each)


@pytest.mark.stress
def test_a_start_reads_little_but_the_weights(tmp_path: Path) -> None:
    """All else that the fingerprint has adds at most a fifth to the time for the weights. Best of ten, in CPU time."""
    model = make_checkpoint(tmp_path / "model", TINY)
    config = configured(model)
    write_large(model)

    def best(call: Callable[[], object]) -> float:
        found = []
        for _ in range(10):
            begin = time.thread_time()
            call()
            found.append(time.thread_time() - begin)
        return min(found)

    weights = best(lambda: checkpoint.weights([model], "auto"))
    whole = best(lambda: fingerprint.of_model(config))
    assert whole <= 1.2 * weights, f"ms: weights={weights * 1e3:.1f} all={whole * 1e3:.1f}"
