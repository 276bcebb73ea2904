"""Tries what a process may do here, and prints each try with `allowed` or the kernel's refusal, as JSON.

It is run by the Python of the machine: inside the service's sandbox, and as root outside. Nothing that it tries has an
effect: calls have arguments that do nothing, and each runs in a child.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import resource
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
# Numbers of system calls without a function in libc, on x86-64 and aarch64.
BPF = {"x86_64": 321, "aarch64": 280}[os.uname().machine]
CLONE_NEWNET, CLONE_NEWUSER, CLONE_NEWNS = 0x40000000, 0x10000000, 0x00020000
PTRACE_TRACEME, PER_LINUX32, SCHED_FIFO = 0, 0x0008, 1
EXECUTES = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
TMPFS = b"tmpfs"
# Folders with one of this name in them, into which any user may write: only the sandbox keeps the service out.
OPEN = "of-others"
FOLDERS = ("/etc", "/usr", "/opt", "/var", "/srv", "/run")


def call(name: str, *arguments: object) -> None:
    if getattr(LIBC, name)(*arguments) == -1 and (error := ctypes.get_errno()) not in (errno.EINVAL, errno.EBADF):
        raise OSError(error, name)  # bad arguments are looked at once the call is allowed


def writes(folder: str) -> None:
    path = Path(folder, "kvprefetch-probe")
    path.touch()
    path.unlink()


def set_user_id_bit() -> None:
    path = Path(os.environ.get("STATE_DIRECTORY", "/var/tmp"), "kvprefetch-bit")
    path.touch()
    try:
        path.chmod(0o4755)
    finally:
        path.unlink()


def core_file() -> None:
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        raise PermissionError(errno.EPERM, "no core file")


def reaches(address: str) -> None:
    """Send one datagram to nobody: where IP traffic is filtered, the kernel refuses it."""
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.sendto(b"?", (address, 9))


TRIES: dict[str, Callable[[], object]] = {
    **{f"write {each}": partial(writes, f"{each}/{OPEN}") for each in FOLDERS},
    "list homes": lambda: os.listdir(f"/home/{OPEN}"),
    "see the first process": lambda: Path("/proc/1/cmdline").read_bytes(),
    "open a device": lambda: os.close(os.open(f"/dev/{OPEN}", os.O_RDONLY)),
    "see others' /tmp": lambda: os.stat(f"/tmp/{OPEN}"),
    "mount": lambda: call("mount", TMPFS, b"/mnt", TMPFS, 0, b"size=no-such-size"),
    "chroot": lambda: os.chroot("/"),
    "new user namespace": lambda: call("unshare", CLONE_NEWUSER),
    "new network namespace": lambda: call("unshare", CLONE_NEWNET),
    "new mount namespace": lambda: call("unshare", CLONE_NEWNS),
    "trace": lambda: call("ptrace", PTRACE_TRACEME, 0, 0, 0),
    "load a kernel program": lambda: call("syscall", BPF, 99, 0, 0),
    "restart the machine": lambda: call("syscall", {"x86_64": 169, "aarch64": 142}[os.uname().machine], 0, 0, 0, 0),
    "set the host's name": lambda: socket.sethostname(socket.gethostname()),
    "become root": lambda: os.setuid(0),
    "leave groups": lambda: os.setgroups([]),
    "real-time scheduling": lambda: os.sched_setscheduler(0, SCHED_FIFO, os.sched_param(1)),
    "another personality": lambda: call("personality", PER_LINUX32),
    "a file that runs as its owner": set_user_id_bit,
    "a core file": core_file,
    "memory to write and execute": lambda: mmap.mmap(-1, 4096, prot=EXECUTES).close(),
    "packets": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close(),
    "send to another machine": lambda: reaches("10.97.0.2"),
}
NEEDED: dict[str, Callable[[], object]] = {
    "write its folders": lambda: (writes("/var/lib/kvprefetch"), writes("/run/kvprefetch")),
    "a socket": lambda: [socket.socket(each).close() for each in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)],
    "memory files": lambda: os.close(os.memfd_create("probe", os.MFD_ALLOW_SEALING)),
    "read /proc/meminfo": lambda: Path("/proc/meminfo").read_text(),
    "lower its priority": lambda: os.nice(1),
    "choose its cores": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "send to this machine": lambda: reaches("127.0.0.1"),
}


def outcome(attempt: Callable[[], object]) -> str:
    """Run it in a child; return `allowed` or the error's name."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        said = "allowed"
        try:
            attempt()
        except OSError as error:
            said = errno.errorcode.get(error.errno or 0, repr(error))
        except BaseException as error:
            said = repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    return said or f"ended with status {os.waitpid(child, 0)[1]}"


if __name__ == "__main__":
    found = json.dumps({name: outcome(attempt) for name, attempt in (TRIES | NEEDED).items()}, indent=1)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(found)
    else:
        print(found)
