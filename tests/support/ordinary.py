"""Acts as an ordinary user where the tests run as root: a command as nobody, a connection as any user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

NOBODY = 65534
_READS = "-all,+dac_read_search"  # the checkout may lie in a folder that only root may enter

# Put before an argv. Empty where the tests run as an ordinary user already.
AS_NOBODY = (
    ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    + [f"--{kind}={_READS}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    if os.geteuid() == 0
    else []
)


@contextlib.contextmanager
def effective_user(uid: int) -> Iterator[None]:
    """Connect as this user, which only root can: the kernel notes the effective user of connect()."""
    "".encode("idna")  # Python imports this codec at the first look-up of a host; the user may not be able to
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
