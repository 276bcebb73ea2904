"""Examines an engine's environment and configuration before its start, in a second: `kvprefetchd doctor --engine`.

`python -m kvprefetch.connector.examine [--model M] [--kv-transfer-config JSON]` prints a JSON list for each finding:
level (ok, note or bad), name of the check, what, advice.  Bad: the engine would end at its start, or would be served
nothing.  It imports neither vLLM nor torch, so it knows of the model what its config.json says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from kvprefetch import __version__

from ..shmring.wire.admin import Report, Status, StatusQuery, WhyQuery
from ..shmring.wire.attach import Refused
from ..shmring.wire.checks import nearest, shown
from ..shmring.wire.codec import receive_message, send_message
from ..shmring.wire.control_socket import Stranger, find, sockets
from ..shmring.wire.records import PROTOCOL, ProtocolError
from . import releases
from .attach.starter import Starter
from .engine import compat
from .identity import identity
from .words import config

NAME = "KVPrefetchConnector"
DEFAULT = f'{{"kv_connector":"{NAME}","kv_role":"kv_both","kv_load_failure_policy":"recompute"}}'
ANSWER_S = 2.0
SYMPTOM = "kvprefetchd docs symptoms, “An engine does not attach”"
_ROLES = ("kv_both", "kv_consumer", "kv_producer")
_FULL = ("full_attention", "attention")
_STATES = ("mamba_", "ssm_", "linear_")  # keys of a model with state-space or linear-attention layers

Finding = tuple[str, str, str]  # level, what, advice


def environment(arguments: argparse.Namespace) -> Iterator[Finding]:
    """The package, its extension, vLLM's version, and whether vLLM finds the connector by its name."""
    try:
        from ..shmring import _atomics  # noqa: F401
    except ImportError as error:
        yield "bad", str(error), ""
    else:
        yield "ok", f"kvprefetch {__version__} with its extension, Python {platform.python_version()}", ""
    try:
        version = releases.installed_version()
        known = releases.tried(version)
    except ValueError as error:
        yield "bad", str(error), "run this command in the engine's environment: /path/to/its/bin/kvprefetchd"
        return
    if known:
        yield "ok", f"vLLM {version}", ""
    else:
        what = f"no test has run this vLLM: vllm={version} tried={releases.TRIED[0]} to {releases.TRIED[-1]}"
        yield "note", what, "the engine compares it with what the connector uses, and refuses in one line, or warns"
    if not compat.hands_over_early():
        yield "note", compat.NOT_EARLY, "tell us its version; all else is as with other releases"
    if not any(each.name == "kvprefetch" for each in metadata.entry_points(group="vllm.general_plugins")):
        yield "bad", "vLLM does not find the connector: the package has no entry point here", "pip install it again"
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and "kvprefetch" not in chosen.split(","):
        yield "bad", f"VLLM_PLUGINS={shown(chosen)} leaves the connector out", "add kvprefetch to it"


def configuration(arguments: argparse.Namespace) -> Iterator[Finding]:
    """The value of --kv-transfer-config, down to the connector's own keys."""
    ours = _ours(arguments.kv_transfer_config)
    role, policy = ours.get("kv_role"), ours.get("kv_load_failure_policy", "fail")
    for key in ours.keys() - releases.TRANSFER_KEYS:
        what = f"kv_transfer_config: unknown key {shown(key)}{nearest(key, releases.TRANSFER_KEYS)}"
        yield "bad", what, "vLLM would refuse it"
    if role not in _ROLES:
        yield "bad", f"kv_role: should be one of {', '.join(_ROLES)}: kv_role={shown(role)}", "vLLM would refuse it"
    if policy != "recompute":
        what = f"a failed load fails its request: kv_load_failure_policy={shown(policy)}"
        yield "note", what, 'set it to "recompute"'
    settings = config.load(ours.get("kv_connector_extra_config", {}))
    if settings.start_daemon is not None:
        arguments.starter = Starter(settings.start_daemon, settings.socket)  # it checks the options
    yield "ok", f"mode {settings.mode}, looks for a daemon at {', then '.join(_places(settings))}", ""


def model(arguments: argparse.Namespace) -> Iterator[Finding]:
    """The layers that config.json names."""
    if arguments.model is None:
        return
    path = Path(arguments.model) / "config.json"
    if not path.is_file():
        try:
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(arguments.model, "config.json")
        except (ImportError, ValueError):  # the second: it cannot be a model's name
            found = None
        if not isinstance(found, str):
            yield "note", f"{path} is not here, nor in the Hub's cache: its layers are not known", "download the model"
            return
        path = Path(found)
    said = json.loads(path.read_text())
    text = said.get("text_config") or said
    kinds = {str(kind) for kind in text.get("layer_types") or text.get("layers_block_type") or ()}
    advice = "docs/reference/compatibility.md has the models that are served"
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    named = ", ".join(sorted(kinds)) or "layers that config.json does not tell apart"
    if said.get("is_encoder_decoder"):
        yield "bad", "an encoder-decoder model is not served", advice
    elif kinds and not kinds & set(_FULL):
        yield "bad", f"these layers together are not served: {named}", advice
    elif not kinds and (window or any(key.startswith(_STATES) for key in text)):
        yield "note", f"sliding windows, or states, are served with full attention in other layers: {named}", advice
    else:
        name = ", ".join(text.get("architectures") or said.get("architectures") or ["model"])
        yield "ok", f"{name}: {named}", ""


def sharing(arguments: argparse.Namespace) -> Iterator[Finding]:
    """What of the environment is in the keys of stored KV, or ends its sharing. The engine's log has the rest."""
    listed = ((name, identity.rule("environment", name)) for name in sorted(os.environ))
    for name, line in listed:
        if line is not None and line.verdict == "decides":
            yield "ok", f"{name} is set: engines with another value share no KV with this one ({line.reason})", ""
        elif line is not None and line.verdict == "own":
            what = f"{name} is set, and nothing says what it does to KV: no other start finds what this engine stores"
            yield "note", what, "unset it, or see docs/reference/identity.md"


def daemon(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Whether a daemon answers this user, and runs as one that an engine trusts; else whether the engine starts one."""
    try:
        ours = _ours(arguments.kv_transfer_config)
        settings = config.load(ours.get("kv_connector_extra_config", {}))
    except ValueError:  # said above
        return
    advice = f"is the engine's user another one? run this as that; otherwise {SYMPTOM}"
    found = find(_places(settings), settings.daemon_user, ANSWER_S)
    for path, error in found.passed:
        where, why = f"socket={path!r} uid={os.getuid()}", error.strerror or str(error)
        if isinstance(error, Stranger):
            yield "bad", why, f'"daemon_user": {error.uid} in kv_connector_extra_config'
        elif isinstance(error, PermissionError):
            level = "bad" if (path, found.sock) == (found.path, None) else "note"
            yield level, f"this user may not use the socket: {where}: {why}", advice
        elif found.sock is not None or path != found.path or (arguments.starter is not None and found.startable):
            yield "ok", f"no daemon answers: {where}: {why}", ""
        else:
            yield "bad", f"no daemon answers: {where}: {why}", "start it (kvprefetchd serve), or name its socket"
    if found.sock is None:
        if arguments.starter is not None and found.startable:
            yield "ok", f"the engine starts a daemon: {arguments.starter}", ""
        return
    where = f"socket={found.path!r} uid={os.getuid()}"
    with found.sock as sock:
        try:
            send_message(sock, StatusQuery())
            received = receive_message(sock, max_fds=0)
        except (OSError, ProtocolError) as error:
            what = f"the daemon does not answer: {where}: {getattr(error, 'strerror', None) or error}"
            yield "bad", what, "`kvprefetchd status` shows why"
            return
        said: object = None
        with contextlib.suppress(OSError, ProtocolError):  # of a store that does not answer in time, too
            send_message(sock, WhyQuery(engine=(arguments.model or "").rstrip("/").split("/")[-1]))
            said = (receive_message(sock, max_fds=0) or [None])[0]
    answer = received[0] if received is not None else None
    if isinstance(answer, Status):
        if answer.protocol not in (0, PROTOCOL):
            what = (
                f"protocol differs: engine={PROTOCOL} ({__version__!r}) daemon={answer.protocol} ({answer.version!r})"
            )
            yield "bad", what, "upgrade the older side, and restart it: until then engines are served nothing"
        level = "ok" if answer.version == __version__ else "note"
        yield (
            level,
            f"daemon {answer.version} answers at {found.path}: pid {answer.pid}, engines {answer.engine_count}",
            "",
        )
        yield from _refused(answer.refused, str(ours.get("engine_id", "")))
        for each in said.text.splitlines() if isinstance(said, Report) and said.ok else ():
            yield "note", each, "docs/reference/identity.md has the fields"
    else:
        yield "bad", answer.error if isinstance(answer, Refused) else f"another program listens there: {where}", advice


def _refused(found: Sequence[Mapping[str, int | str]], engine_id: str) -> Iterator[Finding]:
    """This user's engines that the daemon refuses now: the one with this id, or all where vLLM makes the id up."""
    for each in found:
        name = str(each.get("engine", ""))
        if each.get("uid") == os.geteuid() and (not engine_id or not name or name == engine_id):
            what = f"the daemon refuses {f'engine {name}' if name else 'a process'}, pid {each.get('pid')}"
            yield "bad", f"{what}: {each.get('error')}", SYMPTOM


def gpu(arguments: argparse.Namespace) -> Iterator[Finding]:
    """The copy kernels of an engine on NVIDIA GPUs."""
    if Path("/dev/nvidiactl").exists() and not any(
        each.name and each.name.startswith("cupy") for each in metadata.distributions()
    ):
        yield "note", "cupy is not installed: torch copies, which is slower", "pip install '.[cuda12]' or '.[cuda13]'"


def _places(settings: config.ConnectorConfig) -> list[str]:
    return [settings.socket] if settings.socket is not None else sockets()


def _ours(text: str) -> Mapping[str, Any]:
    """Return our part of a --kv-transfer-config, also below a MultiConnector. Raises ValueError."""
    try:
        whole = json.loads(text)
    except ValueError as error:
        raise ValueError(f"kv_transfer_config: not JSON: {error}: {shown(text)}") from None
    extra = whole.get("kv_connector_extra_config") if isinstance(whole, dict) else None
    children = extra.get("connectors", []) if isinstance(extra, dict) else []
    for each in (whole, *(children if isinstance(children, list) else ())):
        if isinstance(each, dict) and each.get("kv_connector") == NAME:
            return each
    name = whole.get("kv_connector") if isinstance(whole, dict) else None
    raise ValueError(f"kv_transfer_config: kv_connector: should be {NAME}: kv_connector={shown(name)}")


CHECKS: tuple[Callable[[argparse.Namespace], Iterator[Finding]], ...] = (
    environment,
    configuration,
    model,
    sharing,
    daemon,
    gpu,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--kv-transfer-config", default=DEFAULT)
    arguments = parser.parse_args(namespace=argparse.Namespace(starter=None))
    for check in CHECKS:
        try:
            for level, what, advice in check(arguments):
                print(json.dumps([level, check.__name__, what, advice]), flush=True)
        except (OSError, ValueError) as error:
            print(json.dumps(["bad", check.__name__, str(error), ""]), flush=True)


if __name__ == "__main__":
    main()
