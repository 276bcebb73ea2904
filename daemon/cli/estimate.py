"""`kvprefetchd estimate`: what prefetch hides of a fetch (docs/comparison.md), and what a store of each size finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvprefetch.client.control import Unavailable

from ..config.model import ConfigError
from ..config.sizes import parse_size, size
from ..telemetry.overview import aligned, percent
from ..telemetry.pretty import number
from .common import PATH, Arguments, Real, declare, flag, option, show
from .help_page import CommandGroup, HelpPage
from .reuse import FILLED, Reuse, prompts

PAGE = HelpPage(
    "estimate what prefetch would hide of a fetch, or how large a store must be",
    details="With TRACE it says which part of the prompts' tokens a store of each size finds, and the seconds of "
    "computing that this saves beyond the engine's own cache. The size is the disk's, or the memory's without one. "
    "TRACE has a prompt in each line: a trace of Mooncake, a log of LMCache's look-ups (`lmcache server "
    "--lookup-hash-log-dir`), the log of `vllm serve --enable-log-requests` at the level DEBUG, or JSON with "
    "prompt_token_ids.\n\nWithout: a request waits W for a place in the engine: waiting x service / running, by "
    "Little's law, with the means of vLLM's metrics. Its KV takes F over the link. It asks no daemon, "
    "and knows neither what the store holds nor "
    "who else uses the link.",
    examples=(
        (
            "kvprefetchd estimate --model MODEL_DIR --tokens 8000 --link 10 --waiting 4 --running 32 --service 20",
            "a busy engine behind 10 Gbit/s",
        ),
        (
            "kvprefetchd estimate --token-bytes 131072 --tokens 8000 --link 1 --prefill 25000",
            "an idle one: would recomputing be sooner?",
        ),
        (
            "kvprefetchd estimate trace.jsonl --token-bytes 131072 --prefill 25000 --local 40GiB --plot",
            "how large must memory or disk be?",
        ),
    ),
    arguments={"TRACE": "prompts, in the order of their arrival"},
    exits={69: "the trace or the model's config.json cannot be read, or does not say it"},
    also="docs/comparison.md; kvprefetchd doctor --measure measures the link",
)
FORMULAS = {"local": "W", "kvprefetch": "max(W, F)", "on_demand": "W + F", "recomputed": "W + R"}


def add(commands: CommandGroup) -> None:
    above: dict[str, Any] = {"type": Real(0, min_open=True), "metavar": "X"}
    any_number: dict[str, Any] = {"type": Real(0), "metavar": "X", "default": 0.0}
    declare(
        commands,
        "estimate",
        run,
        PAGE,
        option("--model", metavar="DIR", type=PATH, help="the model's folder: its config.json says the KV of a token"),
        option("--token-bytes", metavar="N", type=click.IntRange(1), help="or this says it: bytes, of all ranks"),
        click.Argument(["trace"], type=PATH, required=False),
        option("--tokens", metavar="N", type=click.IntRange(1), help="of the prompt, in the store"),
        option("--link", **above, help="Gbit/s between store and engine"),
        option("--waiting", **any_number, help="requests that wait (default: 0)"),
        option("--service", **any_number, help="seconds for which a request runs (default: 0)"),
        option("--running", **above, default=1.0, help="requests that run at a time (default: 1)"),
        option("--prefill", **above, help="tokens a second that the engine computes, to compare with recomputing"),
        option("--size", metavar="SIZE", multiple=True, help="with TRACE: this size; repeatable (default: a dozen)"),
        option("--local", metavar="SIZE", default="0", help="with TRACE: of the engine's own cache (default: 0)"),
        option("--block-tokens", metavar="N", type=click.IntRange(1), default=16, help="of a block (default: 16)"),
        flag("--plot", "with TRACE: a bar for each size"),
        flag("--json", "the same, as JSON"),
    )


def run(arguments: Arguments) -> int:
    if (arguments.model is None) == (arguments.token_bytes is None):
        raise ConfigError("estimate: name one of --model and --token-bytes")
    each = arguments.token_bytes or token_bytes(arguments.model)
    if arguments.trace is not None:
        return run_trace(arguments, each)
    if arguments.tokens is None or arguments.link is None:
        raise ConfigError("estimate: name --tokens and --link, or a TRACE")
    count = arguments.tokens * each
    wait_s = arguments.waiting * arguments.service / arguments.running
    fetch_s = count * 8 / (arguments.link * 1e9)
    recompute_s = arguments.tokens / arguments.prefill if arguments.prefill else None
    # How long a request takes until all KV of its stored prefix is there, by way.
    found = {"local": wait_s, "kvprefetch": max(wait_s, fetch_s), "on_demand": wait_s + fetch_s}
    found |= {"recomputed": wait_s + recompute_s} if recompute_s is not None else {}
    hidden = min(wait_s, fetch_s) / fetch_s
    if arguments.json:
        parts = {"wait_s": wait_s, "fetch_s": fetch_s, "recompute_s": recompute_s, "bytes": count}
        show(parts | {"times_s": found, "hidden": hidden})
        return 0
    rows = [
        ["W", f"{number(wait_s)} s", "the wait for a place"],
        ["F", f"{number(fetch_s)} s", f"the fetch of {size(count)}"],
        *([["R", f"{number(recompute_s)} s", "recomputing instead"]] if recompute_s is not None else []),
        *([way.replace("_", " "), f"{number(took)} s", FORMULAS[way]] for way, took in found.items()),
    ]
    print("\n".join(aligned(rows)))
    print(f"kvprefetch hides {percent(hidden)} of the fetch")
    if recompute_s is not None and found["recomputed"] < found["kvprefetch"]:
        print("recomputing would be sooner")
    return 0


def run_trace(arguments: Arguments, each: int) -> int:
    """Print the tokens found and the seconds saved by size; `each`: its bytes. Raises Unavailable, ConfigError."""
    seen = Reuse()
    try:
        with arguments.trace.open(encoding="utf-8", errors="replace") as file:
            for prompt in prompts(file, arguments.block_tokens):
                seen.add(prompt)
    except OSError as error:
        raise Unavailable(f"{arguments.trace}: cannot be read: {error.strerror}") from None
    if not seen.tokens:
        raise ConfigError(f"estimate: no prompt in {arguments.trace}")
    try:
        sizes = [*map(parse_size, arguments.size)]
        local = seen.found(parse_size(arguments.local) / each)
    except ValueError as error:
        raise ConfigError(f"estimate: --size, --local: {error}") from None
    whole = int(seen.all_tokens * each / FILLED)
    sizes = sizes or [*(whole >> back for back in range(10, 0, -1)), whole]
    found: list[dict[str, Any]] = []
    for wanted in sizes:
        tokens = max(local, seen.found(wanted * FILLED / each))
        took = each * 8 / (arguments.link * 1e9) if arguments.link else 0.0
        saved_s = (tokens - local) * (1 / arguments.prefill - took) if arguments.prefill else None
        found.append({"bytes": wanted, "hit_rate": tokens / seen.tokens, "saved_s": saved_s})
    if arguments.json:
        show({"prompts": seen.prompts, "tokens": seen.tokens, "all_bytes": whole, "sizes": found})
        return 0
    print(f"{seen.prompts} prompts, {seen.tokens} tokens; all of their KV: {size(whole)}")
    rows = [["STORE", "HIT", *(["SAVED"] if arguments.prefill else [])]]
    for line in found:
        saved = [f"{number(line['saved_s'])} s"] if line["saved_s"] is not None else []
        bar = ["█" * round(50 * line["hit_rate"])] if arguments.plot else []
        rows.append([size(line["bytes"]), percent(line["hit_rate"]), *saved, *bar])
    widths = max(map(len, rows))
    print("\n".join(aligned([row + [""] * (widths - len(row)) for row in rows])))
    return 0


def token_bytes(model: Path) -> int:
    """Return the bytes of a token's KV in all layers, as a model's config.json has them; windows count in full.

    Raises Unavailable.
    """
    path = model / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        raw = raw.get("text_config", raw)
        each = raw["num_hidden_layers"] * (4 if (raw.get("dtype") or raw.get("torch_dtype")) == "float32" else 2)
        if rank := raw.get("kv_lora_rank"):  # MLA: one latent vector in place of keys and values
            return int(each * (rank + raw["qk_rope_head_dim"]))
        heads = raw["num_attention_heads"]
        width = raw.get("head_dim") or raw["hidden_size"] // heads
        return int(each * 2 * (raw.get("num_key_value_heads") or heads) * width)
    except OSError as error:
        raise Unavailable(f"{path}: cannot be read: {error.strerror}", "name the model's folder") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unavailable(f"{path}: does not say it: {error!r}", "use --token-bytes") from None
