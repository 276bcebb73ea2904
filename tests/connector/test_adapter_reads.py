"""What a rank reads of its adapters, with vLLM's own loader and its files: the content, at each read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import huggingface_hub.constants
import torch
from safetensors.torch import save_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from kvprefetch.connector.identity.adapters import Adapters
from kvprefetch.connector.words.metadata import KVPrefetchWorkerMeta
from kvprefetch.connector.worker.adapter_reads import AdapterReads

from .fakes import BLOCK, Request

MODULES = ["k_proj", "v_proj"]
BASE = "base_model.model.model.layers.0.self_attn"


def write(path: Path, seed: int, *, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    made = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in MODULES:
        tensors[f"{BASE}.{module}.lora_A.weight"] = torch.randn(8, 16, generator=made).to(dtype)
        tensors[f"{BASE}.{module}.lora_B.weight"] = torch.randn(4, 8, generator=made).to(dtype)
    save_file(tensors, str(path / "adapter_model.safetensors"))
    made_for = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": MODULES, "bias": "none", **config}
    (path / "adapter_config.json").write_text(json.dumps(made_for))
    return path


class Modules(LRUCacheLoRAModelManager):
    """vLLM's LoRAModelManager, without a model: which modules have adapters, and two in memory."""

    capacity = 2

    def __init__(self, *modules: str) -> None:
        self.lora_config: Any = SimpleNamespace(enable_moe_shared_loras=False)
        self.supported_lora_modules = MODULES
        self.packed_modules_mapping: dict[str, list[str]] = {}
        self.moe_ep_load_spec: Any = None
        self.model: Any = None
        self._classification_head = None  # of vLLM 0.33
        self.modules = {name: torch.nn.Identity() for name in modules}
        self.loaded: dict[int, LoRAModel] = {}

    def __len__(self) -> int:
        return len(self.loaded)

    def _validate_moe_lora_format(self, adapter: Any) -> None: ...
    def _validate_modules_to_save(self, adapter: Any) -> None: ...
    def _validate_token_classification_lora(self, adapter: Any) -> None: ...
    def activate_adapter(self, number: int) -> None: ...
    def get_adapter(self, number: int) -> Any:
        return self.loaded.get(number)

    def list_adapters(self) -> dict[int, LoRAModel]:
        return self.loaded

    def add_adapter(self, adapter: LoRAModel) -> bool:
        for each in adapter.loras.values():
            each.optimize()  # scales in place, as the real one does
        self.loaded[adapter.id] = adapter
        return True

    def remove_adapter(self, number: int) -> bool:
        return self.loaded.pop(number, None) is not None

    def remove_oldest_adapter(self) -> None:
        self.remove_adapter(next(iter(self.loaded)))


class Manager(LRUCacheWorkerLoRAManager):
    """vLLM's manager of a worker, with that one."""

    def __init__(self, loader: Any, dtype: torch.dtype | None, modules: Modules) -> None:
        self._lora_model_cls, self._adapter_manager = loader, modules
        self.vocab_size, self.max_position_embeddings = 64, 4096
        self.lora_config: Any = SimpleNamespace(max_lora_rank=8, lora_dtype=dtype)


class Rank:
    """A rank with adapters, and what is seen of them."""

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        modules: tuple[str, ...] = ("qkv_proj",),
        loader: Any = LoRAModel,
        experts: object = None,
        shared: bool = False,
    ) -> None:
        made = Modules(*modules)
        made.lora_config.enable_moe_shared_loras = shared
        made.moe_ep_load_spec = experts
        self.manager: Any = Manager(loader, dtype, made)
        worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=self.manager))
        reads = AdapterReads.of(worker, 0)
        assert reads is not None
        self.reads = reads

    def read(self, path: Path | str, number: int = 1, **options: Any) -> bytes:
        """The step's requests need this adapter. Return what the rank reports of it, if it was read and is new."""
        self.manager.add_adapter(LoRARequest("sql", number, str(path), **options))
        found = [each.content for each in self.reads.take()]
        return found[0] if found else b""


def names(path: Path | str, rank: Rank) -> list[bytes]:
    """What the blocks of a request are called in an engine of one rank, whose vLLM hashes name and path only."""
    adapters = Adapters(1)
    adapter = LoRARequest("sql", 1, "/hashed/path")
    rank.manager.add_adapter(LoRARequest("sql", 1, str(path)))
    reads = [read._replace(path=adapter.path) for read in rank.reads.take()]
    adapters.read(KVPrefetchWorkerMeta(adapters={0: reads}).adapters)
    request: Any = Request("r", 3 * BLOCK, salt="equal")
    request.lora_request = adapter
    found = adapters.names(request)
    assert found is not None
    return found.up_to_date()


@contextlib.contextmanager
def inside(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.chdir(path)
        yield


def test_an_adapter_is_the_same_in_each_engine_and_start(tmp_path: Path) -> None:
    """Wherever its files are; in memory it is scaled and cut, the digest is of what was in the file."""
    one, copy = write(tmp_path / "one", 1), write(tmp_path / "copy", 1)
    assert names(one, Rank()) == names(one, Rank()) == names(copy, Rank())


def test_contents_with_one_hash_have_other_names(tmp_path: Path) -> None:
    """Replaced at its path, which is also: one path on two nodes."""
    path = tmp_path / "sql"
    found = [names(write(path, seed), Rank()) for seed in (1, 2)]
    found.append(names(write(path, 1, lora_alpha=32), Rank()))
    found.append(names(write(path, 1, use_rslora=True), Rank()))
    if hasattr(PEFTHelper, "_match_pattern"):  # 0.31 scales all modules alike, whatever the file says
        found.append(names(write(path, 1, alpha_pattern={"v_proj": 4}), Rank()))
    assert len({name for each in found for name in each}) == len(found) * 3


def test_a_relative_path_names_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed, place in enumerate((tmp_path / "a", tmp_path / "b")):
        write(place / "adapters" / "sql", seed)
        with inside(place, monkeypatch):
            found.append(names("adapters/sql", Rank()))
    assert not set(found[0]) & set(found[1])


def test_a_name_on_the_hub_names_what_its_main_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--team--sql"
    (repository / "refs").mkdir(parents=True)
    found = []
    for seed, commit in enumerate(("1" * 40, "2" * 40)):
        write(repository / "snapshots" / commit, seed)
        (repository / "refs" / "main").write_text(commit)
        found.append(names("team/sql", Rank()))
    assert not set(found[0]) & set(found[1])


def test_what_is_applied_counts(tmp_path: Path) -> None:
    """`--lora-target-modules` and towers decide which modules have adapters, `--lora-dtype` how values are rounded."""
    path = write(tmp_path / "sql", 1)
    found = [
        names(path, Rank()),
        names(path, Rank(modules=("o_proj",))),
        names(path, Rank(modules=("qkv_proj", "visual.proj"))),
        names(path, Rank(dtype=torch.bfloat16)),
        names(path, Rank(shared=True)),
    ]
    assert len({name for each in found for name in each}) == 5 * 3


def test_each_read_is_seen_and_told_where_it_is_new(tmp_path: Path) -> None:
    """Loaded lazily, given up for others and read again, replaced in place."""
    rank, path, other = Rank(), write(tmp_path / "sql", 1), write(tmp_path / "other", 5)
    first = rank.read(path)
    assert len(first) == 64
    write(path, 2)
    assert rank.read(path) == b"", "it is in memory still"
    assert rank.reads.has(1, first, loaded=True)
    for number in (2, 3):
        rank.read(other, number)
    assert rank.reads.has(1, first, loaded=False), "as it was last read"
    assert not rank.reads.has(1, first, loaded=True), "and not in memory"
    second = rank.read(path)
    assert second not in (b"", first)
    assert not rank.reads.has(1, first, loaded=False)
    assert rank.read(path, load_inplace=True) == b"", "read again, with nothing new"
    write(path, 1)
    assert rank.read(path, load_inplace=True) == first


def test_a_content_that_is_not_understood_is_no_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM goes on with its adapter, whatever is in it."""

    class Odd(LoRAModel):
        @classmethod
        def from_local_checkpoint(cls, *args: Any, **options: Any) -> LoRAModel:
            adapter = LoRAModel.from_local_checkpoint(*args, **options)
            adapter.odd = object()  # type: ignore[attr-defined]
            return adapter

    rank = Rank(loader=Odd)
    assert rank.read(write(tmp_path / "sql", 1)) == b""
    assert 1 in rank.manager.list_adapters()
    assert not rank.reads.has(1, b"", loaded=False)
    assert "not shared" in caplog.text


def test_experts_of_other_ranks_are_not_missed(tmp_path: Path) -> None:
    """With expert parallelism each rank reads its own experts: they are in its part, and all ranks agree."""
    contents = []
    for expert in (0, 1):
        adapter = LoRAModel.from_local_checkpoint(
            str(write(tmp_path / "sql", 1)), set(MODULES), peft_helper=helper(tmp_path / "sql"), lora_model_id=1,
            device="cpu",
        )  # fmt: skip
        (mine,) = [each for name, each in adapter.loras.items() if name.endswith("k_proj")]
        adapter.loras[f"model.layers.0.mlp.experts.{expert}.gate_proj"] = mine
        loader = SimpleNamespace(from_local_checkpoint=lambda *args, made=adapter, **options: made)
        contents.append(Rank(loader=loader, experts=object()).read(tmp_path / "sql"))
    assert contents[0][:32] == contents[1][:32]
    assert contents[0][32:] != contents[1][32:]


def helper(path: Path) -> Any:
    from vllm.lora.peft_helper import PEFTHelper

    return PEFTHelper.from_local_dir(str(path), 4096)


def test_a_worker_without_a_lora_manager_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert AdapterReads.of(None, 3) is None
    assert "rank=3" in caplog.text
