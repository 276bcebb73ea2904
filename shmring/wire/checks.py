"""Checks of control messages and settings: the base class, fields with bounds, and one-line errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

SHOWN_CHARACTERS = 120  # of a bad value, in the line that names it

Fingerprint = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")], Annotated[str, Field(pattern=r"^[ -~]{0,64}$")]],
    Field(max_length=16),
]


def _whole_prefix(text: str) -> str:
    if not text.endswith("@") or not text.isprintable():
        raise ValueError("should be printable and end with '@'")
    return text


# What stands before a block's hash in the keys of one rank. The "@" at its end, which no hash has, keeps the keys of
# two prefixes apart: neither can be longer than the other by digits that could be a hash.
KeyPrefix = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_whole_prefix)]


class Packet(BaseModel):
    """A message, or part of one: every field has the type and the bounds that it says, and there is no other."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def first_error(error: ValidationError) -> str:
    """The first problem of a failed validation in one line: key, bound, value."""
    item = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in item["loc"]) or "value"
    text = str(item["ctx"]["error"]) if item["type"] == "value_error" else item["msg"]
    message = text[0].lower() + text[1:]
    if item["type"] == "missing":
        return f"{key}: {message}"
    return f"{key}: {message}: {key}={shown(item['input'])}"


def shown(value: object) -> str:
    """How a bad value stands in an error: as Python writes it, and no longer than anyone reads."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean …?" when one of the known words is near, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
