"""The control socket's file: bound at the start or passed by systemd, and removed at the end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from ..config.model import ConfigError, DaemonConfig, Taken
from .access import group_id

FIRST_FD = 3  # SD_LISTEN_FDS_START of sd_listen_fds(3)
_LOCK_S = 2.0
BRIEFLY_S = 0.05  # on the main loop
# Connections that wait to be accepted; the kernel refuses more. When a daemon restarts, all the processes of a node's
# engines come at once.
_BACKLOG = 1024


class Listener:
    """Owns the listening socket `sock` at `path`, opened by systemd or bound here. Raises ConfigError."""

    def __init__(self, config: DaemonConfig) -> None:
        inherited = inherited_socket()
        self._config, self._inherited = config, inherited is not None  # then the socket unit owns the file
        self.sock = inherited if inherited is not None else listen(config)
        self.path: str = self.sock.getsockname()
        # Open until the end: else a successor's file could get its number once `sock` is closed.
        self._file = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
        self._found = os.fstat(self._file)
        self.gid = self._found.st_gid  # of the users who may attach

    @property
    def there(self) -> bool:
        """Whether the file is still the one of `sock`."""
        return is_at(Path(self.path), self._found)

    def listen_anew(self) -> None:
        """Replace `sock` and its file; the caller closes the old one. Raises ConfigError."""
        if self._inherited:
            raise ConfigError("the socket unit owns it: systemctl restart kvprefetchd.socket")
        self.sock = listen(self._config, BRIEFLY_S)
        os.close(self._file)
        self._file = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
        self._found = os.fstat(self._file)

    def close(self) -> None:
        if not self._inherited:
            take_away(Path(self.path), self._found)
        os.close(self._file)
        self.sock.close()


def inherited_socket(environ: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """Return the control socket that a socket unit opened, or None. Raises ConfigError for another kind of socket."""
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit() or int(count) == 0:
        return None
    if count != "1":
        raise ConfigError(f"one socket is wanted of the socket unit: LISTEN_FDS={count}")
    try:
        sock = socket.socket(fileno=FIRST_FD)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"the socket unit's descriptor is no socket: {error.strerror}: fd={FIRST_FD}") from None
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET or not listens:
        raise ConfigError(
            f"the socket unit must have ListenSequentialPacket= with a path: family={sock.family.name} "
            f"type={sock.type.name}"
        )
    os.set_inheritable(FIRST_FD, False)
    sock.setblocking(False)
    return sock


def listen(
    config: DaemonConfig,
    patience_s: float = _LOCK_S,
    *,
    path: Path | None = None,
    kind: socket.SocketKind = socket.SOCK_SEQPACKET,
) -> socket.socket:
    """Bind the control socket, or another one at `path` for the same users, and replace a dead one.

    Waits `patience_s` for a daemon that binds in the same folder. Raises Taken where another daemon serves there, and
    ConfigError.
    """
    path = path or config.socket
    gid = group_id(config.socket_group) if config.socket_group is not None else -1
    try:
        _make_folders(path.parent)
        with _alone_in(path.parent, patience_s) as folder:
            _check_folder(folder, path)
            _make_way(folder, path, kind)
            return _bound(folder, path, kind, gid, int(config.socket_mode, 8))
    except OSError as error:
        raised = Taken if error.errno == errno.EADDRINUSE else ConfigError
        cure = "--socket names another place"
        if gid != -1 and error.errno == errno.EPERM:
            cure = "the daemon's user must be a member of that group"
        raise raised(
            f"socket: cannot be bound: {error.strerror or error}: socket={str(path)!r} "
            f"socket_group={config.socket_group!r}; {cure}"
        ) from None


def check_place(path: Path) -> None:
    """Raise ConfigError where `listen` could not bind, as far as one can know without making a file."""
    above = next(each for each in path.parents if each.exists())
    try:
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"this user may not write to {above}")
        if above == path.parent:
            with _opened(above, os.O_DIRECTORY) as folder:
                _check_folder(folder, path)
                if path.exists():
                    _check_socket(folder, path)
    except OSError as error:
        raise ConfigError(f"socket: cannot be bound: {error.strerror}: socket={str(path)!r}") from None


def take_away(path: Path, bound: os.stat_result) -> None:
    """Remove the socket file that was `bound`, unless another daemon has bound its own there since.

    A file that cannot be removed stays; the next daemon replaces it.
    """
    with contextlib.suppress(OSError), _alone_in(path.parent) as folder:
        if os.path.samestat(os.stat(path.name, dir_fd=folder, follow_symlinks=False), bound):
            os.unlink(path.name, dir_fd=folder)


def is_at(path: Path, bound: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), bound)
    except OSError:
        return False


def _make_folders(folder: Path) -> None:
    """Make missing folders, which all users may enter: the socket's own mode decides who may connect."""
    for each in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, 0o700)
            with _opened(each, os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
                if os.fstat(fd).st_uid == os.geteuid():  # else another user replaced it meanwhile
                    os.fchmod(fd, 0o755)


@contextlib.contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _alone_in(folder: Path, patience_s: float = _LOCK_S) -> Iterator[int]:
    """Open the folder while no other daemon makes or removes a socket in it.

    Otherwise one of two daemons that start at once would take the other's socket, bound and not yet listening, for a
    dead one. A daemon holds the lock for a moment; a process that holds it for longer is no daemon.
    """
    deadline = time.monotonic() + patience_s
    with _opened(folder, os.O_DIRECTORY) as fd:
        while True:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        yield fd


def _check_folder(folder: int, path: Path) -> None:
    """Refuse a folder in which another user could replace our socket: as root any, else one of a stranger in a folder
    where everybody may make some, as in /tmp."""
    found = os.fstat(folder)
    open_to_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    bad = strange = found.st_uid not in (0, os.geteuid())
    if os.geteuid() == 0:
        bad = strange or bool(open_to_others)
    elif strange:
        bad = bool(os.stat("..", dir_fd=folder).st_mode & stat.S_ISVTX)
    if bad:
        raise ConfigError(
            f"socket: other users could replace it in its folder: socket={str(path)!r} folder_uid={found.st_uid} "
            f"folder_mode={stat.S_IMODE(found.st_mode):04o}: name a folder that root or this user owns and nobody else "
            "may write to, or start the daemon as the folder's user"
        )


def _check_socket(folder: int, path: Path) -> None:
    """Refuse a file that is no socket. Raises FileNotFoundError where there is none."""
    if not stat.S_ISSOCK(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise ConfigError(f"socket: the path exists and is not a socket: socket={str(path)!r}")


def _make_way(folder: int, path: Path, kind: socket.SocketKind) -> None:
    """Remove a dead socket. Raises Taken for a live one, ConfigError for another file."""
    try:
        _check_socket(folder, path)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)  # a hung daemon's full queue would make us wait
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path.name, dir_fd=folder)
            return
        except BlockingIOError:
            pass
    raise Taken(f"socket: another daemon is serving: socket={str(path)!r}; --socket names another place")


def _bound(folder: int, path: Path, kind: socket.SocketKind, gid: int, mode: int) -> socket.socket:
    """Return a socket that listens at a free path. Raises OSError, and then leaves no file there.

    Nobody can connect before it listens. Group and mode are set on the opened file, through /proc: set by path, they
    could go to the target of a link that another user put there.
    """
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC))
        sock.bind(str(path))
        with _opened(path.name, os.O_PATH | os.O_NOFOLLOW, folder) as file:
            found = os.fstat(file)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError(errno.ESTALE, "another file is in its place")
            undo.callback(os.unlink, path.name, dir_fd=folder)
            if gid != -1:
                os.chown(f"/proc/self/fd/{file}", -1, gid)
            os.chmod(f"/proc/self/fd/{file}", mode)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        undo.pop_all()
    return sock
