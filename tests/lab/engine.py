"""A real vLLM engine in a child process: started, driven over pipes, aborted, killed and always reaped.

The scheduler lives in the child itself and each worker in a process below it, as in a served engine, so that tests can
look into the scheduler by :meth:`Engine.call` and kill either. One engine serves any number of passes.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.lab import process
from tests.lab.passes import Abort, Pass, RequestResult
from tests.lab.template import Forked, Template

START_TIMEOUT_S = 180.0
CHILD = "tests.lab.engine_child"
Event = dict[str, Any]
KVTransfer = dict[str, Any]


class EngineError(RuntimeError):
    """The engine's process refused a command, failed, or did not answer in time; the message ends with its log."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How an engine is built; the defaults suit one two-core machine and quick starts."""

    model: Path
    dtype: str = "float32"
    block_size: int = 32
    max_model_len: int = 2048
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 2048
    num_gpu_blocks: int = 1024
    """Blocks in the KV pool: vLLM clears them all at each start, and would fill a GiB."""
    kv_transfer: KVTransfer | None = None
    tensor_parallel_size: int = 1
    scheduling_policy: str = "fcfs"
    enforce_eager: bool = True
    own_worker: bool = False
    """Whether the worker of one rank is a process of its own. Without, as vLLM does by default, worker and scheduler
    share a process and, with one OpenMP thread, a core: neither of them spins for the other's answer on another."""
    mooncake_config: Path | None = None
    """What ``MOONCAKE_CONFIG_PATH`` names for vLLM's own connector."""
    host_ip: str = "127.0.0.1"
    extra: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments of vLLM's ``EngineArgs``."""
    env: dict[str, str] = field(default_factory=dict)
    python: Path = Path(sys.executable)
    """The interpreter of the engine's process."""
    prepare: str = ""
    """Function, as ``module:name``, that the engine's process calls before it builds the engine. What it changes in
    vLLM reaches workers that are forked (of a template), or that share the process."""
    child: str = CHILD
    """The program of the engine's process; `tests.lab.bed.served` serves with vLLM's AsyncLLM."""

    def engine_args(self) -> dict[str, Any]:
        """Keyword arguments for vLLM's ``EngineArgs``; ``kv_transfer_config`` stays a plain dict."""
        return {
            "model": str(self.model),
            "dtype": self.dtype,
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_gpu_blocks_override": self.num_gpu_blocks,
            "kv_transfer_config": self.kv_transfer,
            "enable_prefix_caching": True,
            "tensor_parallel_size": self.tensor_parallel_size,
            "scheduling_policy": self.scheduling_policy,
            "enforce_eager": self.enforce_eager,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "distributed_executor_backend": "mp" if self.own_worker or self.tensor_parallel_size > 1 else "uni",
            **self.extra,
        }

    def environment(self) -> dict[str, str]:
        """What the child's environment has beyond the caller's."""
        given = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_HOST_IP": self.host_ip,
            "VLLM_LOGGING_LEVEL": "INFO",  # tests read what the connector logs
            "OMP_NUM_THREADS": "1",
            "KMP_BLOCKTIME": "0",
            # A worker bound to one core starves Mooncake's transport threads, which inherit the binding.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if self.tensor_parallel_size > 1:
            # Without it vLLM asks for a NUMA node per rank. Ranks share cores where there are too few.
            cores = sorted(os.sched_getaffinity(0))
            ranks = range(self.tensor_parallel_size)
            given["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in ranks)
        if self.mooncake_config is not None:
            given["MOONCAKE_CONFIG_PATH"] = str(self.mooncake_config)
        return {**given, **self.env}

    def but(self, **changes: Any) -> EngineSpec:
        """A copy with some fields changed."""
        return replace(self, **changes)


class Engine:
    """A running engine; use as a context manager.

    With a `template` it is forked of that, unless the spec asks for what a process takes up before or in its imports:
    of `env` that is PYTHONPATH.
    """

    def __init__(self, spec: EngineSpec, *, template: Template | None = None) -> None:
        self.spec = spec
        own = "PYTHONPATH" in spec.env or spec.python != Path(sys.executable)
        self._template = None if own else template
        self.scratch = process.scratch("engine")
        self.log = self.scratch / "engine.log"
        # Short and outside the checkout: it holds Unix sockets, whose paths may have 107 bytes.
        self._rpc = tempfile.mkdtemp(prefix="kvl-")
        self._child: subprocess.Popen[bytes] | Forked | None = None
        self._buffer = b""
        self._workers: list[int] = []

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the child and wait until the engine can serve."""
        env = {**os.environ, **self.spec.environment(), process.PARENT_VARIABLE: str(os.getpid())}
        env[process.CHILD_VARIABLE] = self.spec.child
        # One folder per engine: upstream's connector names its lookup socket after the host only.
        env["VLLM_RPC_BASE_PATH"] = self._rpc
        with open(self.log, "ab") as log:
            if self._template is not None:
                self._child = self._template.fork(env, log.fileno())
            else:
                self._child = subprocess.Popen(
                    [str(self.spec.python), "-m", self.spec.child],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=env,
                    cwd=process.REPO,
                    **process.OWN_GROUP,
                )
        try:
            message = {"op": "start", "engine_args": self.spec.engine_args(), "prepare": self.spec.prepare}
            self._workers = [int(pid) for pid in self.command(message, timeout_s=START_TIMEOUT_S)["workers"]]
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the engine: ask it to shut down, then kill what is left of its processes."""
        if self._child is not None:
            child, self._child = self._child, None
            try:
                if child.poll() is None:
                    self._write(child, {"op": "stop"})
                    child.wait(15)
            except (OSError, subprocess.TimeoutExpired):
                pass
            process.reap(child)
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        pass
        shutil.rmtree(self._rpc, ignore_errors=True)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def kill(self, *, worker_rank: int | None = None) -> None:
        """SIGKILL the scheduler's process, or one worker's: nothing in it gets to clean up."""
        if worker_rank is None:
            os.kill(self._running().pid, signal.SIGKILL)
            self._running().wait()
        else:
            os.kill(self.worker_pids[worker_rank], signal.SIGKILL)

    @property
    def scheduler_pid(self) -> int:
        """Pid of the process in which the scheduler runs."""
        return self._running().pid

    @property
    def pids(self) -> list[int]:
        """Pids of all its processes."""
        return [self._running().pid, *process.descendants(self._running().pid)]

    @property
    def worker_pids(self) -> list[int]:
        """Pids of the workers, by rank."""
        return self._workers

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        timeout_s: float = 120.0,
        **options: Any,
    ) -> Pass:
        """Serve ``prompts`` greedily and wait for all of them; ``options`` are those of :meth:`begin`.

        Raises EngineError when a request has not ended after ``timeout_s``.
        """
        self.begin(prompts, timeout_s=timeout_s, events=False, **options)
        return self.finish(timeout_s=timeout_s + 10)

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int | Sequence[int] = 32,
        concurrency: int | None = None,
        pauses_s: Sequence[float] | None = None,
        arrivals_s: Sequence[float] | None = None,
        priorities: Sequence[int] | None = None,
        sessions: Sequence[str] | None = None,
        aborts: Sequence[Abort] = (),
        sampling: Mapping[str, Any] | None = None,
        request_options: Mapping[str, Any] | None = None,
        timeout_s: float = 120.0,
        events: bool = True,
    ) -> None:
        """Start a pass and return at once, so that the caller can disturb it; :meth:`finish` collects it.

        ``concurrency`` closes the loop: so many requests are outstanding, the next is added when one ends, or the
        `pauses_s` of the one that ended later.
        ``arrivals_s`` are offsets from the start of the pass; ``max_tokens`` is one for all or each prompt's own.
        ``request_options`` are more arguments of vLLM's ``add_request``; ``lora`` among them is (name, id, path).
        """
        self._write(
            self._running(),
            {
                "op": "pass",
                "prompts": [list(prompt) for prompt in prompts],
                "max_tokens": [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens),
                "concurrency": concurrency,
                "pauses_s": None if pauses_s is None else list(pauses_s),
                "arrivals_s": None if arrivals_s is None else list(arrivals_s),
                "priorities": None if priorities is None else list(priorities),
                "sessions": None if sessions is None else list(sessions),
                "aborts": [asdict(each) for each in aborts],
                "sampling": dict(sampling or {}),
                "request_options": dict(request_options or {}),
                "timeout_s": timeout_s,
                "events": events,
            },
        )

    def finish(self, *, timeout_s: float = 130.0) -> Pass:
        """The result of the pass that :meth:`begin` started."""
        answer = self._answer(timeout_s)
        requests = [RequestResult(**each) for each in answer["requests"]]
        return Pass(requests, answer["total_s"], answer["steps"], answer.get("begun_s", 0.0))

    def wait_event(self, event: str, *, timeout_s: float = 60.0) -> Event:
        """Wait for the next ``event`` of a pass that :meth:`begin` started; others are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._read(deadline - time.monotonic())
            if message.get("event") == event:
                return message
            if "event" not in message:
                raise EngineError(f"the pass ended before event {event!r}: {message.get('error', 'finished')}")

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Empty the engine's own prefix cache; with ``reset_connector`` also what the connector keeps."""
        return bool(self.command({"op": "reset", "reset_connector": reset_connector})["value"])

    def call(self, function: str, /, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> Any:
        """Run ``function`` ("package.module:name") in the scheduler's process as ``name(engine, *args, **kwargs)``.

        ``engine`` is vLLM's LLMEngine. Arguments and result travel as JSON.
        """
        message = {"op": "call", "function": function, "args": args, "kwargs": kwargs}
        return self.command(message, timeout_s=timeout_s)["value"]

    def command(self, message: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self._write(self._running(), message)
        return self._answer(timeout_s)

    def _running(self) -> subprocess.Popen[bytes] | Forked:
        if self._child is None:
            raise EngineError("the engine is not running")
        return self._child

    @staticmethod
    def _write(child: subprocess.Popen[bytes] | Forked, message: Mapping[str, Any]) -> None:
        assert child.stdin is not None
        child.stdin.write(json.dumps(message).encode() + b"\n")
        child.stdin.flush()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._read(deadline - time.monotonic())
            if "event" in message:
                continue
            if message["ok"]:
                return message
            raise EngineError(f"{message['error']}\n--- log of the engine\n{process.tail(self.log)}")

    def _read(self, timeout_s: float) -> dict[str, Any]:
        child = self._running()
        assert child.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
                raise EngineError(
                    f"no answer in time; is the machine busy?\n--- log of the engine\n{process.tail(self.log)}"
                )
            received = os.read(child.stdout.fileno(), 1 << 20)
            if not received:
                raise EngineError(f"the engine died\n--- log of the engine\n{process.tail(self.log)}")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
