"""The copy kernel: all segments of all blocks of a step in one launch, slots to paged KV (scatter) or back (gather).

A slot is a block's bytes in the value's order.  A table of pieces (paged.py) in device memory says where they lie in
the paged cache; it never changes.  Only the kernel's one argument changes from launch to launch, a structure that ends
with the slot and block of each copy.  The driver has copied it when the launch returns, so nothing has to be kept or
waited for.  It is small, so that it is quick to hand over; a step of more blocks is several launches.

The work is cut into units of at most UNIT_BYTES of one segment, one unit per warp at a time, each lane with eight
accesses of 16 bytes in flight.  Addresses or lengths that are not multiples of 16 are copied in the widest steps that
fit.  The source compiles as C++ too (tests/support/fakecuda), for there is no cooperation between threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...shmring.gpu.cuda import Device
from .paged import Piece

KERNEL = "kvprefetch_copy"
THREADS = 256
WARP = 32
UNIT_BYTES = 4096
# Blocks of KV in one launch: with 4 KiB of arguments, which every driver takes.
STEP_BLOCKS = 500
# Blocks of threads per multiprocessor: as many as are resident at a time, and some to smooth the end.
BLOCKS_PER_PROCESSOR = 16
# Blocks of threads, in all, that read host memory beside a forward. A resident block stays until it is done, and warps
# that wait for the bus would keep the forward's warps out. These have 512 KiB in flight, several times the bytes that a
# bus delivers in the microsecond of one access.
BESIDE_BLOCKS = 16

# As the source declares them. `parts`: units of a segment; `first`: units before the piece.
PIECE = np.dtype(
    [
        ("address", np.uint64), ("stride", np.uint64), ("distance", np.uint64), ("offset", np.uint64),
        ("length", np.uint32), ("segments", np.uint32), ("parts", np.uint32), ("first", np.uint32),
    ]
)  # fmt: skip
# Slot n lies at host + n * slot_bytes, from host_slots on at device + (n - host_slots) * slot_bytes.
STEP = np.dtype(
    [
        ("pieces", np.uint64), ("host", np.uint64), ("device", np.uint64), ("slot_bytes", np.uint64),
        ("units", np.uint32), ("count", np.uint32), ("host_slots", np.uint32), ("gather", np.uint32),
        ("slots", np.uint32, STEP_BLOCKS), ("blocks", np.uint32, STEP_BLOCKS),
    ]
)  # fmt: skip

SOURCE = f"""
#define UNIT_BYTES {UNIT_BYTES}u
#define STEP_BLOCKS {STEP_BLOCKS}u
#define PIECE_SIZE {PIECE.itemsize}u
#define STEP_SIZE {STEP.itemsize}u
"""
SOURCE += """
typedef unsigned long long u64;
typedef unsigned int u32;

struct Piece { u64 address, stride, distance, offset; u32 length, segments, parts, first; };
struct Step {
    u64 pieces, host, device, slot_bytes;
    u32 units, count, host_slots, gather;
    u32 slots[STEP_BLOCKS], blocks[STEP_BLOCKS];
};
static_assert(sizeof(Piece) == PIECE_SIZE && sizeof(Step) == STEP_SIZE && sizeof(Step) <= 4096, "tables differ");

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

extern "C" __global__ void __launch_bounds__(256, 4) kvprefetch_copy(const __grid_constant__ Step step) {
    const u32 lane = threadIdx.x % 32;
    const u32 warps = gridDim.x * (blockDim.x / 32);
    const u32 total = step.units * step.count;
    for (u64 n = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; n < total; n += warps) {
        const u32 which = static_cast<u32>(n) / step.units;
        const u32 unit = static_cast<u32>(n) % step.units;
        const u32 number = step.slots[which];
        const Piece* piece = reinterpret_cast<const Piece*>(step.pieces);
        while (unit - piece->first >= piece->segments * piece->parts) ++piece;
        const u32 segment = (unit - piece->first) / piece->parts;
        const u32 start = (unit - piece->first) % piece->parts * UNIT_BYTES;
        const u32 rest = piece->length - start;
        const u32 bytes = rest < UNIT_BYTES ? rest : UNIT_BYTES;
        const u64 row = number < step.host_slots ? step.host + number * step.slot_bytes
                                                 : step.device + (number - step.host_slots) * step.slot_bytes;
        const u64 slot = row + piece->offset + static_cast<u64>(segment) * piece->length + start;
        const u64 paged = piece->address + step.blocks[which] * piece->stride + segment * piece->distance + start;
        const u64 target = step.gather ? slot : paged;
        const u64 source = step.gather ? paged : slot;
        const u32 odd = static_cast<u32>((target | source | bytes) & 15);
        if (odd == 0) move<uint4>(target, source, bytes, lane);
        else if (odd % 8 == 0) move<u64>(target, source, bytes, lane);
        else if (odd % 4 == 0) move<u32>(target, source, bytes, lane);
        else if (odd % 2 == 0) move<unsigned short>(target, source, bytes, lane);
        else move<unsigned char>(target, source, bytes, lane);
    }
}
"""


def piece_table(pieces: Sequence[Piece]) -> tuple[npt.NDArray[np.void], int]:
    """(the kernel's table of pieces, units per block). Raises ValueError where 32 bits do not hold a number."""
    table = np.zeros(len(pieces), PIECE)
    offset = units = 0
    for row, piece in zip(table, pieces, strict=True):
        parts = -(-piece.length // UNIT_BYTES)
        if max(piece.length, (units + piece.segments * parts) * STEP_BLOCKS) >= 1 << 32:
            raise ValueError(f"block is too large for the copy kernel: bytes={piece.length * piece.segments}")
        row["address"], row["stride"], row["distance"] = piece.address, piece.stride, piece.distance
        row["length"], row["segments"], row["parts"] = piece.length, piece.segments, parts
        row["offset"], row["first"] = offset, units
        offset += piece.segments * piece.length
        units += piece.segments * parts
    return table, units


def grid_for(units: int, blocks: int, processors: int) -> int:
    """Blocks of THREADS threads for the units of so many blocks of KV."""
    warps = THREADS // WARP
    return max(1, min(-(-units * blocks // warps), processors * BLOCKS_PER_PROCESSOR))


class Launcher:
    """The kernel with its argument. For one thread."""

    def __init__(self, device: Device, pieces: int, units: int, slot_bytes: int, stream: int) -> None:
        """Compile it or find it compiled, and load it; `pieces`: address of the table. Raises DeviceError.

        Launches it once without work: no part is left to be loaded in the middle of a step.
        """
        self._units, self._processors = units, device.processors
        self.kernel = device.kernel(SOURCE, KERNEL)
        self._step = np.zeros(1, STEP)
        self._slots, self._blocks = self._step["slots"][0], self._step["blocks"][0]
        self._step["pieces"], self._step["units"], self._step["slot_bytes"] = pieces, units, slot_bytes
        self.kernel.launch(1, THREADS, self._step, stream)

    def set_addresses(self, host: int, host_slots: int, device: int) -> None:
        """Set where host and device slots lie from now on."""
        self._step["host"], self._step["host_slots"], self._step["device"] = host, host_slots, device

    def launch(
        self, slots: Sequence[int], block_ids: Sequence[int], stream: int, *, gather: bool, most: int | None = None
    ) -> None:
        """Queue the copies of up to STEP_BLOCKS pairs, by up to `most` blocks of threads. Raises DeviceError."""
        count = len(slots)
        self._slots[:count], self._blocks[:count] = slots, block_ids
        self._step["count"], self._step["gather"] = count, gather
        grid = grid_for(self._units, count, self._processors)
        self.kernel.launch(grid if most is None else min(grid, most), THREADS, self._step, stream)
