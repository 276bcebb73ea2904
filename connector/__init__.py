"""The vLLM plugin: hints at arrival, claims and loads staged blocks, saves through staging.

Importing it opens nothing and imports neither vLLM nor torch: vLLM resolves the class in processes that never use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KVPrefetchConnector

__all__ = ["KVPrefetchConnector", "register"]

_NAME = "KVPrefetchConnector"


def register() -> None:
    """Make the connector known by its name (entry point of `vllm.general_plugins`); may be called twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, __name__, _NAME)


def __getattr__(name: str) -> Any:
    """Import the class when it is asked for (`kv_connector_module_path` names this package).

    Raises ValueError, in one line, with a vLLM that is not served; the imports might fail with it.
    """
    if name == _NAME:
        from . import releases

        releases.check()
        from .connector import KVPrefetchConnector

        return KVPrefetchConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
