"""What a removal takes: keys of a namespace, and their files on a disk tier, which outlive what the master knows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .namespaces import name_of

_OF_A_KEY = rb"[ -~\x80-\xff]"


class Removal(NamedTuple):
    """Whether every key is `gone` (its truth value), and how many `keys` were removed."""

    gone: bool
    keys: int

    def __bool__(self) -> bool:
        return self.gone


def patterns(prefixes: Sequence[str]) -> tuple[str, str]:
    """Return regular expressions that match a key, one of these prefixes and hex digits: Mooncake's, anchored, and
    Python's.

    They match the keys of all ranks: a part that stayed would be taken for a part of a block that is stored later.
    """
    names = dict.fromkeys(map(name_of, prefixes))
    # Every special character of ECMAScript's grammar, and nothing else: std::regex refuses needless escapes of letters.
    theirs = [re.sub(r"([\\^$.|?*+()\[\]{}])", r"\\\1", name) for name in names]
    of_any = [
        "|".join(re.sub(r"@([tp]p_rank):\\\*(?=@)", r"@\1:[0-9*]+", each) for each in escaped)
        for escaped in (theirs, map(re.escape, names))
    ]
    return f"^(?:{of_any[0]})[0-9a-fA-F]+$", f"(?:{of_any[1]})[0-9a-fA-F]+"


def purge(directory: Path, a_key: str, checked: set[str]) -> int:
    """Delete the bucket files with a key that `a_key`, a regular expression, matches as a whole; the number deleted.

    `checked` are names already looked at.  Mooncake's bucket backend writes `<id>.bucket` with the values and
    `<id>.meta` with the keys as plain bytes (protobuf), control characters before and behind; the embedded store keeps
    one key in each.  The .meta goes first: a .bucket without one is ignored at the next start.
    """
    pattern = re.compile(rb"(?<!%b)%b(?!%b)" % (_OF_A_KEY, a_key.encode(), _OF_A_KEY))
    deleted = 0
    for meta in directory.glob("*.meta"):
        if meta.name in checked:
            continue
        with contextlib.suppress(FileNotFoundError):  # evicted by the tier meanwhile
            content = meta.read_bytes()
            if pattern.search(content):
                meta.unlink()
                meta.with_suffix(".bucket").unlink(missing_ok=True)
                deleted += 1
            elif content:  # an empty one is being written
                checked.add(meta.name)
    return deleted
