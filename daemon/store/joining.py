"""Joins a Mooncake cluster, or says in one line why not. The only importer of mooncake."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from . import addresses, loopback, window
from .errors import LIBRARIES, StoreError
from .settings import MooncakeSettings
from .sleeping_reads import self_test

LOCAL_BUFFER_BYTES = 16 << 20  # Mooncake's own default; the zero-copy calls made here do not use it
# Some connections to each storage node that stay, instead of one for each value: for 64 KiB values that doubles the
# rate, and to begin a transfer needs no wait for a connection.  Beyond its bound the queue for them refuses.
_TCP = {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"}


class Joined(NamedTuple):
    """A client that has joined, and its transfer engine, which reads for us unless `why` says why not."""

    client: Any
    engine: Any = None
    why: str = ""

    @property
    def sleeping(self) -> bool:
        """Whether reads may sleep (sleeping_reads.py)."""
        return self.engine is not None and not self.why


def join(settings: MooncakeSettings, port: int, rpc_timeout_ms: int, log: Any) -> Joined:
    """Join, under the name of this machine and a `port` of its own. Raises StoreError.

    Without a port Mooncake tries twenty, each until the master's time is up.  A client with a loopback name accepts
    connections from this machine only.
    """
    # Mooncake reads these once, when it is loaded. At INFO it logs every value read from a disk.
    os.environ["MC_RPC_TIMEOUT_MS"] = str(rpc_timeout_ms)
    if "MC_LOG_LEVEL" not in os.environ:
        # 0.3.14 takes it later than it writes its first lines, which go by glog's own.
        os.environ |= {"MC_LOG_LEVEL": "WARNING", "GLOG_minloglevel": "1"}
    # To get what lies in our own memory is a copy, in which Mooncake does not spin.
    sleeping = settings.protocol == "tcp" and settings.global_segment_size == 0
    if sleeping:
        for name, value in _TCP.items():
            os.environ.setdefault(name, value)
    client_class = import_client()
    if (why := settings.unreached(rpc_timeout_ms / 1e3)) is not None:
        raise StoreError(why)
    client, before, host = client_class(), loopback.listening(), addresses.own(settings.master_server_address)
    name = f"{host}:{port}"
    engine = _engine(settings, name) if sleeping else None
    try:
        code = client.setup(
            name,
            settings.metadata_server,
            settings.global_segment_size,
            LOCAL_BUFFER_BYTES,
            settings.protocol,
            settings.device_name,
            settings.master_server_address,
            engine=engine.get_engine() if engine is not None else None,
            enable_ssd_offload=settings.enable_ssd_offload,
            ssd_offload_path=settings.ssd_offload_path,
            tenant_id=settings.tenant_id,
        )
        why = f"with code {code}"
    except Exception as error:  # any C++ exception
        code, why = -1, str(error) or type(error).__name__
    if code != 0:
        del client  # leaves the master while there is one
        raise StoreError(f"mooncake set-up failed: {why}: {settings}{_masters(settings.master_server_address)}")
    if addresses.is_loopback(host):
        try:
            if why := loopback.refusal():
                log.warning("store.exposed", error=why)
            else:
                loopback.confine(before)
        except OSError as error:
            del client
            raise StoreError(f"other machines cannot be kept from Mooncake's ports: {error.strerror}") from None
    if engine is None:
        return Joined(client, why="no transfer engine can be made" if sleeping else "")
    if settings.metadata_server == addresses.P2P:  # its port names it to others
        name = f"{host}:{engine.get_rpc_port()}"
    return Joined(client, engine, self_test(engine, client, name))


def _engine(settings: MooncakeSettings, name: str) -> Any:
    """Return a transfer engine for the client; None where there is none."""
    try:
        from mooncake.engine import TransferEngine

        engine = TransferEngine()
        made = engine.initialize(name, settings.metadata_server, settings.protocol, settings.device_name) == 0
    except (ImportError, AttributeError, RuntimeError):
        return None
    return engine if made else None


def _masters(address: str) -> str:
    """Name the other possible causes in a cluster of several masters: Mooncake has one code for all of them."""
    if (kind := addresses.elected(address)) is None:
        return ""
    known = "" if kind == "etcd" else f", or this Mooncake was built without {kind}"
    cluster = os.environ.get("MC_STORE_CLUSTER_ID", "mooncake_cluster")
    return f": perhaps no master with --cluster_id={cluster} leads yet{known}"


def import_client() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ModuleNotFoundError:
        raise StoreError(
            "mooncake is not installed: install kvprefetch with an extra: daemon-cpu, daemon-cuda12 or daemon-cuda13"
        ) from None
    except ImportError as error:
        raise StoreError(f"mooncake cannot be loaded ({error}): {LIBRARIES}") from None
    if missing := window.lacks(MooncakeDistributedStore):
        tried = ", ".join(window.TRIED)
        raise StoreError(f"this Mooncake lacks what the daemon calls: {', '.join(missing)}: tried={tried}")
    return MooncakeDistributedStore
