"""Names one start of an engine, alike in all its processes."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NAMESPACE = uuid.UUID("8f5a6b0e-6a5c-5f0e-9d9b-2f3f1d6c9a41")


class Start(NamedTuple):
    """One start of an engine, which has the same `incarnation` in all its processes and none in common with another.

    `configured_ns`: when its configuration was made, before vLLM read a file of the model (Unix time).
    """

    engine_id: str
    incarnation: str
    configured_ns: int


def start_of(vllm_config: VllmConfig) -> Start:
    """Name the start of the engine that makes a connector. A later call may name another one.

    instance_id is when the configuration was made (ns), for Ray's data parallelism with a suffix, and reaches the
    workers inside it.  Once both connectors are made, the engine core runs `VllmConfig.__post_init__` again
    (`EngineCoreProc._perform_handshakes`), which sets it anew.
    """
    engine_id, instance = vllm_config.kv_transfer_config.engine_id, vllm_config.instance_id
    made = re.match(r"\d+", instance)
    return Start(engine_id, uuid.uuid5(_NAMESPACE, f"{engine_id}\0{instance}").hex, int(made[0]) if made else 0)
