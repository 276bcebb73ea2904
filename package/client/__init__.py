"""The Python API: a daemon's status and health, prompts announced to it, its mode, and a request of its log.

docs/reference/python.md says what is stable.  It needs neither vLLM, torch and Mooncake nor the daemon's own packages.
"""

from kvprefetch.daemon.door.envelope import Answered, Blocks
from kvprefetch.daemon.door.envelope import Prefetch as Prompt
from kvprefetch.daemon.telemetry.trace_picture import Span
from kvprefetch.shmring.wire.admin import Report, Status

from .api import AsyncClient, Client, Health
from .control import Busy, Unavailable
from .door import Announced
from .explain import Explanation, explain

API_VERSION = (1, 1)  # the second number grows with what is added, the first with what breaks a caller

__all__ = [
    "API_VERSION", "Announced", "Answered", "AsyncClient", "Blocks", "Busy", "Client", "Explanation", "Health",
    "Prompt", "Report", "Span", "Status", "Unavailable", "explain",
]  # fmt: skip
