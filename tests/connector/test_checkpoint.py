"""Digests of a model's files: which changes are seen, and what is refused instead of being left out."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprefetch.connector.identity import checkpoint
from kvprefetch.connector.identity.checkpoint import MIB, PAGE_BYTES, TENSOR_STRIDE_BYTES, sample
from tests.support.waiting import eventually


def write_tensors(path: Path, sizes: Mapping[str, int], header: Mapping[str, Any] | None = None) -> int:
    """A safetensors file of zeros with tensors of so many bytes, in this order; the offset at which they begin."""
    at, entries = 0, dict(header or {})
    for name, size in sizes.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + at)
    return 8 + len(text)


def changed(path: Path, at: int) -> str:
    """The digest with one byte of the file changed, which is changed back."""
    with path.open("r+b") as file:
        for flip in (1, 0):
            file.seek(at)
            file.write(bytes([flip]))
            file.flush()
            if flip:
                found = sample([path])
    return found


# An FP8 checkpoint's kinds of tensors: scales of one number, biases, norms, and matrices.
SIZES = {
    "embed": 40 * MIB,
    "k_proj": 3 * MIB,
    "k_bias": 2048,
    "k_scale": 4,
    "norm": 8192,
    "v_scale": 4,
    "almost": MIB - 1,
    "head": 2 * TENSOR_STRIDE_BYTES,
}


def test_every_byte_of_a_small_tensor_counts_and_of_a_large_one_pages_all_over_it(tmp_path: Path) -> None:
    """FP8 KV scales, biases and norms: none is too small to be seen."""
    path = tmp_path / "model.safetensors"
    begin = write_tensors(path, SIZES)
    before = sample([path])
    for name, size in SIZES.items():
        last = size - PAGE_BYTES
        read = {0, size // 3, size - 1} if size < MIB else {*range(0, last, TENSOR_STRIDE_BYTES), last, size - 1}
        for at in read:
            assert changed(path, begin + at) != before, name
        begin += size
    assert sample([path]) == before
    assert changed(path, begin - SIZES["head"] + 2 * PAGE_BYTES) == before, "the rest of it is not read"


def test_names_shapes_and_metadata_count(tmp_path: Path) -> None:
    path, found = tmp_path / "model.safetensors", set()
    for sizes, header in (
        ({"a": 8, "b": 8}, None),
        ({"b": 8, "a": 8}, None),
        ({"a": 16}, None),
        ({"a": 8, "b": 8}, {"__metadata__": {"a": "int4"}}),
    ):
        write_tensors(path, sizes, header)
        found.add(sample([path]))
    assert len(found) == 4


BAD = [
    ("file ends too early", b"\x10\0\0"),
    ("header does not fit: header_bytes=18446744073709551615 max=8", b"\xff" * 16),
    ("header is not JSON", struct.pack("<Q", 2) + b"{]"),
    ("header is not JSON", struct.pack("<Q", 200_000) + b"[" * 200_000),
    ("header is not a JSON object", struct.pack("<Q", 2) + b"[]"),
    ("tensor has no data_offsets: tensor='a'", struct.pack("<Q", 8) + b'{"a": 1}'),
    ("tensors do not fill the file: .*expected=0", struct.pack("<Q", 31) + b'{"a": {"data_offsets": [1, 2]}}ab'),
    ("tensors do not fill the file: .*expected=0", struct.pack("<Q", 31) + b'{"a": {"data_offsets": [0, 9]}}ab'),
    ("tensors do not fill the file: .*expected=0", struct.pack("<Q", 32) + b'{"a": {"data_offsets": [0, -1]}}'),
    ("tensors do not fill the file: end=", struct.pack("<Q", 31) + b'{"a": {"data_offsets": [0, 1]}}ab'),
]


@pytest.mark.parametrize(("error", "content"), BAD)
def test_a_file_that_says_what_cannot_be_is_an_error_in_one_line(tmp_path: Path, error: str, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^model.safetensors: {error}") as caught:
        sample([path])
    assert "\n" not in str(caught.value)


def test_of_other_files_small_ones_count_whole(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    content = os.urandom(3 * PAGE_BYTES + 17)
    found = set()
    for at in range(0, len(content), 97):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found.add(sample([file]))
    assert len(found) == len(range(0, len(content), 97))


def test_of_torchs_files_every_tensor_counts(tmp_path: Path) -> None:
    """Also where no page of it is read: the file ends with a checksum of each."""
    file = tmp_path / "pytorch_model.bin"
    tensors = {f"layer{n}": torch.zeros(5 * MIB, dtype=torch.uint8) for n in range(5)}
    torch.save(tensors, file)
    before = sample([file])
    torch.save(tensors, file)
    assert sample([file]) == before
    tensors["layer2"][MIB + 5 * PAGE_BYTES] = 1
    torch.save(tensors, file)
    assert sample([file]) != before


# --- which files ------------------------------------------------------------------------------------------------------


def weights(folder: Path, load_format: str = "auto") -> str:
    return checkpoint.weights([folder], load_format)


def test_the_files_are_at_least_those_that_are_loaded(tmp_path: Path) -> None:
    def differs(name: str, load_format: str = "auto") -> bool:
        """Whether this file's content makes a difference; it stays."""
        found = set()
        for size in (8, 16):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            if name.endswith(".safetensors"):
                write_tensors(tmp_path / name, {"a": size})
            else:
                (tmp_path / name).write_bytes(b"x" * size)
            found.add(weights(tmp_path, load_format))
        return len(found) == 2

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "vision").symlink_to(tmp_path / "elsewhere")
    tmp_path /= "model"
    assert differs("vision/model.safetensors"), "behind a link"
    assert differs("tower/model.safetensors"), "some models name a subfolder"
    assert differs("pytorch_model.bin")
    assert differs("model.pt")
    assert differs("model.safetensors")
    assert differs("consolidated.safetensors"), "which vLLM prefers"
    assert differs("model.safetensors.index.json"), "which chooses of them"
    assert not differs("pytorch_model.bin"), "safetensors are there"
    assert differs("pytorch_model.bin", "npcache")
    assert differs("model.pt", "pt")
    assert not differs("README.md")


@pytest.mark.parametrize("load_format", ["dummy", "sharded_state", "runai_streamer", "tensorizer", "made-up"])
def test_weights_that_are_no_files_of_the_folder_are_an_error(tmp_path: Path, load_format: str) -> None:
    write_tensors(tmp_path / "model.safetensors", {"a": 8})
    with pytest.raises(ValueError, match=f"not files of the model's folder: load_format={load_format}"):
        weights(tmp_path, load_format)


def test_where_there_is_nothing_to_read_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no weights to read: load_format=auto"):
        weights(tmp_path)
    with pytest.raises(ValueError, match=r"there is no configuration to read: expected=config\.json or params\.json"):
        checkpoint.configuration([tmp_path], checkpoint.CONFIGURATION)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="Expecting property name"):
        checkpoint.configuration([tmp_path], checkpoint.CONFIGURATION)


def test_where_a_configuration_is_from_makes_no_difference(tmp_path: Path) -> None:
    def content(folder: str, **fields: Any) -> dict[str, Any]:
        (tmp_path / folder).mkdir()
        inner = {"model_type": "llama", "hidden_size": 64, **fields.pop("inner", {})}
        (tmp_path / folder / "config.json").write_text(
            json.dumps({"rms_norm_eps": 1e-6, "text_config": inner, **fields})
        )
        return checkpoint.configuration([tmp_path / folder], checkpoint.CONFIGURATION)

    one = content("one", _name_or_path="/a", transformers_version="4", torch_dtype="float16")
    assert one == content("two", _name_or_path="/b", transformers_version="5", dtype="bfloat16", use_cache=False)
    assert one == content("three", inner={"_name_or_path": "/b", "torch_dtype": "float16"})
    assert one != content("four", rms_norm_eps=1e-5)
    assert one != content("five", inner={"hidden_size": 128})
    assert one != content("six", quantization_config={"dtype": "int4"})


def test_all_code_counts_by_its_name_and_content(tmp_path: Path) -> None:
    assert checkpoint.code([tmp_path]) == ""
    found = set()
    for name, text in (("modeling_a.py", "1"), ("modeling_a.py", "2"), ("parts/modeling_b.py", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        found.add(checkpoint.code([tmp_path]))
    (tmp_path / "modeling_a.py").rename(tmp_path / "modeling_c.py")
    found.add(checkpoint.code([tmp_path]))
    assert len(found) == 4


def test_other_repositories_that_code_is_from_are_named() -> None:
    config = {"auto_map": {"AutoConfig": "org/repo--configuration_x.X", "AutoModel": "modeling_x.X"}}
    assert checkpoint.repositories({"config.json": config}) == ["org/repo"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache of one model, with a snapshot "a" that `main` names."""
    pytest.importorskip("vllm")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache = tmp_path / "models--someone--a-model"
    (cache / "refs").mkdir(parents=True)
    named(cache, "a")
    return cache


def named(cache: Path, commit: str) -> Path:
    """Let `main` name this snapshot, as a download does; return it."""
    snapshot = cache / "snapshots" / (commit * 40)
    snapshot.mkdir(parents=True)
    write_tensors(snapshot / "model.safetensors", {commit: 64})
    (cache / "refs" / "main").write_text(snapshot.name)
    return snapshot


def test_a_name_that_moved_since_the_engine_began_is_an_error(hub: Path) -> None:
    """The weights may be those of the snapshot before; the engine's own first download has none before it."""
    first = checkpoint.folder("someone/a-model", None, str(hub.parent))
    checkpoint.check_unchanged(first, time.time_ns())
    checkpoint.check_unchanged(first, 0)
    second = named(hub, "b")
    assert checkpoint.folder("someone/a-model", None, str(hub.parent)) == second
    with pytest.raises(Exception, match=r"someone/another|cached snapshot"):
        checkpoint.folder("someone/another", None, str(hub.parent))
    with pytest.raises(ValueError, match=r"changed after the engine began to load the model.*refs/main"):
        checkpoint.check_unchanged(second, first.stat().st_ctime_ns - 1)
    checkpoint.check_unchanged(second, time.time_ns())
    checkpoint.check_unchanged(first, 0)  # by its commit: nothing names it any more


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "part/modeling.py"])
def test_a_file_that_changed_since_the_engine_began_is_an_error(tmp_path: Path, name: str) -> None:
    """Written to, or replaced by another one, as of an older date."""
    (tmp_path / "part").mkdir()
    (tmp_path / name).write_text("1")
    eventually(lambda: time.time_ns() > (tmp_path / name).stat().st_ctime_ns, what="a later time")
    since_ns = time.time_ns()
    (tmp_path / "notes.txt").write_text("no part of the model")
    checkpoint.check_unchanged(tmp_path, since_ns)
    other = tmp_path / "other"
    other.write_text("2")
    os.utime(other, (0, 0))
    eventually(lambda: time.time_ns() > since_ns + 20_000_000, what="a tick of the file system's clock")
    other.replace(tmp_path / name)
    with pytest.raises(ValueError, match=f"start the engine anew: file=.*{name}"):
        checkpoint.check_unchanged(tmp_path, since_ns)
