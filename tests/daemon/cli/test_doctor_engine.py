"""`doctor --engine`: an engine's environment, configuration, model and daemon, looked at before the engine starts."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.shmring.wire.admin import Status
from kvprefetch.shmring.wire.codec import receive_message, send_message
from kvprefetch.shmring.wire.records import PROTOCOL
from tests.lab.daemon import Daemon
from tests.support.command import kvprefetchd, one_line, run
from tests.support.ordinary import AS_NOBODY, NOBODY, effective_user

EXAMINE = [sys.executable, "-m", "kvprefetch.connector.examine"]
FINE = {"kv_connector": "KVPrefetchConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def findings(*arguments: object, command: list[str] = EXAMINE) -> dict[str, list[str]]:
    """Findings by the name of their check, each as "level what advice"."""
    done = run([*command, *map(str, arguments)])
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for level, name, what, advice in map(json.loads, done.stdout.splitlines()):
        found.setdefault(name, []).append(f"{level} {what} {advice}")
    return found


def transfer(**changes: Any) -> str:
    return json.dumps({**FINE, **changes})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "bad kv_transfer_config: not JSON"),
        ("[]", "bad kv_transfer_config: kv_connector: should be KVPrefetchConnector: kv_connector=None"),
        (transfer(kv_connector="KVPrefetch"), "bad kv_transfer_config: kv_connector: should be KVPrefetchConnector"),
        (transfer(kv_role="both"), "bad kv_role: should be one of kv_both, kv_consumer, kv_producer: kv_role='both'"),
        (transfer(kv_load_failure_policy="fail"), "note a failed load fails its request"),
        (transfer(kv_connector_extra_config={"sockett": "/x"}), "bad kv_connector_extra_config: unknown key 'sockett'"),
        (
            transfer(kv_connector_extra_config={"start_daemon": {"memory": "lots"}}),
            "bad kv_connector_extra_config: start_daemon: memory: should be a size",
        ),
        (
            json.dumps(
                {
                    "kv_connector": "MultiConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "connectors": [FINE | {"kv_connector_extra_config": {"mode": "maybe"}}]
                    },
                }
            ),
            "bad kv_connector_extra_config: mode: ",
        ),
    ],
)
def test_a_configuration_that_the_engine_would_refuse_is_bad(given: str, words: str) -> None:
    """Each mistake is one line with key, value and bound, also below a MultiConnector."""
    found = findings("--kv-transfer-config", given)
    assert [line for line in found["configuration"] if line.startswith(words)], found


def test_what_of_the_environment_decides_kv_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its value, which may be a secret."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("VLLM_ROUND_TO_THREE_BITS", "hush")
    found = findings("--kv-transfer-config", transfer())["sharing"]
    assert [line for line in found if line.startswith("ok VLLM_BATCH_INVARIANT is set: engines with another value")]
    assert [line for line in found if line.startswith("note VLLM_ROUND_TO_THREE_BITS is set, and nothing says")]
    assert "hush" not in str(found)


@pytest.mark.vllm
def test_a_key_that_vllm_does_not_know_is_bad() -> None:
    """The keys are those of the installed vLLM's own source."""
    found = findings("--kv-transfer-config", transfer(kv_load_failure_polcy="recompute"))
    (bad,) = [line for line in found["configuration"] if line.startswith("bad")]
    assert "unknown key 'kv_load_failure_polcy'; did you mean kv_load_failure_policy?" in bad


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "ok LlamaForCausalLM: "),
        ({"sliding_window": 4096, "use_sliding_window": False}, "ok model: "),
        ({"is_encoder_decoder": True}, "bad an encoder-decoder model"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "ok model: chunked_attention, full_attention"),
        ({"layers_block_type": ["mamba", "attention"]}, "ok model: attention, mamba"),
        ({"layer_types": ["sliding_attention"]}, "bad these layers together are not served: sliding_attention"),
        ({"layer_types": ["attention", "mamba", "sliding_attention"]}, "ok model: attention, mamba, sliding_attention"),
        ({"text_config": {"layer_types": ["sliding_attention"]}}, "bad these layers together"),
        ({"mamba_d_state": 16}, "note sliding windows, or states, are served with full attention"),
        ({"sliding_window": 4096}, "note sliding windows, or states, are served with full attention"),
    ],
)
def test_a_model_that_is_not_served_is_bad(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    """The layers are those of the model's config.json."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (line,) = findings("--model", tmp_path)["model"]
    assert line.startswith(words)


def test_a_model_that_is_not_here_is_a_note(tmp_path: Path) -> None:
    (line,) = findings("--model", tmp_path / "missing")["model"]
    assert line.startswith("note ")


@pytest.mark.vllm
def test_it_imports_neither_vllm_nor_torch() -> None:
    """It answers in about a second: importing vLLM alone takes ten."""
    script = "import sys; from kvprefetch.connector.examine import main; main(); print(*sys.modules)"
    done = run([sys.executable, "-c", script, "--model", "org/none"])
    assert done.returncode == 0, done.stderr
    assert not {"vllm", "torch", "numpy"} & set(done.stdout.splitlines()[-1].split())
    assert any(json.loads(line)[2].startswith("vLLM 0.") for line in done.stdout.splitlines()[:-1])


def test_the_daemon_behind_the_connector_s_socket_answers(serve: Callable[..., Daemon]) -> None:
    """With the engine's socket, a daemon that serves this user is ok; one that does not is bad, with the reason."""
    daemon = serve()
    given = transfer(kv_connector_extra_config={"socket": str(daemon.socket)})
    (line,) = findings("--kv-transfer-config", given)["daemon"]
    assert line.startswith("ok daemon ")
    assert f"pid {daemon.pid}" in line
    if AS_NOBODY:
        (refused,) = findings("--kv-transfer-config", given, command=[*AS_NOBODY, *EXAMINE])["daemon"]
        assert refused.startswith("bad this user may not use the socket: ")
        daemon.socket.parent.chmod(0o755)
        daemon.socket.chmod(0o666)
        (refused,) = findings("--kv-transfer-config", given, command=[*AS_NOBODY, *EXAMINE])["daemon"]
        assert refused.startswith("bad uid=65534 may not attach")


@pytest.mark.store
@pytest.mark.skipif(not AS_NOBODY, reason="only root can become another user")
def test_a_daemon_that_refuses_this_user_is_passed_over_and_said(serve: Callable[..., Daemon]) -> None:
    """The user's own answers at the next place, as the engine finds it; where there is none, the engine starts it."""
    system = serve(extra=("--socket-mode", "0666"))
    system.socket.parent.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="kvu-") as folder:
        os.chown(folder, NOBODY, NOBODY)
        place = f"{folder}/kvprefetch/kvprefetchd.sock"
        code = (
            "from kvprefetch.shmring.wire import control_socket\n"
            f"control_socket.SYSTEM_SOCKET = {str(system.socket)!r}\n"
            "from kvprefetch.connector.examine import main\nmain()"
        )
        command = [
            *AS_NOBODY,
            "env",
            "-u",
            "KVPREFETCHD_SOCKET",
            f"XDG_RUNTIME_DIR={folder}",
            f"HOME={folder}",
            sys.executable,
            "-c",
            code,
        ]
        own = Daemon(memory="64MiB", staging="1MiB", socket=Path(place), extra=("--door", "off"))
        own.argv = [*AS_NOBODY, *own.argv]
        with own:
            found = findings(command=command)["daemon"]
            assert len(found) == 2, found
            passed, answers = found
            assert passed.startswith("note this user may not use the socket: ")
            assert "it refuses this user: uid=65534 may not attach" in passed
            assert f"pid {own.pid}" in answers
        given = transfer(kv_connector_extra_config={"start_daemon": True})
        said = findings("--kv-transfer-config", given, command=command)["daemon"]
        assert said[0] == passed
        assert said[-1].startswith(f"ok the engine starts a daemon: socket {place}, ")


@pytest.mark.store
def test_the_socket_is_that_of_the_environment_and_no_daemon_there_is_bad(tmp_path: Path) -> None:
    """As for all other commands: engine, daemon and commands meet where one variable says."""
    path = str(tmp_path / "none.sock")
    done = run(EXAMINE, KVPREFETCHD_SOCKET=path)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert ["ok", "configuration", f"mode on, looks for a daemon at {path}", ""] in said
    ((level, what),) = [(level, what) for level, name, what, _ in said if name == "daemon"]
    assert (level, what.startswith(f"no daemon answers: socket='{path}'")) == ("bad", True)
    given = transfer(kv_connector_extra_config={"socket": path, "start_daemon": True})
    absent, starts = findings("--kv-transfer-config", given)["daemon"]
    assert absent.startswith(f"ok no daemon answers: socket='{path}'")
    assert starts.startswith(
        f"ok the engine starts a daemon: socket {path}, disk {os.environ['XDG_DATA_HOME']}/kvprefetch:"
    )


def test_a_daemon_of_another_protocol_is_bad(tmp_path: Path) -> None:
    """Such a daemon would refuse this engine; another release of one protocol is only a note."""
    path = str(tmp_path / "s.sock")
    older = Status(version="0.0.1", protocol=PROTOCOL - 1, pid=7, store_open=True, engines=[])

    def answer(listener: socket.socket) -> None:
        asking, _ = listener.accept()
        with asking:
            receive_message(asking)
            send_message(asking, older)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        given = transfer(kv_connector_extra_config={"socket": path})
        bad, note = findings("--kv-transfer-config", given)["daemon"]
        thread.join()
    assert bad.startswith(f"bad protocol differs: engine={PROTOCOL} ")
    assert f"daemon={PROTOCOL - 1} ('0.0.1') upgrade the older side" in bad
    assert note.startswith("note daemon 0.0.1 answers")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to listen as another user")
def test_a_daemon_of_another_user_is_named(tmp_path: Path) -> None:
    """An engine speaks to no daemon of a user that it does not trust; the finding says which key to set."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s.sock"))
        with effective_user(12345):  # the kernel notes the user who listens
            listener.listen()
        given = transfer(kv_connector_extra_config={"socket": str(tmp_path / "s.sock")})
        (line,) = findings("--kv-transfer-config", given)["daemon"]
    assert line.startswith("bad the process that listens at ")
    assert '"daemon_user": 12345' in line


def test_doctor_shows_them_and_ends_with_0_or_1(tmp_path: Path) -> None:
    """`doctor --engine` prints the same findings as doctor's own, and refuses options of the daemon."""
    config = transfer(kv_connector_extra_config={"socket": str(tmp_path / "none.sock"), "spin_us": -1})
    result = kvprefetchd("doctor", "--engine", "--kv-transfer-config", config)
    assert result.returncode == 1
    assert any(
        line.startswith("bad  configuration kv_connector_extra_config: spin_us") for line in result.stdout.splitlines()
    )
    for wrong in (["--engine", "--staging", "1GiB"], ["--model", "x"]):
        refused = kvprefetchd("doctor", *wrong)
        assert refused.returncode == 78
        assert one_line(refused.stderr)
