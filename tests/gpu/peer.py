"""The other process: exports and imports device memory on request, one JSON object a packet, descriptors beside it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.cuda import Device, SharedMemory, Stream

ON_GPU = "KVPREFETCH_GPU" in os.environ  # side.py


def pattern(seed: int, size_bytes: int) -> Any:
    return np.frombuffer(np.random.default_rng(seed).bytes(size_bytes), np.uint8)


def write(stream: Stream, memory: SharedMemory, seed: int) -> None:
    data = pattern(seed, memory.size_bytes)
    stream.copy(memory.address, data.ctypes.data, len(data))
    stream.wait()


def read(stream: Stream, memory: SharedMemory) -> Any:
    data = np.empty(memory.size_bytes, np.uint8)
    stream.copy(data.ctypes.data, memory.address, len(data))
    stream.wait()
    return data


def holds(stream: Stream, memory: SharedMemory, seed: int) -> bool:
    return bool((read(stream, memory) == pattern(seed, memory.size_bytes)).all())


class Process:
    """Its memory, by number."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.stream()
        self.memories: list[SharedMemory] = []

    def allocate(self, size: int, seed: int) -> int:
        """Return a descriptor of new memory, filled with a pattern; 0: zeros, as it comes."""
        self.memories.append(self.device.allocate(size))
        if seed:
            write(self.stream, self.memories[-1], seed)
        return self.memories[-1].export()

    def do(self, order: dict[str, Any], descriptors: list[int]) -> Any:
        match order["do"]:
            case "open":
                self.memories.append(self.device.open(descriptors[0], order["bytes"]))
            case "write":
                write(self.stream, self.memories[order["id"]], order["seed"])
            case "holds":
                return holds(self.stream, self.memories[order["id"]], order["seed"])
            case "is_zero":
                return not read(self.stream, self.memories[order["id"]]).any()
            case "close":
                self.memories[order["id"]].close()
        return None


def main(control: socket.socket) -> None:
    if not ON_GPU:
        from tests.support import fakecuda

        fakecuda.load()
    import cupy  # noqa: F401  # now, since the other user may not read this checkout

    pattern(0, 1)  # and NumPy's generator
    if uid := int(os.environ["KVPREFETCH_PEER_UID"]):
        os.setuid(uid)
    process = Process(cuda.open_device(cuda.uuid_of(0)))
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not data:
            return
        order, answer, made = json.loads(data), None, list[int]()
        try:
            if order["do"] == "allocate":
                made = [process.allocate(order["bytes"], order["seed"])]
            else:
                answer = process.do(order, descriptors)
            said = {"answer": answer}
        except DeviceError as error:
            said = {"error": str(error)}
        socket.send_fds(control, [json.dumps(said).encode()], made)
        for descriptor in (*descriptors, *made):
            os.close(descriptor)


class Peer:
    """Such a process, from the test's side; `uid`: of another user; `variables` of its environment."""

    def __init__(self, uid: int = 0, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(60)
        command = [sys.executable, "-m", "tests.gpu.peer", str(theirs.fileno())]
        path = os.pathsep.join(filter(None, sys.path))
        env = {**os.environ, **variables, "PYTHONPATH": path, "KVPREFETCH_PEER_UID": str(uid)}
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=env)
        theirs.close()

    def send(self, do: str, *descriptors: int, **values: Any) -> None:
        socket.send_fds(self.control, [json.dumps({"do": do, **values}).encode()], descriptors)

    def answer(self) -> Any:
        """Return what it answers, or a descriptor of the caller's. Raises DeviceError as the other process did."""
        data, descriptors, _, _ = socket.recv_fds(self.control, 4096, 1)
        assert data, "the other process ended"
        said = json.loads(data)
        if "error" in said:
            raise DeviceError(said["error"])
        return descriptors[0] if descriptors else said["answer"]

    def ask(self, do: str, *descriptors: int, **values: Any) -> Any:
        self.send(do, *descriptors, **values)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel is done with it."""
        self.process.kill()
        self.end()

    def end(self) -> None:
        self.control.close()
        self.process.wait()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
