"""Checks of control messages and settings: the base class, fields with bounds, and one-line errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

SHOWN_CHARACTERS = 120  # of a bad value in an error
# vLLM's envelope of KV hints, which comes with a request or to the HTTP door: its version, and our action in it.
EnvelopeVersion = Literal["0.1"]
ENVELOPE_VERSION: EnvelopeVersion = "0.1"
ACTION, ACTION_VERSION = "kv.prefetch", "1.0"
MAX_SESSION_ID = 256  # characters
MAX_HASHES = 1 << 20  # of a prompt; of blocks there are no more
MAX_AHEAD_MS, TTL_MS = 3_600_000, 5_000  # for how long a prompt is announced, at most and by default
Mode = Literal["on", "shadow", "off"]  # what the daemon does for engines
PRIORITIES = range(-(1 << 31), 1 << 31)  # a hint in the ring has 32 bits for one
Priority = Annotated[int, Field(ge=PRIORITIES[0], le=PRIORITIES[-1])]


def _whole_prefix(text: str) -> str:
    if not text.endswith("@") or not text.isprintable():
        raise ValueError("should be printable and end with '@'")
    return text


# The part of one rank's keys before a block's hash. No hash has the "@" at its end, so no key of one prefix is a key of
# another, longer prefix.
KeyPrefix = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_whole_prefix)]


class Packet(BaseModel):
    """A message or a part of one: each field has its type and bounds, and there are no other fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def first_error(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return the first problem of a failed validation in one line: key, bound, value; with the model both bounds."""
    item = error.errors(include_url=False)[0]
    key = _cut(".".join(str(part) for part in item["loc"])) or "value"
    if item["type"] == "union_tag_invalid":
        return f"type: should be one of {item['ctx']['expected_tags']}: type={shown(item['ctx']['tag'])}"
    text = str(item["ctx"]["error"]) if item["type"] == "value_error" else item["msg"]
    if item["type"] == "value_error" and not item["loc"]:
        return text  # a check of the whole names its fields itself
    if model is not None and (field := model.model_fields.get(key)) and {"ge", "le"} & item.get("ctx", {}).keys():
        bounds = [getattr(each, name) for name in ("ge", "le") for each in field.metadata if hasattr(each, name)]
        text = f"should be {bounds[0]} to {bounds[1]}" if len(bounds) == 2 else text
    message = text[0].lower() + text[1:]
    return f"{key}: {message}" + ("" if item["type"] == "missing" else f": {key}={shown(item['input'])}")


def shown(value: object) -> str:
    """Return a bad value for an error: as Python writes it, cut to SHOWN_CHARACTERS."""
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def living(
    values: Mapping[str, Any], gone: Mapping[str, str], warn: Callable[[str], object], former: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return settings without former keys. Each of those is a warning: with the reason that `gone` has, or with the key
    that `former` has, whose value it is where that is not set itself."""
    for key in values.keys() & gone.keys():
        warn(f"kvprefetch: the key {key} is gone, and ignored: {gone[key]}")
    for key in values.keys() & former.keys():
        warn(f"kvprefetch: the key {key} is {former[key]} now; the next release does not know it any more")
    renamed = {former[key]: value for key, value in values.items() if key in former}
    return renamed | {key: value for key, value in values.items() if key not in gone and key not in former}


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the nearest known word, or nothing when none is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
