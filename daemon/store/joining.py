"""Joins a Mooncake cluster, or says in one line why not. The only importer of mooncake."""

from __future__ import annotations

import os
from typing import Any

from . import addresses, loopback
from .errors import LIBRARIES, StoreError
from .settings import MooncakeSettings

LOCAL_BUFFER_BYTES = 16 << 20  # Mooncake's own default; the zero-copy calls made here do not use it


def join(settings: MooncakeSettings, port: int, rpc_timeout_ms: int, log: Any) -> Any:
    """Return a client that has joined, named by this machine and a `port` of its own. Raises StoreError.

    Without a port Mooncake tries twenty, each until the master's time is up.  A client with a loopback name accepts
    connections from this machine only.
    """
    # Mooncake reads these once, when it is loaded. At INFO it logs every value read from a disk; it overwrites glog's
    # GLOG_minloglevel.
    os.environ["MC_RPC_TIMEOUT_MS"] = str(rpc_timeout_ms)
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    client_class = import_client()
    if (why := settings.unreached(rpc_timeout_ms / 1e3)) is not None:
        raise StoreError(why)
    client, before = client_class(), loopback.listening()
    try:
        code = client.setup(
            f"{settings.local_hostname}:{port}",
            settings.metadata_server,
            settings.global_segment_size,
            LOCAL_BUFFER_BYTES,
            settings.protocol,
            settings.device_name,
            settings.master_server_address,
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
    if addresses.is_loopback(settings.local_hostname):
        if why := loopback.refusal():
            log.warning("store.exposed", error=why)
            return client
        try:
            loopback.confine(before)
        except OSError as error:
            del client
            raise StoreError(f"other machines cannot be kept from Mooncake's ports: {error.strerror}") from None
    return client


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
    return MooncakeDistributedStore
