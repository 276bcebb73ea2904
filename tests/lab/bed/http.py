"""The process of an engine that is served through HTTP: a `vllm serve` below it, and the client in this process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from tests.lab import engine_child, process
from tests.lab.bed import served

START_S = 180.0


class Child(served.Child):
    """As served.Child; `call` knows functions that call `collective_rpc` alone."""

    def stop(self) -> None:
        if self._engine is not None:
            self._loop.run_until_complete(self._engine.end())

    def _start(self, engine_args: dict[str, Any], prepare: str) -> dict[str, Any]:
        (port,) = process.free_ports(1)
        given = json.dumps({"engine": engine_args, "prepare": prepare, "port": port})
        self._loop = asyncio.new_event_loop()
        self._engine = self._loop.run_until_complete(_started(port, given))
        return {"workers": process.descendants(os.getpid())}

    def _stream(self, prompt: list[int], wishes: dict[str, Any], name: str) -> AsyncIterator[served.Part]:
        return self._engine.stream(prompt, wishes, name)


class _Server:
    """`vllm serve`, with what `served.Child` uses of AsyncLLM."""

    def __init__(self, port: int) -> None:
        import aiohttp

        self._url = f"http://127.0.0.1:{port}"
        # The server closes connections that are idle for five seconds.
        connector, timeout = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0), aiohttp.ClientTimeout(None)
        self._client = aiohttp.ClientSession(connector=connector, timeout=timeout)
        self._server: asyncio.subprocess.Process

    async def start(self, given: str) -> None:
        import aiohttp

        argv = process.bound_to_parent([sys.executable, "-m", "tests.lab.bed.http", given])
        env = {**os.environ, process.PARENT_VARIABLE: str(os.getpid()), "VLLM_SERVER_DEV_MODE": "1"}
        self._server, deadline = await asyncio.create_subprocess_exec(*argv, env=env), time.monotonic() + START_S
        while True:
            try:
                async with self._client.get(f"{self._url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                if self._server.returncode is not None or time.monotonic() > deadline:
                    raise RuntimeError("vllm serve did not start: its log is above") from None
            await asyncio.sleep(0.2)

    async def end(self) -> None:
        await self._client.close()
        self._server.terminate()
        await self._server.wait()

    async def reset_prefix_cache(self, *, reset_connector: bool) -> bool:
        what = {"reset_external": str(reset_connector).lower()}
        async with self._client.post(f"{self._url}/reset_prefix_cache", params=what) as answer:
            return bool(answer.status == 200)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any] | None:
        async with self._client.post(f"{self._url}/collective_rpc", json={"method": method, "args": args}) as answer:
            said = await answer.read()
            return json.loads(said)["results"] if said else None

    async def stream(self, prompt: list[int], wishes: dict[str, Any], name: str) -> AsyncIterator[served.Part]:
        wishes = {**wishes, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        asked = {"model": "model", "prompt": prompt, "request_id": name, **wishes}
        async with self._client.post(f"{self._url}/v1/completions", json=asked) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{name}: {answer.status} {await answer.text()}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                part = json.loads(line[6:])
                details = (part.get("usage") or {}).get("prompt_tokens_details") or {}
                yield (
                    [token for each in part["choices"] for token in each["token_ids"]],
                    details.get("cached_tokens", 0),
                )


async def _started(port: int, given: str) -> _Server:
    server = _Server(port)
    await server.start(given)
    return server


def _serve(engine: dict[str, Any], prepare: str, port: int) -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    server = {
        "host": "127.0.0.1",
        "port": port,
        "served_model_name": ["model"],
        "enable_prompt_tokens_details": True,
        "disable_uvicorn_access_log": True,
        "generation_config": "vllm",
        "skip_tokenizer_init": False,
    }
    for name, value in {**served.prepared(engine, prepare), **server}.items():
        setattr(arguments, name, value)
    uvloop.run(run_server(arguments))


def main() -> None:
    """Obey until told to stop; with an argument, be the server."""
    if len(sys.argv) > 1:
        _serve(**json.loads(sys.argv[1]))
    else:
        engine_child.main(Child)


if __name__ == "__main__":
    main()
