"""The copy kernel: all segments of all blocks of a step in one launch, slots to paged KV (scatter) or back (gather).

A slot is a block's bytes in the value's order; where they lie in the paged cache is a table of pieces (paged.py),
which never changes.  What changes from launch to launch is a table of (address of a slot, block number).  The work is
cut into units of at most UNIT_BYTES of one segment, one unit per warp at a time, each warp with eight accesses of 16
bytes per lane in flight.  Addresses or lengths that are not multiples of 16 are copied in the widest steps that fit.

The source compiles as C++ too (tests/connector/test_cuda_copy.py), for there is no cooperation between threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .paged import Piece

KERNEL = "kvprefetch_copy"
THREADS = 256
WARP = 32
UNIT_BYTES = 4096
# Blocks of threads per multiprocessor: as many as are resident at a time, and some to smooth the end.
BLOCKS_PER_PROCESSOR = 16

# Both sides of the tables; `parts` is the number of units of a segment, `first` the number of units before the piece.
PIECE = np.dtype(
    [
        ("address", np.uint64), ("stride", np.uint64), ("distance", np.uint64), ("offset", np.uint64),
        ("length", np.uint32), ("segments", np.uint32), ("parts", np.uint32), ("first", np.uint32),
    ]
)  # fmt: skip
ENTRY = np.dtype([("row", np.uint64), ("block", np.uint64)])

SOURCE = """
typedef unsigned long long u64;
typedef unsigned int u32;

struct Piece { u64 address, stride, distance, offset; u32 length, segments, parts, first; };
struct Entry { u64 row, block; };

template <typename T>
__device__ __forceinline__ void move(u64 target, u64 source, u32 bytes, u32 lane) {
    T* to = reinterpret_cast<T*>(target);
    const T* from = reinterpret_cast<const T*>(source);
    const u32 count = bytes / sizeof(T);
    u32 i = lane;
    for (; i + 7 * 32 < count; i += 8 * 32) {
        T held[8];
        #pragma unroll
        for (u32 k = 0; k < 8; ++k) held[k] = from[i + k * 32];
        #pragma unroll
        for (u32 k = 0; k < 8; ++k) to[i + k * 32] = held[k];
    }
    for (; i < count; i += 32) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(256)
kvprefetch_copy(u64 pieces_at, u64 units, u64 entries_at, u64 entry_count, u64 gather) {
    const Piece* pieces = reinterpret_cast<const Piece*>(pieces_at);
    const Entry* entries = reinterpret_cast<const Entry*>(entries_at);
    const u32 lane = threadIdx.x % 32;
    const u32 warps = gridDim.x * (blockDim.x / 32);
    const u32 total = static_cast<u32>(units * entry_count);
    for (u64 n = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; n < total; n += warps) {
        const Entry entry = entries[static_cast<u32>(n) / static_cast<u32>(units)];
        const u32 unit = static_cast<u32>(n) % static_cast<u32>(units);
        const Piece* piece = pieces;
        while (unit - piece->first >= piece->segments * piece->parts) ++piece;
        const u32 segment = (unit - piece->first) / piece->parts;
        const u32 start = (unit - piece->first) % piece->parts * UNIT_BYTES;
        const u32 rest = piece->length - start;
        const u32 bytes = rest < UNIT_BYTES ? rest : UNIT_BYTES;
        const u64 paged = piece->address + entry.block * piece->stride + segment * piece->distance + start;
        const u64 slot = entry.row + piece->offset + static_cast<u64>(segment) * piece->length + start;
        const u64 target = gather ? slot : paged;
        const u64 source = gather ? paged : slot;
        const u32 odd = static_cast<u32>((target | source | bytes) & 15);
        if (odd == 0) move<uint4>(target, source, bytes, lane);
        else if (odd % 8 == 0) move<u64>(target, source, bytes, lane);
        else if (odd % 4 == 0) move<u32>(target, source, bytes, lane);
        else if (odd % 2 == 0) move<unsigned short>(target, source, bytes, lane);
        else move<unsigned char>(target, source, bytes, lane);
    }
}
""".replace("UNIT_BYTES", f"{UNIT_BYTES}u")


def piece_table(pieces: Sequence[Piece]) -> tuple[npt.NDArray[np.void], int]:
    """(the kernel's table of pieces, units per block). Raises ValueError where 32 bits do not hold a number."""
    table = np.zeros(len(pieces), PIECE)
    offset = units = 0
    for row, piece in zip(table, pieces, strict=True):
        parts = -(-piece.length // UNIT_BYTES)
        if max(piece.length, units + piece.segments * parts) >= 1 << 32:
            raise ValueError(f"block is too large for the copy kernel: bytes={piece.length * piece.segments}")
        row["address"], row["stride"], row["distance"], row["offset"] = (
            piece.address, piece.stride, piece.distance, offset,
        )  # fmt: skip
        row["length"], row["segments"], row["parts"], row["first"] = piece.length, piece.segments, parts, units
        offset += piece.segments * piece.length
        units += piece.segments * parts
    return table, units


def grid_for(units: int, entries: int, processors: int) -> int:
    """Blocks of THREADS threads for so many units."""
    warps = THREADS // WARP
    return max(1, min(-(-units * entries // warps), processors * BLOCKS_PER_PROCESSOR))


def entries_per_launch(units: int, most: int) -> int:
    """How many blocks one launch may copy: at most `most`, and their units must be counted in 32 bits."""
    return max(1, min(most, ((1 << 32) - 1) // units))
