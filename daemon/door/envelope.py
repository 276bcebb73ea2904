"""What callers of the HTTP door send and get: the field's envelope and its one action."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from ...shmring.wire.admin import Step
from ...shmring.wire.checks import (
    MAX_AHEAD_MS,
    MAX_HASHES,
    MAX_SESSION_ID,
    TTL_MS,
    EnvelopeVersion,
    Priority,
    first_error,
)

MAX_ACTIONS = 64
MAX_TOKENS = 1 << 21
# Of one body, which takes up to 300 bytes of memory for a list or an object, and 70 for any other value.
MAX_PARTS, MAX_VALUES = 1 << 14, MAX_TOKENS + (1 << 14)

# The first bad item ends the check: an error for each of a million would take a gigabyte.
TokenId = Annotated[int, Field(ge=0, lt=1 << 63)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,64}$")]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]


class Said(BaseModel):
    """Something that a caller sends: each field has its type and bounds, and fields that are not ours are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Prefetch(Said):
    """The payload of `kv.prefetch`: a prompt.

    As `token_ids`, as the whole `block_hashes` (hex) of its blocks, or as the newest one of a session (`session_id`).

    `model`, `engine` (an engine's id or its start) and `dp_rank` say which attached engine it is for; each may be
    missing.  The request is expected in `expected_in_ms`, and after `ttl_ms` no more.  Of what waits, the smallest
    `priority` goes first.  `max_bytes`: to stage for it.
    """

    model: str = Field(default="", max_length=1024)
    engine: str = Field(default="", max_length=256)
    dp_rank: int | None = Field(default=None, ge=0, le=1 << 20)
    token_ids: TokenIds | None = None
    block_hashes: Annotated[list[Digest], Field(min_length=1, max_length=MAX_HASHES, fail_fast=True)] | None = None
    session_id: str | None = Field(default=None, min_length=1, max_length=MAX_SESSION_ID)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=4096)
    lora_name: str | None = None
    expected_in_ms: int = Field(default=0, ge=0, le=MAX_AHEAD_MS)
    ttl_ms: int = Field(default=TTL_MS, ge=1, le=MAX_AHEAD_MS)
    priority: Priority = 0
    max_bytes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_whole(self) -> Prefetch:
        both, neither = None not in (self.token_ids, self.block_hashes), (self.token_ids or self.block_hashes) is None
        if both or (neither and self.session_id is None):
            given = "both" if both else "none"
            raise ValueError(f"one of token_ids, block_hashes and session_id is wanted: given={given}")
        if self.lora_name and self.token_ids is not None:
            text = "the names of its blocks have a LoRA's content: announce session_id"
            raise ValueError(f"lora_name: {text}: lora_name={self.lora_name!r:.80}")
        if self.block_hashes is not None and len({len(each) for each in self.block_hashes}) > 1:
            lengths = sorted({len(each) // 2 for each in self.block_hashes})
            raise ValueError(f"block_hashes: differ in length: bytes={lengths}")
        return self


class Action(Said):
    """One action of an envelope. One of another type or version is ignored."""

    action_id: Name
    action_type: str = Field(max_length=128)
    action_version: str = Field(max_length=32)
    payload: dict[str, Any] = Field(default_factory=dict)


class Envelope(Said):
    """What `POST /v1/kv_hints` takes."""

    protocol_version: EnvelopeVersion
    message_id: Name
    actions: list[Action] = Field(min_length=1, max_length=MAX_ACTIONS)


class Blocks(BaseModel):
    """Blocks of an announced prompt, by what became of them.

    `announced`; of these `staged` already, `started` to be fetched, `missing` in the store; of the started ones, once
    it is completed, `fetched`, or without room (`no_room`), or `failed`.
    """

    announced: int = 0
    staged: int = 0
    started: int = 0
    missing: int = 0
    fetched: int = 0
    no_room: int = 0
    failed: int = 0

    @property
    def found(self) -> int:
        """The blocks that are in staging, once it is completed."""
        return self.staged + self.fetched


class Answered(BaseModel):
    """The outcome of one action until now.

    accepted, clipped (a bound cut it), deferred (it waits for its turn), rejected, missing (the store has nothing of
    it) or ignored; then completed; then, of its request, used, late (it came before the fetch was over), or expired.
    `bytes`: of the blocks that were started.
    """

    action_id: str
    outcome: Literal[Step, "deferred", "ignored"]
    reason: str = ""
    engine: str = ""
    blocks: Blocks = Field(default_factory=Blocks)
    bytes: int = 0

    @property
    def done(self) -> bool:
        """Whether it is staged as far as it came, or nothing more will become of it."""
        return self.outcome not in ("accepted", "clipped", "deferred")


class Answer(BaseModel):
    """What the door answers about one message."""

    message_id: str
    actions: list[Answered]


class Problem(BaseModel):
    """What the door answers to a request that it does not serve: one line with field, value and bound."""

    error: str


class Bad(Exception):
    """A request that cannot be served: the HTTP status, and one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def parsed(model: type[Said], body: bytes) -> Any:
    """Return the body as this model has it. Raises Bad."""
    parts, values = body.count(b"[") + body.count(b"{"), body.count(b",")
    if parts > MAX_PARTS or values > MAX_VALUES:
        bounds = f"lists={parts} max={MAX_PARTS} values={values} max={MAX_VALUES}"
        raise Bad(400, f"the JSON has too many lists and objects, or values: {bounds}")
    try:
        return model.model_validate(from_json(body, cache_strings="keys"))  # without a tree of the whole beside it
    except ValidationError as error:
        raise Bad(400, first_error(error, model)) from None
    except ValueError as error:
        raise Bad(400, f"the body is not JSON: {error}"[:400]) from None


def payload(action: Action) -> Prefetch:
    """Return the payload of an action of our type. Raises Bad."""
    try:
        return Prefetch.model_validate(action.payload)
    except ValidationError as error:
        raise Bad(400, f"action {action.action_id}: {first_error(error, Prefetch)}") from None
