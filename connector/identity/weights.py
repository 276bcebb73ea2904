"""A digest of a rank's weights as they are, of a sample of every tensor.

Of a tensor with more than LEAST values the digest has values at `places`: the tensor is cut into as many equal parts,
and a hash of its name chooses one value of each.  Smaller tensors are in it whole, as are name, dtype and shape of all
of them.  A tensor gives MOST values, or fewer where all together would be more than LIMIT_BYTES, and never less than
LEAST; so a change of a part p of n tensors' values all over is missed with a probability of (1 - p) ** (MOST * n).  For
p = 1e-5, as a small step of a trainer leaves it, that is 0.72 for one tensor, 2e-14 for the 97 large ones of a model of
0.5B, 3e-19 for the 130 of one of 8B (with LEAST values of each: 0.02 and 0.005).  So a step that changes all layers is
seen.  A change of a few values, or of a few rows of one tensor, is most probably not.

Values count in the order of their tensor's indices, not of its memory.  Layouts that a kernel wants (packed, shuffled,
padded) are compared as they are: engines of unlike kernels have unlike digests of equal weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

LEAST, MOST = 4096, 32768
LIMIT_BYTES = 64 << 20
DIGEST_BYTES = 16

_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Of splitmix64, as signed numbers.
_STEP, _MIX, _MIX_AGAIN = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


class NotComparable(ValueError):
    """The weights are not, or not all, in tensors that can be read; the text says why in one line."""


@torch.no_grad()
def digest(models: Sequence[Any]) -> bytes:
    """Return the digest of these models' parameters and buffers. Waits once for each device. Raises NotComparable."""
    tensors = dict(_tensors(models))
    whole = sum(each.nbytes for each in tensors.values() if each.numel() <= LEAST)
    of_one = sum(each.element_size() for each in tensors.values() if each.numel() > LEAST)
    if whole + LEAST * of_one > LIMIT_BYTES:
        raise NotComparable(f"too many tensors: tensors={len(tensors)} max_bytes={LIMIT_BYTES}")
    most = min(MOST, (LIMIT_BYTES - whole) // max(1, of_one))
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    read = dict[torch.device, list[torch.Tensor]]()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        read.setdefault(tensor.device, []).append(_values(name, tensor, most))
    for parts in read.values():
        found.update(torch.cat(parts).cpu().numpy())
    return found.digest()


def combined(of_ranks: Sequence[bytes]) -> str:
    """Return the id of an engine's weights by the digests of its ranks, in the order of the ranks: 32 hex digits."""
    return hashlib.blake2b(b"".join(of_ranks), digest_size=DIGEST_BYTES).hexdigest()


def places(name: str, size: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` indices below `size`, one of each equal part, the same on every device."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
    number = torch.arange(count, dtype=torch.int64, device=device)
    mixed = number * _STEP + seed
    mixed = (mixed ^ _shifted(mixed, 30)) * _MIX
    mixed = (mixed ^ _shifted(mixed, 27)) * _MIX_AGAIN
    mixed = (mixed ^ _shifted(mixed, 31)) & ((1 << 62) - 1)
    return (number * size + mixed % size) // count


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The values shifted right as unsigned ones."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _tensors(models: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the models compute with, by names that are the same with adapters and without."""
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            held = dict(module.named_parameters(recurse=False))
            loads = getattr(module, "quant_method", None) is not None and hasattr(module, "weight_loader")
            if not all(each.numel() for each in held.values()) or (loads and all(e.dim() < 2 for e in held.values())):
                raise NotComparable(f"a layer has its weights in other memory than its parameters': layer={name}")
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta or tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
                raise NotComparable(f"a tensor cannot be read: name={name} type={type(tensor).__name__}")
            yield f"{number}.{name.replace('.base_layer.', '.')}", tensor.detach()


def _values(name: str, tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return the bytes of the tensor's sample, on its device."""
    size, tensor = tensor.numel(), tensor.view(_OF_SIZE[tensor.element_size()])
    if size <= max(most, LEAST):
        return tensor.reshape(-1).view(torch.uint8)
    left = places(name, size, most, tensor.device)
    if tensor.is_contiguous():
        return tensor.view(-1)[left].view(torch.uint8)
    at, span = torch.zeros_like(left), 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        at += left % length * stride
        left //= length
        span += (length - 1) * stride
    return tensor.as_strided((span,), (1,))[at].view(torch.uint8)
