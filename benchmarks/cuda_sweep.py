"""Varies each size of the copy kernel on this GPU, beside the device's own copies.

    python -m benchmarks.cuda_sweep [--shape llama-8b] [--blocks 64]

UNIT_BYTES and BLOCKS_PER_PROCESSOR decide copies within the device, BESIDE_BLOCKS loads from the host beside a forward:
how fast they are, and how much longer the forward takes. (connector/cuda_copy.py has the sizes in use.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks import cuda as bench
from kvprefetch.connector import cuda_copy
from kvprefetch.connector.copies import CudaCopies

WITHIN = {"UNIT_BYTES": (2048, 4096, 8192, 16384), "BLOCKS_PER_PROCESSOR": (4, 8, 16, 32)}
BESIDE = (4, 8, 16, 32, 64, 128)


@contextmanager
def changed(rank: bench.Bench, name: str, value: int) -> Iterator[None]:
    """With the kernels built anew for another value of one size."""
    before = getattr(cuda_copy, name)
    setattr(cuda_copy, name, value)
    try:
        rank.copies = CudaCopies(rank.paged, rank.device, rank.streams)
        yield
    finally:
        setattr(cuda_copy, name, before)


def sweep(shape: str, blocks: int) -> Iterator[str]:
    """The table's rows, as they are measured."""
    rank = bench.Bench(shape, blocks)
    try:
        for name, values in WITHIN.items():
            for value in values:
                with changed(rank, name, value):
                    rates = bench.device_rates(rank)
                shares = "  ".join(f"{way} {rates[way] / rates['own']:.2f}" for way in ("scatter", "gather"))
                yield f"{shape} {blocks}  {name}={value}  {shares} of {rates['own']:.0f} GB/s"
        for value in BESIDE:
            with changed(rank, "BESIDE_BLOCKS", value):
                rates, times = bench.host_rates(rank), bench.forward_ms(rank)
            share, longer = rates["beside"] / rates["own_to_device"], times["host"] / times["alone"]
            yield (
                f"{shape} {blocks}  BESIDE_BLOCKS={value}  {share:.2f} of {rates['own_to_device']:.1f} GB/s; "
                f"forward {longer:.2f} of {times['alone']:.2f} ms"
            )
    finally:
        rank.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_sweep", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", choices=bench.SHAPES, action="append", help="default: all")
    parser.add_argument("--blocks", type=int, default=64)
    options = parser.parse_args(arguments)
    if not bench.device_there():
        return 1
    for shape in options.shape or list(bench.SHAPES):
        for row in sweep(shape, options.blocks):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
