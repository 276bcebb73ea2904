"""Run a command as an ordinary user: user and group nobody, without privileges, also where the tests run as root."""

from __future__ import annotations

import os

NOBODY = 65534
_READS = "-all,+dac_read_search"  # the checkout may lie in a folder that only root may enter; it gives nothing else

# Put before an argv. Empty where the tests run as an ordinary user already.
AS_NOBODY = (
    ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    + [f"--{kind}={_READS}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    if os.geteuid() == 0
    else []
)
