"""The routes of the HTTP door, as a WSGI application: hints of the field's envelope."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
import urllib.parse
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from threading import BoundedSemaphore, Lock
from typing import Any, BinaryIO, NamedTuple

from pydantic import BaseModel

from ...kv.hashing import BlockHasher, CannotHash
from ...shmring._atomics import repeats
from ...shmring.wire.admin import Announce, Caller, Engine, EngineQuery
from ...shmring.wire.checks import ACTION, ACTION_VERSION, MAX_HASHES
from ...shmring.wire.records import session_digest
from ..control.budget import Budget
from .envelope import (
    Action,
    Answer,
    Answered,
    Bad,
    Envelope,
    Prefetch,
    Problem,
    parsed,
    payload,
)
from .link import DaemonConnection
from .messages import Message, Messages

Environ = dict[str, Any]
Start = Callable[[str, list[tuple[str, str]]], Any]

CALLER = "kvprefetch.caller"  # of a Unix socket's connection, in the WSGI environment; None: over TCP
MAX_BODY = 16 << 20
BODY_S = 10  # for the bodies that came before
FIRST_S = 0.5  # for the store's answer about all prompts of a message; the others are deferred
MAX_WAIT_MS = 30_000
WAITERS = 8  # callers of each method that wait at a time; others get the answer of now
RATE, BURST = 200.0, 400.0  # actions a second of one user
_made = lru_cache(64)(BlockHasher)  # one for each way to hash


class Route(NamedTuple):
    """One route: what it takes and answers, for the server and for its description (docs/reference/openapi.json)."""

    method: str
    path: str
    summary: str
    takes: type[BaseModel] | None
    answers: type[BaseModel]
    status: int


ROUTES = (
    Route("POST", "/v1/kv_hints", "announce prompts before their requests", Envelope, Answer, 202),
    Route("GET", "/v1/kv_hints/{message_id}", "what became of them; ?wait_ms= waits for an end", None, Answer, 200),
)


class App:
    """The application. `token`: what a caller over TCP has to send; such a caller is an operator."""

    def __init__(self, link: DaemonConnection, messages: Messages, token: bytes = b"") -> None:
        self._link, self._messages, self._token = link, messages, token
        self._rate, self._rating = Budget(RATE / 1e9, BURST), Lock()
        self._posting, self._looking = BoundedSemaphore(WAITERS), BoundedSemaphore(WAITERS)
        self._body = Lock()  # one body is in memory at a time: parsed, the largest one has ten times its size

    def __call__(self, environ: Environ, start: Start) -> Iterable[bytes]:
        try:
            status, body = self._serve(environ)
        except Bad as error:
            status, body = error.status, Problem(error=str(error)).model_dump()
        text = json.dumps(body).encode() + b"\n"
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(text)))]
        headers += {401: [("WWW-Authenticate", "Bearer")], 429: [("Retry-After", "1")]}.get(status, [])
        start(f"{status} {HTTPStatus(status).phrase}", headers)
        return [text]

    def _serve(self, environ: Environ) -> tuple[int, dict[str, Any]]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        route, name = _found(method, path)
        caller = self._caller(environ)
        if route.method == "GET":
            return route.status, self._look(caller, name, environ.get("QUERY_STRING", ""))
        if not self._body.acquire(timeout=BODY_S):
            raise Bad(503, f"the bodies of others take too long: timeout_s={BODY_S}; try again")
        refused: tuple[int, str] | None = None
        try:
            message = self._taken(caller, environ["wsgi.input"])
        except Bad as error:  # it keeps the body in memory, through the frames that it left
            refused = error.status, str(error)
        finally:
            self._body.release()
        if refused is not None:
            raise Bad(*refused)
        return route.status, self._begun(message).model_dump()

    def _taken(self, caller: Caller, body: BinaryIO) -> Message:
        """Announce what a body says; nothing of it stays in memory."""
        data = body.read()  # waitress let no larger one than MAX_BODY pass
        envelope: Envelope = parsed(Envelope, data)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if (known := self._messages.get(caller, envelope.message_id)) is None:
            return self._announce(caller, envelope, digest)
        if known.body != digest:
            text = "another body had this message_id: give each message a new one, and an old one to a repetition alone"
            raise Bad(409, f"{text}: message_id={envelope.message_id!r}")
        return known

    def _caller(self, environ: Environ) -> Caller:
        if (caller := environ[CALLER]) is not None:
            assert isinstance(caller, Caller)
            return caller
        scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), self._token):
            raise Bad(401, "this port wants the header Authorization: Bearer TOKEN, with the token of door_token")
        return Caller(uid=os.geteuid(), groups=[])

    # --- announcing -------------------------------------------------------------------------------------------------

    def _announce(self, caller: Caller, envelope: Envelope, body: bytes) -> Message:
        with self._rating:
            may = self._rate.take(caller.uid, len(envelope.actions), time.monotonic_ns())
        if not may:
            raise Bad(429, f"too many actions: uid={caller.uid} actions={len(envelope.actions)} max_a_second={RATE:g}")
        wanted = [payload(each) if _ours(each) else None for each in envelope.actions]
        answers = [_first(each) for each in envelope.actions]
        message, errors = self._messages.add(caller, envelope.message_id, body, answers), list[tuple[int, str]]()
        engines: dict[tuple[Any, ...], Engine] = {}  # most actions of a message are for one
        for number, prompt in enumerate(wanted):
            if prompt is not None:
                try:
                    where = prompt.engine, prompt.model, prompt.dp_rank
                    if where not in engines:
                        engines[where] = self._link.engine(_query(caller, prompt))
                    self._announce_one(message, number, caller, prompt, engines[where])
                except Bad as error:
                    errors.append((error.status, str(error)))  # it would keep this frame, and the body, in memory
                    message.tell(number, outcome="rejected", reason=str(error))
        if errors and len(errors) == sum(each is not None for each in wanted):
            self._messages.forget(message)
            raise Bad(*errors[0])
        return message

    def _announce_one(self, message: Message, action: int, caller: Caller, prompt: Prefetch, engine: Engine) -> None:
        message.tell(action, engine=engine.engine)
        session = prompt.session_id if (prompt.token_ids or prompt.block_hashes) is None else None
        hashes, size = self._digests(engine, prompt) if session is None else (b"", 1)
        if not hashes and session is None:
            message.tell(action, outcome="missing", reason="the prompt has no whole block that a request could load")
            return
        order = Announce(
            caller=caller,
            number=self._messages.number(message, action, engine.block_bytes),
            name=message.message_id,
            engine=engine.engine,
            epoch=engine.epoch,
            hashes=len(hashes) // size,
            hash_bytes=size,
            session="" if session is None else session_digest(session).hex(),
            expected_ms=prompt.expected_in_ms,
            ttl_ms=prompt.ttl_ms,
            priority=prompt.priority,
            most_blocks=_most_blocks(prompt, engine),
        )
        self._link.announce(order, hashes)

    def _digests(self, engine: Engine, prompt: Prefetch) -> tuple[bytes, int]:
        """Return the digests of the blocks that a request could load, joined, and the bytes of each. Raises Bad."""
        count = len(prompt.block_hashes or ()) or len(prompt.token_ids or ()) // engine.hash_tokens
        if count > (most := engine.max_blocks * (engine.block_tokens // engine.hash_tokens)) + 1:
            raise Bad(400, f"the prompt is longer than engine {engine.engine} takes: hashes={count} max={most}")
        if prompt.block_hashes is not None:
            hashes, size = bytes.fromhex("".join(prompt.block_hashes)), len(prompt.block_hashes[0]) // 2
            if repeats(hashes, size):
                raise Bad(400, f"block_hashes: name a block twice, as no prompt does: hashes={count}")
            return hashes, size
        hasher = _hasher(engine)
        return hasher(prompt.token_ids or (), prompt.cache_salt), hasher.digest_bytes

    # --- looking ----------------------------------------------------------------------------------------------------

    def _look(self, caller: Caller, name: str, query: str) -> dict[str, Any]:
        wait_s = _wait_ms(query) / 1e3
        if (message := self._messages.get(caller, name)) is None:
            raise Bad(404, f"no such message of this caller, or it was forgotten: message_id={name!r:.140}")
        return self._wait(message, lambda each: each.done, wait_s, self._looking).model_dump()

    def _begun(self, message: Message) -> Answer:
        return self._wait(message, lambda each: each.outcome != "deferred", FIRST_S, self._posting)

    def _wait(
        self, message: Message, ready: Callable[[Answered], bool], most_s: float, places: BoundedSemaphore
    ) -> Answer:
        """Return the answer about a message, at once where too many callers wait already."""
        if not places.acquire(blocking=False):
            return self._messages.wait(message, ready, 0.0)
        try:
            return self._messages.wait(message, ready, most_s)
        finally:
            places.release()


def _found(method: str, path: str) -> tuple[Route, str]:
    """Return the route of a request, and the name at the end of its path. Raises Bad."""
    heads = {route: route.path.removesuffix("{message_id}") for route in ROUTES}  # an id may have a slash
    fits = [each for each, head in heads.items() if path == head or (head.endswith("/") and path.startswith(head))]
    for route in fits:
        if method == route.method:
            return route, path.removeprefix(heads[route])
    if fits:
        raise Bad(405, f"this path takes another method: method={method!r:.20} path={path!r:.80}")
    raise Bad(404, f"no such path: path={path!r:.80}; there are {', '.join(sorted({each.path for each in ROUTES}))}")


def _ours(action: Action) -> bool:
    return action.action_type == ACTION and action.action_version == ACTION_VERSION


def _first(action: Action) -> Answered:
    if _ours(action):
        return Answered(action_id=action.action_id, outcome="deferred")
    text = f"only {ACTION}@{ACTION_VERSION} is known: {action.action_type!r:.80}@{action.action_version!r:.20}"
    return Answered(action_id=action.action_id, outcome="ignored", reason=text)


def _query(caller: Caller, prompt: Prefetch) -> EngineQuery:
    return EngineQuery(caller=caller, engine=prompt.engine, model=prompt.model, dp_rank=prompt.dp_rank)


def _hasher(engine: Engine) -> BlockHasher:
    """Return what hashes prompts as this engine does. Raises Bad."""
    start, probe = bytes.fromhex(engine.hash_start), bytes.fromhex(engine.hash_probe)
    try:
        return _made(engine.hash_algorithm, start, engine.hash_tokens, probe)
    except CannotHash as error:
        raise Bad(422, f"engine {engine.engine}: {error}") from None


def _most_blocks(prompt: Prefetch, engine: Engine) -> int:
    return MAX_HASHES if prompt.max_bytes is None else min(MAX_HASHES, max(1, prompt.max_bytes // engine.block_bytes))


def _wait_ms(query: str) -> int:
    """Return the time to wait. Raises Bad."""
    [text] = urllib.parse.parse_qs(query).get("wait_ms", ["0"])[:1]
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) <= MAX_WAIT_MS):
        raise Bad(400, f"wait_ms: should be 0 to {MAX_WAIT_MS}: wait_ms={text!r:.40}")
    return int(text)
