"""The other process: exports and imports device memory on request, one JSON object a line. Needs cupy and numpy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.device import Device, Memory, Stream


def pattern(seed: int, size_bytes: int) -> Any:
    return np.frombuffer(np.random.default_rng(seed).bytes(size_bytes), np.uint8)


def write(stream: Stream, memory: Memory, seed: int) -> None:
    data = pattern(seed, memory.size_bytes)
    stream.copy(memory.address, data.ctypes.data, len(data))
    stream.record().wait()


def holds(stream: Stream, memory: Memory, seed: int) -> bool:
    data = np.empty(memory.size_bytes, np.uint8)
    stream.copy(data.ctypes.data, memory.address, len(data))
    stream.record().wait()
    return bool((data == pattern(seed, len(data))).all())


def main() -> None:
    device: Device = cuda.open_device(cuda.uuid_of("cuda", 0))
    stream = device.stream()
    memories: list[Memory] = []
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        try:
            match order["do"]:
                case "allocate":
                    memories.append(device.allocate(order["bytes"]))
                    write(stream, memories[-1], order["seed"])
                    answer = memories[-1].handle().hex()
                case "open":
                    memories.append(device.open(bytes.fromhex(order["handle"]), order["bytes"]))
                case "write":
                    write(stream, memories[order["id"]], order["seed"])
                case "holds":
                    answer = holds(stream, memories[order["id"]], order["seed"])
                case "close":
                    memories[order["id"]].close()
                case "cycles":
                    for _ in range(order["count"]):
                        device.open(bytes.fromhex(order["handle"]), order["bytes"]).close()
            print(json.dumps({"answer": answer}), flush=True)
        except DeviceError as error:
            print(json.dumps({"error": str(error)}), flush=True)


class Peer:
    """Such a process, from the test's side."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, env=os.environ)

    def send(self, do: str, **values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Raises DeviceError as the other process did."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the other process ended"
        said = json.loads(line)
        if "error" in said:
            raise DeviceError(said["error"])
        return said["answer"]

    def ask(self, do: str, **values: Any) -> Any:
        self.send(do, **values)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel is done with it."""
        self.process.kill()
        self.end()

    def end(self) -> None:
        self.process.communicate()


if __name__ == "__main__":
    main()
