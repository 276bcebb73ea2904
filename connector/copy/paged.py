"""The engine's paged KV cache as blocks of bytes, copied from and to staging slots in upstream's value order.

A block's value is the concatenation, over the layers in `register_kv_caches` order, of the block's raw bytes in that
layer, exactly as vLLM's MooncakeStoreConnector writes them.  The strides say where these bytes lie:

    LBHNC, LBNHC   one segment per layer
    BLHNC, BLNHC   one segment: the whole block
    LHBNC          one segment per layer and head
    BHLNC          refused: upstream's value overlaps other blocks there

With several KV groups layers of unlike groups lie in the same memory, and a block id stands for the same bytes of it in
each group: one group's use of a block owns them all.  So a block's value does not depend on its group, as in upstream's
worker; where a group has fewer layers than others, the value has bytes that mean nothing.

Segments at a constant distance form one piece, a 3-D view [block, segment, byte].  On the CPU the C extension copies
them, all in one call.  On a device torch copies block by block, on the current stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Rows = npt.NDArray[np.uint8]


class LayoutUnsupported(ValueError):
    """The paged cache's memory cannot be read as blocks; the text says why in one line."""


class Piece(NamedTuple):
    """Segments of equal length at equal distance; in a block's value they follow each other.

    `stride` and `distance`: bytes from one block, and from one segment, to the next.
    """

    address: int
    segments: int
    length: int
    stride: int
    distance: int


class PagedCache:
    """The paged KV cache of one rank: `layers`, of all groups, of the `kv_caches` given to register_kv_caches.

    `layout` names the dimensions of a block as they lie in memory, the outermost first, each with its length.
    `places`: of each layer, the stretches of a block's value that hold its own bytes, as (offset, bytes).
    """

    def __init__(self, kv_caches: Mapping[str, Any], layers: Sequence[str], num_blocks: int) -> None:
        """Find the segments. Raises LayoutUnsupported."""
        wanted = set(layers)
        if missing := sorted(wanted - set(kv_caches)):
            raise LayoutUnsupported(f"layer has no KV cache: layer={missing[0]!r}")
        named = {name: _grouped(name, cache, num_blocks) for name, cache in kv_caches.items() if name in wanted}
        if not (tensors := [*named.values()]):
            raise LayoutUnsupported("there is no KV cache to serve: layers=0")
        self.num_blocks = num_blocks
        self.device = tensors[0].device
        base = tensors[0].untyped_storage()
        if any(tensor.untyped_storage().data_ptr() != base.data_ptr() for tensor in tensors):
            raise LayoutUnsupported("layers lie in more than one allocation")
        segments = _segments(tensors, num_blocks)
        self.layout = ";".join(sorted({_order(tensor) for tensor in tensors}))
        self.block_bytes = sum(length for _, length in segments)
        self.places = {name: _places(tensor, segments) for name, tensor in named.items()}
        raw = torch.empty(0, dtype=torch.uint8, device=self.device).set_(base)
        self._on_host = self.device.type == "cpu"
        memory = raw.numpy() if self._on_host else raw
        self.pieces, self._views = _pieces(segments), list[Any]()
        for piece in self.pieces:
            start = piece.address - base.data_ptr()
            if start + (num_blocks - 1) * piece.stride + (piece.segments - 1) * piece.distance + piece.length > len(
                raw
            ):
                raise LayoutUnsupported(f"blocks run past the allocation: num_blocks={num_blocks} bytes={len(raw)}")
            shape, strides = (num_blocks, piece.segments, piece.length), (piece.stride, piece.distance, 1)
            if self._on_host:
                self._views.append(np.lib.stride_tricks.as_strided(memory[start:], shape, strides))
            else:
                self._views.append(raw.as_strided(shape, strides, start))

    def load(self, rows: Rows, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy rows[slots[i]] into block block_ids[i]. On a device the copies are queued on the current stream."""
        for view, staged in self._pairs(rows):
            self._copy(staged, slots, view, block_ids)

    def save(self, rows: Rows, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy block block_ids[i] into rows[slots[i]]. On a device the copies are queued on the current stream."""
        for view, staged in self._pairs(rows):
            self._copy(view, block_ids, staged, slots)

    def _copy(self, source: Any, origins: Sequence[int], target: Any, places: Sequence[int]) -> None:
        if self._on_host:
            from ...shmring import _atomics  # the tests on a GPU do without it

            _atomics.copy(_addresses(target, places), _addresses(source, origins), target.shape[2])
            return
        for origin, place in zip(origins, places, strict=True):
            target[place].copy_(source[origin], non_blocking=True)

    def fence(self) -> Any:
        """Return a fence with a `query()` that is true once all queued copies are done; None when they are done."""
        if self._on_host:
            return None
        event = torch.Event(self.device)
        event.record()
        return event

    def _pairs(self, rows: Rows) -> list[tuple[Any, Any]]:
        pairs, offset = [], 0
        for view, piece in zip(self._views, self.pieces, strict=True):
            start, offset = offset, offset + piece.segments * piece.length
            staged = rows[:, start:offset].reshape(len(rows), piece.segments, piece.length)
            pairs.append((view, staged if self._on_host else torch.from_numpy(staged)))
        return pairs


def _addresses(view: Rows, blocks: Sequence[int]) -> bytes:
    """Return the address of each segment of these blocks, one block after the other."""
    stride, distance, _ = view.strides
    starts = view.ctypes.data + np.asarray(blocks, np.int64)[:, np.newaxis] * stride
    return (starts + np.arange(view.shape[1]) * distance).tobytes()


def _grouped(name: str, cache: Any, num_blocks: int) -> Any:
    """The layer's tensor with manager blocks as its first dimension (kernel blocks may be smaller)."""
    if not isinstance(cache, torch.Tensor):
        raise LayoutUnsupported(f"layer's cache is not one tensor: layer={name!r} type={type(cache).__name__}")
    if cache.dim() == 0 or cache.shape[0] % num_blocks:
        raise LayoutUnsupported(
            f"layer's blocks do not divide: layer={name!r} shape={tuple(cache.shape)} num_blocks={num_blocks}"
        )
    return cache if cache.shape[0] == num_blocks else cache.unflatten(0, (num_blocks, -1))


def _segments(tensors: Sequence[Any], num_blocks: int) -> list[tuple[int, int]]:
    """Return upstream's segments (RankLocalStoreLayout.register_kv_caches): address, and bytes from block to block.

    Raises LayoutUnsupported where they are no blocks.
    """
    found: dict[int, int] = {}

    def add(address: int, stride: int, length: int) -> None:
        # Layers that share KV address the same memory: their bytes stand once in the value.
        if found.setdefault(address, stride) != stride:
            raise LayoutUnsupported(f"blocks of unlike sizes overlap: strides={found[address]},{stride}")
        if length > stride:
            raise LayoutUnsupported(f"blocks overlap: block_bytes={length} stride={stride}")

    for tensor in tensors:
        size = tensor.element_size()
        storage = tensor.untyped_storage()
        if _dense(tensor[0]):
            stride = tensor.stride(0) * size
            whole = stride * num_blocks == storage.nbytes()
            add(storage.data_ptr() if whole else tensor.data_ptr(), stride, tensor[0].numel() * size)
            continue
        for head in range(tensor.shape[1]):
            part = tensor[:, head]
            stride = part.stride(0) * size
            if not _dense(part[0]) or stride != part[0].numel() * size:
                raise LayoutUnsupported(
                    f"KV-cache layout is not served: shape={tuple(tensor.shape)} strides={tuple(tensor.stride())}"
                )
            add(part.data_ptr(), stride, stride)
    end = 0
    for address, stride in sorted(found.items()):
        if address < end:
            raise LayoutUnsupported(f"a layer's blocks overlap another's: bytes={end - address} stride={stride}")
        end = address + num_blocks * stride
    return list(found.items())


def _places(tensor: Any, segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where a layer's bytes of a block lie in the value of these segments: (offset, bytes)."""
    block, size = tensor[0], tensor.element_size()
    parts = [block] if _dense(block) else [tensor[:, head][0] for head in range(tensor.shape[1])]
    starts, found = [0, *accumulate(length for _, length in segments)], []
    for part in parts:
        at, count = part.data_ptr(), part.numel() * size
        for (address, length), start in zip(segments, starts, strict=False):
            if address <= at and at + count <= address + length:
                found.append((start + at - address, count))
                break
    return found


def _order(tensor: Any) -> str:
    """Return the dimensions in memory order, without those of one element, which lie anywhere."""
    dimensions = [each for each in range(1, tensor.dim()) if tensor.shape[each] > 1]
    return ",".join(f"{each}:{tensor.shape[each]}" for each in sorted(dimensions, key=tensor.stride, reverse=True))


def _dense(tensor: Any) -> bool:
    """Whether the tensor's elements fill one stretch of memory, in any order of its dimensions."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= length
    return True


def _pieces(segments: Sequence[tuple[int, int]]) -> list[Piece]:
    """Join neighbouring segments of equal length at equal distance to one piece."""
    pieces: list[Piece] = []
    for address, length in segments:
        if pieces:
            last = pieces[-1]
            step = address - last.address - (last.segments - 1) * last.distance
            if length == last.length and step > 0 and (last.segments == 1 or step == last.distance):
                pieces[-1] = last._replace(segments=last.segments + 1, distance=step)
                continue
        pieces.append(Piece(address, 1, length, length, length))
    return pieces
