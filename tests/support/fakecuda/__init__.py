"""A CUDA driver without a GPU: the machine that it plays, for tests.

`load()` puts a libcuda.so.1 of our own in the place of NVIDIA's, and a thin stand-in for cupy over it
(stand_in/cupy.py): cupy's wheels have CUDA's runtime built in, which no other driver suits.  All of our GPU code then
runs as it does on a GPU, in several processes, with kills.  fake.h says how it is built.

What it keeps of CUDA's rules; what CUDA leaves undefined ends the process with a line that begins with FAKECUDA:

* a thread's current context; contexts cost memory; what is made in them is counted;
* device memory that is not cleared, is there as long as any process has it, and runs out; a GPU without descriptors;
* exports and imports of memory by descriptor, and of whole allocations by legacy handle; addresses that are reserved,
  mapped, given access and given up, as a whole; memory freed while another process has it mapped;
* host memory that is registered in whole pages and once, and is not unmapped before; copies within one registration;
* streams that lag, events that are recorded again or used after their end, memory given back while queued work uses it;
* each access of a kernel: within its GPU's memory or registered host memory, and aligned;
* a capture of graphs in global mode, which unsafe calls of any thread spoil;
* UUIDs with zero bytes, MIG instances, CUDA_VISIBLE_DEVICES, exclusive mode, calls that hang or fail, a lost GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCES = Path(__file__).resolve().parent
STAND_IN = SOURCES / "stand_in"
BUILD = Path(__file__).resolve().parents[3] / "build" / "fakecuda"
KERNELS = BUILD / "kernels"
FLAGS = (
    *("-std=gnu11", "-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"),
)
missing = [name for name in ("gcc", "g++") if not shutil.which(name)]
needs_fake = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


class Gpu(NamedTuple):
    """One GPU; `mig`: the UUID of the whole GPU, of which it is an instance."""

    uuid: str
    bytes: int = 256 << 20
    mig: str = ""
    descriptors: bool = True
    exclusive: bool = False
    pci: str = "0000:00:00.0"

    def line(self) -> str:
        words = [uuid.UUID(self.uuid).hex, str(self.bytes), f"pci={self.pci}"]
        words += [f"mig={uuid.UUID(self.mig).hex}"] if self.mig else []
        words += [word for word, on in (("no-descriptors", not self.descriptors), ("exclusive", self.exclusive)) if on]
        return " ".join(words)


# A zero byte is as good as any other: the second UUID differs from the first behind one.
UUIDS = ("6b760000-7265-6665-7463-680000000000", "6b760000-7265-6665-7463-680000000001")
UUID = UUIDS[0]
CONTEXT_BYTES = 1 << 20
GLOBAL_MODE = 0  # cudaStreamCaptureModeGlobal
SPREAD = "KVPREFETCH_TEST_SPREAD"  # in a worker's environment: the ranks have a GPU each
GPUS = tuple(Gpu(each) for each in UUIDS)


class Machine:
    """A folder that stands for a machine with GPUs; processes with `environment` are on it."""

    def __init__(self, gpus: Sequence[Gpu] = GPUS) -> None:
        self.gpus = gpus
        self.folder = Path(tempfile.mkdtemp(prefix=f"fakecuda-{os.getpid()}-", dir="/dev/shm"))
        for part in ("memory", "faults"):
            (self.folder / part).mkdir()
        (self.folder / "devices").write_text("".join(f"{gpu.line()}\n" for gpu in gpus))
        (self.folder / "planted").write_bytes(b"\0")
        (self.folder / "lock").touch()
        for path in (self.folder, *self.folder.iterdir()):
            path.chmod(0o777 if path.is_dir() else 0o666)

    @property
    def environment(self) -> dict[str, str]:
        """Return what puts a process that it starts with on this machine; its driver is the fake one."""
        here = {"FAKECUDA_DIR": str(self.folder), "FAKECUDA_LAG_US": "300", "FAKECUDA_KERNELS": str(KERNELS)}
        path = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
        return here | {"LD_LIBRARY_PATH": str(library().parent), "PYTHONPATH": path}

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def held(self, device: int = 0) -> dict[str, int]:
        """Return the pieces of a GPU's memory that some process holds, contexts included: name -> bytes."""
        found = {}
        with open(self.folder / "lock", "a") as machine:
            fcntl.flock(machine, fcntl.LOCK_EX)
            for path in (self.folder / "memory").glob(f"{device}-*"):
                with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        found[path.name] = path.stat().st_size
        return found

    def left(self) -> dict[str, int]:
        """Return what of all GPUs is not free: pieces of memory, and contexts with streams, events or registrations."""
        held = {name: size for device in range(len(self.gpus)) for name, size in self.held(device).items()}
        return {name: size for name, size in held.items() if "-context-" not in name or size > CONTEXT_BYTES}

    def memories(self) -> int:
        """Count the pieces of memory of all GPUs that any process holds, without contexts."""
        return sum("-memory-" in name for device in range(len(self.gpus)) for name in self.held(device))

    def plant(self, name: str, result: int = 0, *, device: int | None = None, pid: int | None = None) -> Path:
        """Make calls of this name hang, or fail with this result, until the returned file is removed.

        `name`: a function of the driver; `copies`, which hang in their streams; or `lost`, which loses the GPU.
        """
        words = [str(result)]
        words += [f"device={device}"] if device is not None else []
        words += [f"pid={pid}"] if pid is not None else []
        path, new = self.folder / "faults" / name, self.folder / f"fault-{name}"
        new.write_text(" ".join(words))
        new.rename(path)
        with open(self.folder / "planted", "r+b") as flag:  # a mapped file: never without its byte
            flag.write(b"\1")
        return path

    def mend(self) -> None:
        """End all faults."""
        for fault in (self.folder / "faults").iterdir():
            fault.unlink(missing_ok=True)


@functools.cache
def library() -> Path:
    """Build libcuda.so.1, or find it built from the same sources; return its path."""
    KERNELS.mkdir(parents=True, exist_ok=True)
    sources = sorted(SOURCES.glob("*.[ch]"))
    text = b"".join(path.read_bytes() for path in sources)
    folder = BUILD / hashlib.sha256(text + repr(FLAGS).encode()).hexdigest()[:16]
    found = folder / "libcuda.so.1"
    if not found.exists():
        folder.mkdir(exist_ok=True)
        made = found.with_name(f"{found.name}.{os.getpid()}")
        files = [path for path in sources if path.suffix == ".c"]
        subprocess.run(["gcc", *FLAGS, f"-Wl,-soname,{found.name}", "-o", made, *files, "-ldl"], check=True)
        made.rename(found)
    return found


@functools.cache
def load() -> None:
    """Put the fake driver in the place of NVIDIA's in this process, and the stand-in in that of cupy."""
    os.environ["FAKECUDA_KERNELS"] = str(KERNELS)
    ctypes.CDLL(str(library()), ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(STAND_IN))


def folder() -> Path:
    """Return the folder of the machine that this process is on."""
    return Path(os.environ["FAKECUDA_DIR"])


def descriptors_of(pid: int) -> list[str]:
    """Return the piece of GPU memory behind each descriptor that a process of this machine holds, without contexts."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := os.readlink(link)).startswith(f"{folder()}/memory/") and "-memory-" in target:
                found.append(target)
    return found


def held_by(pid: int) -> int:
    """Count the pieces of GPU memory that a process of this machine holds, without contexts."""
    return len(set(descriptors_of(pid)))


@functools.cache
def machine() -> Machine:
    """Return the machine of this process and of those that it starts, with two GPUs of 256 MiB; loads the fake."""
    for left in Path("/dev/shm").glob("fakecuda-*-*"):  # of processes that were killed
        if not Path("/proc", left.name.split("-")[1]).exists():
            shutil.rmtree(left, ignore_errors=True)
    made = Machine()
    os.environ.update({name: value for name, value in made.environment.items() if name.startswith("FAKECUDA")})
    atexit.register(made.remove)
    load()
    return made
