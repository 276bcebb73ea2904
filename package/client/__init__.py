"""The Python API: a daemon's status and health, prompts announced to it, and one request of its log explained.

docs/reference/python.md says what is stable.  It needs neither vLLM, torch and Mooncake nor the daemon's own packages.
"""

from kvprefetch.daemon.door.envelope import Answered, Blocks
from kvprefetch.daemon.door.envelope import Prefetch as Prompt
from kvprefetch.daemon.telemetry.trace_picture import Span
from kvprefetch.shmring.wire.admin import Status

from .api import Client, Health
from .control import Busy, Unavailable
from .door import Announced
from .explain import Explanation, explain

API_VERSION = (1, 0)  # the second number grows with what is added, the first with what breaks a caller

__all__ = [
    "API_VERSION", "Announced", "Answered", "Blocks", "Busy", "Client", "Explanation", "Health", "Prompt", "Span",
    "Status", "Unavailable", "explain",
]  # fmt: skip
