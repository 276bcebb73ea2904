"""Makes paged caches in every layout of vLLM: layer views [B, H, N, C] of one random allocation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

SERVED = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC"]
SIZES = {"L": 3, "B": 7, "H": 2, "N": 4, "C": 8}


def caches(
    layout: str,
    dtype: torch.dtype = torch.bfloat16,
    kernel_ratio: int = 1,
    sizes: Mapping[str, int] = SIZES,
    allocate: Callable[[int], torch.Tensor] = lambda size: torch.empty(size, dtype=torch.uint8),
) -> dict[str, torch.Tensor]:
    """Return one tensor per layer, with the allocation's dimensions in the order of `layout`.

    `allocate`: returns so many bytes, on any device.
    """
    total = dtype.itemsize
    for size in sizes.values():
        total *= size
    raw = allocate(total).random_(0, 256).view(dtype)
    strides, step = {}, 1
    for name in reversed(layout):
        strides[name] = step
        step *= sizes[name]
    views = {}
    for layer in range(sizes["L"]):
        shape, stride = tuple(sizes[name] for name in "BHNC"), tuple(strides[name] for name in "BHNC")
        if kernel_ratio > 1:
            assert layout == "LBHNC"
            tokens = sizes["N"] // kernel_ratio
            shape = (sizes["B"] * kernel_ratio, sizes["H"], tokens, sizes["C"])
            stride = (stride[0] // kernel_ratio, tokens * sizes["C"], sizes["C"], 1)
        views[f"layer.{layer}"] = raw.as_strided(shape, stride, layer * strides["L"])
    return views
