"""Opens the disk's folder: the daemon's user owns it, and nobody else may enter it, for values are made of prompts."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Any

from .settings import SettingsError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_folder(path: Path, log: Any) -> int:
    """Return a descriptor of the folder, made if it is missing and closed to other users. Raises SettingsError.

    A missing parent stays missing: it may be a mount that failed, and values would fill the file system below it.
    A folder that others could write to must be empty: its content may be theirs.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _close_to_others(fd, path, log)
        except BaseException:
            os.close(fd)
            raise
        return fd
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.ENOENT:
            why = "the folder above it is not there; make it, or mount it"
        elif error.errno == errno.EACCES:
            why += f"; make a folder that belongs to the daemon's user (uid={os.geteuid()}), or name another one"
        raise SettingsError(f"disk: cannot be used: {why}: disk={str(path)!r}") from None


def _close_to_others(fd: int, path: Path, log: Any) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise SettingsError(
            f"disk: the folder belongs to another user: disk={str(path)!r} uid={found.st_uid} daemon_uid={os.geteuid()}"
            ": chown it to the daemon's user, or name a new folder in one that this user may write to"
        )
    names = os.listdir(fd)  # raises for a folder that cannot be read to its end; Mooncake's set-up would not
    mode = stat.S_IMODE(found.st_mode)
    if not mode & _OTHERS and mode & stat.S_IRWXU == stat.S_IRWXU:
        return
    if mode & _OTHERS_WRITE and names:
        raise SettingsError(
            f"disk: others may write to the folder, so its values may be anybody's: disk={str(path)!r} mode={mode:04o}"
            ": empty it, or chmod 700 it if you trust what it holds"
        )
    os.fchmod(fd, 0o700)
    # Nobody else comes in from here on, so that a name cannot become a link to another file meanwhile.
    for name in names:
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & _OTHERS:
            os.chmod(name, stat.S_IMODE(status.st_mode) & ~_OTHERS, dir_fd=fd)
    log.warning("disk.mended", folder_mode=f"{mode:04o}", files=len(names))
