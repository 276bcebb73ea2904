"""Remembers which user a namespace of store keys belongs to, and its fingerprint, in a file beside the disk's values.

A key is a rank's prefix and the hash of a block in hex digits.  Every prefix ends with "@" (`KeyPrefix`), which is no
hex digit, so different prefixes have no key in common.  A namespace is the prefix that all ranks of an engine share,
with `*` for their numbers.

A namespace belongs to the user of the engine that attached with it first, until `kvprefetchd store purge` has removed
its values while no engine used it.  This holds for engines of this daemon, not for other clients of a store.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...shmring.wire.admin import KnownNamespaces, Namespace
from ...shmring.wire.checks import Fingerprint, first_error
from .settings import SettingsError

FILE = "namespaces.json"
MAX_NAMESPACES, MAX_OF_ONE_UID = 4096, 256
_MAX_FILE_BYTES = 32 << 20  # more than MAX_NAMESPACES of the largest take
_PAGE_BYTES = 48 << 10  # of an answer, which must fit a control message
_CLOSE_S = 2.0
_RANK = re.compile(r"@([tp]p_rank):[0-9*]+(?=@)")


def name_of(key_prefix: str) -> str:
    """Return the namespace of a rank's key prefix: `…@tp_rank:3@…` and `…@tp_rank:*@…` give the same one."""
    return _RANK.sub(r"@\1:*", key_prefix)


class NamespaceTaken(ValueError):
    """An engine may not use a namespace; one line that says why, and what to do."""


class Namespaces:
    """The namespaces that engines attached with, each with its user.  For the main loop only.

    `folder` is the disk's, and holds the file; without it a restart forgets all.  `clock_s`: Unix time.
    Raises SettingsError for a file that cannot be read.
    """

    def __init__(self, folder: Path | None, log: Any, *, clock_s: Callable[[], float] = time.time) -> None:
        self._clock_s = clock_s
        self._file = _File(folder / FILE, log) if folder is not None else None
        self._known = {each.name: each for each in self._file.read()} if self._file is not None else {}

    def check(self, uid: int, names: Collection[str], *, shared: bool) -> None:
        """Raise NamespaceTaken where one of them belongs to another user, unless users share them (`shared`)."""
        for name in sorted(names):
            if (known := self._known.get(name)) is not None and known.uid != uid and not shared:
                raise NamespaceTaken(
                    f"the namespace belongs to another user: namespace={name!r} uid={uid} owner_uid={known.uid}: give "
                    f'the engine a cache_prefix of its own, or let users share (namespaces = "shared" in the daemon\'s '
                    f"configuration), or have root or the daemon's user free it once no engine uses it "
                    f"(kvprefetchd store purge --prefix {name!r} --yes)"
                )

    def claim(self, uid: int, namespaces: Mapping[str, Fingerprint], *, shared: bool, in_use: Collection[str]) -> None:
        """Note that an engine of this user attaches with these namespaces and fingerprints.

        A namespace without a user is this user's from now on.  Beyond the limits the user loses the namespace, of those
        not `in_use`, with the oldest attachment.  Raises NamespaceTaken, and then notes nothing.
        """
        self.check(uid, namespaces, shared=shared)
        now_s, known = self._clock_s(), dict(self._known)
        for name, fingerprint in namespaces.items():
            new = Namespace(name=name, uid=uid, first_attached_s=now_s, last_attached_s=now_s)
            old = known.pop(name, new)  # goes to the end: the oldest attachment comes first
            said = fingerprint or old.fingerprint
            known[name] = old.model_copy(update={"last_attached_s": now_s, "fingerprint": said})
        mine = [each.name for each in known.values() if each.uid == uid]
        spare = [name for name in mine if name not in namespaces and name not in in_use]
        while len(mine) > MAX_OF_ONE_UID or len(known) > MAX_NAMESPACES:
            if not spare:
                raise NamespaceTaken(
                    f"too many namespaces: uid={uid} has={len(mine)} max={MAX_OF_ONE_UID} in_all={len(known)} "
                    f"max={MAX_NAMESPACES}: free some (kvprefetchd store stat, kvprefetchd store purge --prefix …)"
                )
            mine.remove(spare[0])
            del known[spare.pop(0)]
        self._keep(known)

    def known(self, key_prefixes: Iterable[str]) -> list[Namespace]:
        """Return the known namespaces of these prefixes."""
        names = dict.fromkeys(map(name_of, key_prefixes))
        return [self._known[name] for name in names if name in self._known]

    def free(self, gone: Iterable[Namespace]) -> None:
        """Forget these namespaces, which have no values left, unless an engine attached with one since."""
        names = {each.name for each in gone if self._known.get(each.name) is each}
        if names:
            self._keep({name: each for name, each in self._known.items() if name not in names})

    def page(self, uid: int | None, after: str) -> KnownNamespaces:
        """Return the namespaces of one user (None: of all users) after the name `after`, as many as fit a message."""
        names = sorted(name for name, each in self._known.items() if name > after and uid in (None, each.uid))
        page, room = [], _PAGE_BYTES
        for name in names:
            room -= len(self._known[name].model_dump_json().encode())
            if room < 0:
                break
            page.append(self._known[name])
        return KnownNamespaces(namespaces=page, more=len(page) < len(names))

    def close(self) -> None:
        """Wait at most _CLOSE_S for the file to be written."""
        if self._file is not None:
            self._file.close()

    def _keep(self, known: dict[str, Namespace]) -> None:
        self._known = known
        if self._file is not None:
            self._file.write(list(known.values()))


class _Content(BaseModel):
    """The file's content."""

    model_config = ConfigDict(strict=True)

    version: Literal[1]
    namespaces: Annotated[list[Namespace], Field(max_length=MAX_NAMESPACES)]


class _File:
    """The file; a thread writes it, since a disk that stands still must not stop the main loop."""

    def __init__(self, path: Path, log: Any) -> None:
        self._path, self._log = path, log
        self._lock = threading.Lock()
        self._wanted: list[Namespace] | None = None  # content not written yet
        self._thread: threading.Thread | None = None

    def read(self) -> list[Namespace]:
        """Return the content written last, nothing where there is no file.  Raises SettingsError.

        An unreadable file is an error: to forget it would give each namespace to the next user.
        """
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_FILE_BYTES:
                    raise ValueError(f"should be a file: size_bytes={found.st_size} max={_MAX_FILE_BYTES}")
                return _Content.model_validate_json(file.read(_MAX_FILE_BYTES + 1)).namespaces
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            why = first_error(error) if isinstance(error, ValidationError) else getattr(error, "strerror", "") or error
        raise SettingsError(
            f"disk: the file of namespaces and their users cannot be read: {why}: file={str(self._path)!r}; mend "
            f"it, or remove it: then a namespace belongs to the first user who attaches with it"
        )

    def write(self, namespaces: list[Namespace]) -> None:
        with self._lock:
            self._wanted = namespaces
        self._start()

    def close(self) -> None:
        """Write the rest, also after a failure, and wait at most _CLOSE_S for it."""
        self._start()
        if (thread := self._thread) is not None:
            thread.join(_CLOSE_S)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and self._wanted is not None:
                self._thread = threading.Thread(target=self._run, name="namespaces", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if (wanted := self._wanted) is None:
                    self._thread = None
                    return
            try:
                self._replace(wanted)
            except OSError as error:
                why = f"{error.strerror or error}: file={str(self._path)!r}"
                self._log.warning("namespaces.unwritten", error=why)
                with self._lock:
                    self._thread = None
                return  # the next change tries again, or close()
            with self._lock:
                if self._wanted is wanted:
                    self._wanted = None

    def _replace(self, namespaces: list[Namespace]) -> None:
        """Replace the whole file: a reader finds the old content or the new, also after a power failure."""
        content = {"version": 1, "namespaces": [each.model_dump() for each in namespaces]}
        fresh = self._path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
