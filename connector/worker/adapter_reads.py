"""What this rank reads of LoRA adapters: a digest of each one's whole content, at each read.

vLLM reads an adapter when a step first needs it, gives it up for others, reads it again, and replaces it
(`load_inplace`).  It tells nobody, so the function that reads is wrapped.  It returns the tensors as they are in the
file, before they are scaled and cut into the ranks' shards.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..identity.adapters import DIGEST_BYTES, of_rank
from ..words.metadata import AdapterRead

# How vLLM takes an adapter; what else of its configuration decides shows in the modules and in the tensors' types.
_OPTIONS = ("enable_mixed_moe_lora_format", "enable_moe_shared_loras", "enable_tower_connector_lora")
_THREADS = 4  # hashing releases the interpreter's lock

log = logging.getLogger("vllm.kvprefetch.worker")


class AdapterReads:
    """The adapters that one rank has read since its start. `manager`: vLLM's WorkerLoRAManager."""

    def __init__(self, manager: Any, rank: int) -> None:
        self._manager, self._rank = manager, rank
        self._last: dict[int, AdapterRead] = {}
        self._new: list[AdapterRead] = []
        manager._load_adapter = self._load

    @classmethod
    def of(cls, worker: Any, rank: int) -> AdapterReads | None:
        """The reads of a worker's adapters from now on; None where they cannot be seen."""
        manager = getattr(getattr(worker, "model_runner", None), "lora_manager", None)
        if manager is not None:
            return cls(manager, rank)
        log.warning("kvprefetch: KV of adapters is not shared: vLLM's LoRA manager was not found: rank=%d", rank)
        return None

    def _load(self, request: Any) -> Any:
        # Looked up in each call, as a trainer may have replaced the class's function.
        adapter = type(self._manager)._load_adapter(self._manager, request)
        content, failed = b"", None
        try:
            content = _content(adapter, self._manager._adapter_manager)
        except Exception as error:
            failed = error
        read = AdapterRead(request.adapter_id, request.name, request.path, content)
        if self._last.get(read.number) != read:
            self._last[read.number] = read
            self._new.append(read)
            if failed is not None:
                text = "kvprefetch: KV of adapter %r is not shared: its content is not understood: %s"
                log.warning(text, read.name, failed)
        return adapter

    def take(self) -> list[AdapterRead]:
        """Return the reads since the last call, without those that found what the one before found."""
        new, self._new = self._new, []
        return new

    def has(self, number: int, content: bytes, *, loaded: bool) -> bool:
        """Whether this rank's adapter is the one whose KV is to be loaded. `loaded`: and vLLM has it in memory now.

        Without `loaded`: this step has just read it, or needed no read.
        """
        last = self._last.get(number)
        if last is None or not last.content or last.content != of_rank(content, self._rank):
            return False
        return not loaded or number in self._manager.list_adapters()


def _content(adapter: Any, manager: Any) -> bytes:
    """Return two digests: of what all ranks must have in common, and of what is this rank's.

    The rank's own: to which modules of its layers vLLM applies adapters (`lora_target_modules`, towers, formats), and
    with expert parallelism its experts' weights, as no other rank reads those.  `manager`: vLLM's LoRAModelManager.
    """
    modules = dict(adapter.loras)
    kinds = {name: type(module).__name__ for name, module in manager.modules.items()}
    own: dict[str, Any] = {name: kind.replace("WithSharded", "With") for name, kind in kinds.items()}
    own.update({name: getattr(manager.lora_config, name, None) for name in _OPTIONS})
    if getattr(manager, "moe_ep_load_spec", None) is not None:
        own.update({f"weights {name}": modules.pop(name) for name in [*modules] if ".experts" in name})
    rest = {name: value for name, value in vars(adapter).items() if name not in ("id", "loras")}
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(_digest, [*modules.values(), rest, own])
        *weights, others, mine = found
    return _digest([*(part for each in sorted(zip(modules, weights, strict=True)) for part in each), others]) + mine


def _digest(value: Any) -> bytes:
    """Return the digest of a value and all in it. Raises TypeError for one of a kind that is not known.

    What is empty or off is left out, so that a field that only later releases of vLLM have makes no difference.
    """
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy()
        return _hash(b"tensor", repr((str(whole.dtype), tuple(whole.shape))).encode(), data)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return _hash(b"value", repr(value).encode())
    if isinstance(value, list | tuple):
        return _hash(b"list", *map(_digest, value))
    if not isinstance(value, dict):
        if callable(value) or not hasattr(value, "__dict__"):
            raise TypeError(f"unknown: {type(value).__name__}")
        value = vars(value)
    parts: Iterable[tuple[str, Any]] = ((str(name), each) for name, each in sorted(value.items()) if not _is_off(each))
    return _hash(b"fields", *(_digest(part) for each in parts for part in each))


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, dict | list | tuple | str) and not value)


def _hash(kind: bytes, *parts: Any) -> bytes:
    """Hash parts, each with its length: no two lists of parts are the same bytes."""
    found = hashlib.blake2b(kind, digest_size=DIGEST_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()
