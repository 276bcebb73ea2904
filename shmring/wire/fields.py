"""What messages on the control socket have in common: their base class, and fields that several of them have."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

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
