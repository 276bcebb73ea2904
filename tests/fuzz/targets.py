"""What is fuzzed: makes a case (JSON), and tries it; AssertionError, or any other exception, is a finding.

Targets of a daemon have an honest engine on it, which is served between two cases.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from kvprefetch.client.door import Door
from kvprefetch.connector.words import config as connector
from kvprefetch.daemon.config.model import ConfigError, DaemonConfig
from kvprefetch.daemon.config.sources import Sources, resolve
from kvprefetch.daemon.store.errors import ErrorClass, StoreUnavailable
from kvprefetch.shmring.liveness import PeerStatus
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.attach import Refused
from kvprefetch.shmring.wire.codec import MAX_MESSAGE_BYTES, receive_message
from kvprefetch.shmring.wire.records import ProtocolError, RecordKind
from tests.daemon.store.test_store import opened
from tests.daemon.stores import blocks
from tests.fuzz.mutation import flipped, mutated
from tests.lab import process
from tests.lab.daemon import Daemon
from tests.support.encoded import encode_hint
from tests.support.engine_side import BLOCK_TOKENS, EngineSpec
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

ANSWER_S = 10.0


class Target(ABC):
    @abstractmethod
    def case(self, source: random.Random) -> Any:
        """Make a case, which json.dumps takes."""

    @abstractmethod
    def attempt(self, case: Any) -> None:
        """Try it."""


def one_line(text: str) -> bool:
    return bool(text) and "\n" not in text and len(text) < 2000 and "Traceback" not in text


class OfDaemon(Target):
    """An honest engine on a daemon, with stored blocks that it loads between two cases."""

    EVERY = 20

    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self._tried = daemon, 0
        self.honest = FakeEngine(daemon.socket, engine_id="honest", prefix="honest")
        self._values = blocks("honest", 4)
        self.honest.save(self._values)
        eventually(lambda: self.honest.load(list(self._values)) is not None, what="the honest engine's blocks")

    def served(self) -> None:
        """The honest engine is served."""
        self._tried += 1
        if self._tried % self.EVERY == 0:
            began = time.monotonic()
            assert self.honest.load(list(self._values), name=f"h{self._tried}") == list(self._values.values())
            assert time.monotonic() - began < ANSWER_S
        assert process.alive(self.daemon.pid), self.daemon.lines[-20:]

    def close(self) -> None:
        self.honest.close()


class Control(OfDaemon):
    """Messages of the control socket: those of an engine that attaches, in any order, with any fields."""

    def case(self, source: random.Random) -> Any:
        spec = EngineSpec(engine_id=source.choice(("one", "honest", "x" * 256)), ranks=source.choice((1, 1, 2, 9)))
        hellos = [
            spec.hello(role, rank).model_dump(mode="json", exclude_none=True)
            for role, rank in (("worker", 0), ("worker", 1), ("scheduler", 0))
        ]
        others: list[dict[str, Any]] = [
            {"type": "mapped", "epoch": source.randint(0, 9), "device": False},
            {"type": "reset", "reset_generation": source.randint(0, 3), "weights": "0" * 32},
            {"type": "status_query"},
        ]
        made = []
        for hello in source.sample(hellos, source.randint(1, 3)):
            then = source.sample(others, source.randint(0, 2))
            made.append([mutated(source, each) if source.random() < 0.7 else each for each in (hello, *then)])
        return made

    def attempt(self, case: Any) -> None:
        with contextlib.ExitStack() as stack:
            for messages in case:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                sock.settimeout(ANSWER_S)
                sock.connect(str(self.daemon.socket))
                for message in messages:
                    data = json.dumps(message).encode()[: MAX_MESSAGE_BYTES - 1]
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        sock.send(data)
                sock.settimeout(0.02)  # those that it waits for may come never
                with contextlib.suppress(TimeoutError, ConnectionResetError, ProtocolError):
                    while (received := receive_message(sock)) is not None:
                        for descriptor in received[1]:
                            socket.close(descriptor)
                        if isinstance(received[0], Refused):
                            assert one_line(received[0].error), received[0]
        self.served()


class Records(OfDaemon):
    """Records of the ring, and words of flags, as an attached engine may write them."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon)
        self._liar: FakeEngine | None = None

    def case(self, source: random.Random) -> Any:
        made = []
        for _ in range(source.randint(1, 6)):
            index, generation = source.randrange(64), source.choice((0, 1, 2, 2**31))
            digests = source.randbytes(32 * source.randint(0, 3))
            hint = records.Hint(
                index, generation, "liar", len(digests) // 32, source.choice((0, 0, 1, 9)), source.randrange(3),
                BLOCK_TOKENS * 3 + 1, source.choice((0, time.monotonic_ns(), 2**63)), 32, digests, [index],
            )  # fmt: skip
            kind, payload = source.choice(
                (
                    (RecordKind.HINT, encode_hint(hint)),
                    (RecordKind.ASK, records.encode_ask(records.Ask(index, generation, 0, stop=False))),
                    (
                        RecordKind.DONE,
                        records.encode_done(records.Done(index, generation, records.Outcome.LOADED, 0, 0, 0, 0, 0, 0)),
                    ),
                    (RecordKind.SAVED, records.encode_saved(records.Saved(1, 0, False, [index], [b"d" * 33]))),
                )
            )
            made.append(
                ["push", int(source.choice((kind, kind, kind, source.randrange(300)))), flipped(source, payload).hex()]
            )
            if source.random() < 0.4:
                made.append(["flag", index, source.choice((0, 2**64 - 1, source.getrandbits(64)))])
        return made

    def attempt(self, case: Any) -> None:
        liar = self._liar
        if liar is None or liar.liveness.peer(time.monotonic_ns()) is not PeerStatus.ALIVE:
            if liar is not None:
                liar.close()
            liar = self._liar = FakeEngine(self.daemon.socket, engine_id="liar", prefix="liar")
        for what, number, value in case:
            if what == "push":
                liar.producer.push(number, bytes.fromhex(value))
            else:
                liar.table.exchange(number, liar.table.load(number), value)
        self.served()

    def close(self) -> None:
        if self._liar is not None:
            self._liar.close()
        super().close()


class OverHttp(OfDaemon):
    """Requests of the HTTP door: hints and the paths of other announcers."""

    def case(self, source: random.Random) -> Any:
        chain = [digest.hex() for digest in blocks("honest", source.randint(1, 6))]
        payload = source.choice(
            (
                {"block_hashes": chain, "engine": "honest", "ttl_ms": 1000, "priority": 1},
                {"token_ids": list(range(64)), "session_id": "s", "deadline_ms": 5},
                {"session_id": "s"},
            )
        )
        action = {"action_id": "a", "action_type": "kv.prefetch", "action_version": "1.0", "payload": payload}
        body = {"protocol_version": "0.1", "message_id": f"m{source.randrange(9)}", "actions": [action]}
        method = source.choice(("POST", "POST", "POST", "GET", "PUT", "DELETE"))
        path = source.choice(("/v1/kv_hints", "/v1/kv_hints", "/v1/kv_hints/m1?wait_ms=1", "/%00/..", "/"))
        return [method, path, mutated(source, body)]

    def attempt(self, case: Any) -> None:
        method, path, body = case
        status, answer = Door(self.daemon.socket, ANSWER_S).ask(method, path, body)
        assert status < 500 or status == 503, (status, answer)
        assert status < 400 or one_line(str(answer.get("error"))), answer
        self.served()


class Configuration(Target):
    """The daemon's file and options, and the connector's keys."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fuzzed.toml"
        self._daemon = {
            name: value for name, value in DaemonConfig().model_dump(mode="json").items() if value is not None
        }
        self._connector = connector.load({}).model_dump(mode="json")

    def case(self, source: random.Random) -> Any:
        if source.random() < 0.4:
            return ["connector", mutated(source, self._connector)]
        some = dict(source.sample(sorted(self._daemon.items()), source.randint(1, 6)))
        if source.random() < 0.5:
            return ["options", mutated(source, some)]
        lines = [f"{name} = {json.dumps(value)}" for name, value in some.items()]
        return ["file", flipped(source, "\n".join(lines).encode()).hex()]

    def attempt(self, case: Any) -> None:
        kind, value = case
        said = ""
        try:
            if kind == "connector":
                connector.load(value if isinstance(value, dict) else {})
            elif kind == "options":
                resolve(Sources.of(value if isinstance(value, dict) else {}, None, {}))
            else:
                self._file.write_bytes(bytes.fromhex(value))
                resolve(Sources.of({}, self._file, {}))
        except (ConfigError, ValueError) as error:
            said = repr(error) if isinstance(error, ValidationError) else str(error)
        assert not said or one_line(said), said


class Answers(Target):
    """Mooncake's own answers: any code of any key, and values of any size."""

    CODES = (1, 0, 8, 7, 9, -1, -10, -101, -200, -400, -600, -601, -702, -703, -704, -705, -706, -707, -710, -712, -714)
    MORE = (-800, -801, -900, -901, -1010, -1100, -1399, -1600, -1601, -1700, -99_999, 2**31 - 1, -(2**31))

    def case(self, source: random.Random) -> Any:
        count = source.randint(1, 5)
        codes = [source.choice(self.CODES + self.MORE) for _ in range(count)]
        addresses = [source.choice((0, 8, None)) for _ in range(count)]
        return [source.choice(("exist", "get", "put", "media", "remove")), codes, addresses, source.choice((*codes, 8))]

    def attempt(self, case: Any) -> None:
        call, codes, addresses, size = case
        store, client = opened()
        keys = [f"k{number}" for number in range(len(codes))]
        memory = ctypes.create_string_buffer(b"value of" * len(keys))
        where, sizes = [ctypes.addressof(memory) + 8 * number for number in range(len(keys))], [8] * len(keys)
        client.codes, client.size = codes, size
        client.replicas = {key: [address] for key, address in zip(keys, addresses, strict=True)}
        calls: dict[str, Callable[[], Any]] = {
            "exist": lambda: store.exist(keys),
            "get": lambda: store.get_into(keys, where, sizes),
            "put": lambda: store.put_from(keys, where, sizes),
            "media": lambda: store.media(keys, 8),
            "remove": lambda: store.remove(keys),
        }
        try:
            with structlog.testing.capture_logs():
                found = calls[call]()
        except StoreUnavailable:
            return
        if call == "get":
            came = [code == 8 for code in codes]
            assert all(came[at] for at, each in enumerate(found) if each is ErrorClass.OK), found
        assert call == "remove" or len(found) == len(keys)
