"""Hands bytes to another process in the ways that `benchmarks.ring` compares, each with the same four calls."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import queue
import select
import socket
import tempfile
import time
import uuid
from typing import Any, Protocol

import posix_ipc

from kvprefetch.shmring._atomics import Words
from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.layout import Layout
from kvprefetch.shmring.ring import Consumer, Producer
from kvprefetch.shmring.segment import Segment

WAIT_S = 0.2
LARGEST_BYTES = 256 << 10


class Unavailable(Exception):
    """This peer cannot run here; the text says why."""


class Peer(Protocol):
    """Made before the fork; one process then calls `open_sender`, the other `open_receiver`."""

    name: str
    max_bytes: int

    def open_sender(self) -> None: ...

    def open_receiver(self) -> None: ...

    def send(self, data: bytes) -> None: ...

    def receive(self) -> Any:
        """Bytes-like, or None when nothing is there. Never blocks."""

    def done(self) -> None:
        """The received bytes are not needed any more."""

    def wait(self) -> None:
        """Sleep until something may be there, at most WAIT_S."""


class Ring:
    """Ours: the hint ring with its doorbell."""

    name = "kvprefetch ring"
    max_bytes = LARGEST_BYTES

    def __init__(self, ring_bytes: int = 1 << 23) -> None:
        layout = Layout(
            ring_bytes=ring_bytes,
            flag_count=64,
            page_count=64,
            table_entries=64,
            credit_entries=64,
            slot_count=64,
            epoch=1,
        )
        self.segment = Segment.create(layout.total_bytes)
        layout.write(self.segment.buffer)
        self.layout = layout
        self._bell = Doorbell.create()

    def open_sender(self) -> None:
        buffer = self.segment.buffer
        self.producer = Producer(buffer, Words(buffer), self.layout, self._bell.ring)
        self._push = self.producer.push

    def open_receiver(self) -> None:
        buffer = self.segment.buffer
        self._consumer = Consumer(buffer, Words(buffer), self.layout)
        self._epoll = select.epoll()
        self._epoll.register(self._bell.fd, select.EPOLLIN)

    def send(self, data: bytes) -> None:
        while not self._push(1, data):
            time.sleep(0)

    def receive(self) -> Any:
        record = self._consumer.peek()
        return None if record is None else record.payload

    def done(self) -> None:
        self._consumer.advance()

    def wait(self) -> None:
        if self._consumer.prepare_sleep():
            if self._epoll.poll(WAIT_S):
                self._bell.clear()
            self._consumer.wake()


class _Copying:
    def done(self) -> None:
        """What was received is a copy."""


class Queue(_Copying):
    """multiprocessing.Queue: `put` only hands over to a thread, which pickles and writes to a pipe."""

    name = "multiprocessing.Queue"
    max_bytes = LARGEST_BYTES

    def __init__(self) -> None:
        self._queue: Any = multiprocessing.get_context("fork").Queue(1000)

    def open_sender(self) -> None:
        self._queue.cancel_join_thread()

    def open_receiver(self) -> None:
        pass

    def send(self, data: bytes) -> None:
        self._queue.put(data)

    def receive(self) -> Any:
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def wait(self) -> None:
        self._queue._reader.poll(WAIT_S)


class Zmq(_Copying):
    """A ZMQ PAIR over ipc, what upstream's connectors talk through."""

    name = "ZMQ PAIR ipc"
    max_bytes = LARGEST_BYTES

    def __init__(self) -> None:
        try:
            import zmq
        except ImportError:
            raise Unavailable("pyzmq is not installed") from None
        self._zmq: Any = zmq
        self._folder = tempfile.TemporaryDirectory(prefix="bench-ring-")
        self._address = f"ipc://{self._folder.name}/pair"

    def _open(self) -> Any:
        # A context does not survive a fork, so each side makes its own.
        return self._zmq.Context().socket(self._zmq.PAIR)

    def open_sender(self) -> None:
        self._socket = self._open()
        self._socket.connect(self._address)

    def open_receiver(self) -> None:
        self._socket = self._open()
        self._socket.bind(self._address)

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    def receive(self) -> Any:
        try:
            return self._socket.recv(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None

    def wait(self) -> None:
        self._socket.poll(int(WAIT_S * 1000))


class Datagram(_Copying):
    """A Unix datagram socket pair."""

    name = "Unix datagram"

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        force = 32  # SO_SNDBUFFORCE: beyond the system's limit, with the right to
        try:
            self._sender.setsockopt(socket.SOL_SOCKET, force, 4 << 20)
        except OSError:
            self._sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        usable = self._sender.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        self.max_bytes = min(LARGEST_BYTES, usable - 1024)
        self._receiver.setblocking(False)

    def open_sender(self) -> None:
        self._receiver.close()

    def open_receiver(self) -> None:
        self._sender.close()

    def send(self, data: bytes) -> None:
        self._sender.send(data)

    def receive(self) -> Any:
        try:
            return self._receiver.recv(LARGEST_BYTES)
        except BlockingIOError:
            return None

    def wait(self) -> None:
        select.select([self._receiver], [], [], WAIT_S)


class MessageQueue(_Copying):
    """A POSIX message queue, with the limits that the system sets."""

    name = "POSIX message queue"

    def __init__(self) -> None:
        name = f"/bench-ring-{uuid.uuid4().hex}"
        try:
            self._queue = posix_ipc.MessageQueue(name, posix_ipc.O_CREX, max_messages=10, max_message_size=8192)
        except (OSError, ValueError, posix_ipc.Error) as error:
            raise Unavailable(f"no POSIX message queue here: {error}") from None
        posix_ipc.unlink_message_queue(name)
        self.max_bytes = 8192

    def open_sender(self) -> None:
        pass

    def open_receiver(self) -> None:
        pass

    def send(self, data: bytes) -> None:
        self._queue.send(data)

    def receive(self) -> Any:
        try:
            return self._queue.receive(0)[0]
        except posix_ipc.BusyError:
            return None

    def wait(self) -> None:
        select.select([self._queue.mqd], [], [], WAIT_S)


class Iceoryx(_Copying):
    """iceoryx2's Python binding: publish and subscribe, with an event to sleep on."""

    name = "iceoryx2"
    max_bytes = LARGEST_BYTES

    def __init__(self) -> None:
        try:
            import iceoryx2
        except ImportError:
            raise Unavailable("iceoryx2 is not installed (pip install iceoryx2 flatbuffers)") from None
        self._iox: Any = iceoryx2
        self._service = f"bench-ring-{uuid.uuid4().hex}"

    def _open(self) -> tuple[Any, Any]:
        iox = self._iox
        iox.set_log_level(iox.LogLevel.Error)
        self._node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
        name = iox.ServiceName.new(self._service)
        data = (
            self._node.service_builder(name)
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(64)
            .open_or_create()
        )
        return data, self._node.service_builder(name).event().open_or_create()

    def open_sender(self) -> None:
        data, event = self._open()
        self._publisher = data.publisher_builder().initial_max_slice_len(LARGEST_BYTES).create()
        self._notifier = event.notifier_builder().create()

    def open_receiver(self) -> None:
        data, event = self._open()
        self._subscriber = data.subscriber_builder().create()
        self._listener = event.listener_builder().create()

    def send(self, data: bytes) -> None:
        sample = self._publisher.loan_slice_uninit(len(data) or 1)
        ctypes.memmove(sample.payload_ptr, data, len(data))
        sample.assume_init().send()
        # It has no word that says whether the receiver sleeps: to wake one at all is to notify each time.
        self._notifier.notify()

    def receive(self) -> Any:
        sample = self._subscriber.receive()
        if sample is None:
            return None
        payload = sample.payload()
        data = ctypes.string_at(payload.as_ptr(), payload.len())
        sample.delete()
        return data

    def wait(self) -> None:
        self._listener.timed_wait(self._iox.Duration.from_millis(int(WAIT_S * 1000)))


class UpstreamLookup:
    """vLLM's own lookup client of its Mooncake connector: what a scheduler pays there to ask about one request.

    The answer comes from a process that does nothing but answer, so the store's time is not in it.
    """

    name = "vLLM LookupKeyClient"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-ring-")
        os.environ["VLLM_RPC_BASE_PATH"] = self._folder.name
        self._ready: Any = multiprocessing.get_context("fork").Event()

    def serve(self, address: str) -> None:
        """In the other process: answer each lookup with a hit of 64 tokens."""
        import zmq

        replies: Any = zmq.Context().socket(zmq.REP)
        replies.bind(address)
        self._ready.set()
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                replies.recv_multipart(copy=False)
                replies.send((64).to_bytes(4, "big"))

    def connect(self) -> Any:
        """The client, its server running. Raises Unavailable without vLLM."""
        from types import SimpleNamespace

        address = f"ipc://{self._folder.name}/lookup_rpc_port_0_host_{socket.gethostname()}_dp_rank0"
        server = multiprocessing.get_context("fork").Process(target=self.serve, args=(address,), daemon=True)
        server.start()
        self._ready.wait(10)
        try:
            from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import LookupKeyClient
        except ImportError as error:
            server.kill()
            raise Unavailable(f"no vLLM with a Mooncake store connector here: {error}") from None
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        )
        return LookupKeyClient(config)


PEERS: tuple[type[Any], ...] = (Ring, Queue, Zmq, Datagram, MessageQueue, Iceoryx)
