"""The files that vLLM opens of a model, as the kernel sees them: each is on a list, or is a weight."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvprefetch.connector.identity import identity
from tests.lab.checkpoint import TINY, make_checkpoint
from tests.lab.hybrid import make_gemma3, make_granite, make_llama4

BUILD = """
import socket, sys, torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

torch.accelerator.empty_cache = lambda: None
begun = False
for folder in sys.argv[1:]:
    given = dict(skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=512)
    config = EngineArgs(model=folder, **given).create_engine_config()
    with set_current_vllm_config(config):
        if not begun:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                port = found.getsockname()[1]
            parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
            begun = True
        get_model(vllm_config=config)
"""
WEIGHTS = (".safetensors", ".bin", ".pt")


@pytest.mark.stress
@pytest.mark.vllm
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_each_file_that_a_model_is_built_from_is_on_the_list(tmp_path: Path) -> None:
    """A Python hook does not see what safetensors' and tokenizers' Rust opens."""
    models = [make_checkpoint(tmp_path / "llama", TINY), make_gemma3(tmp_path / "gemma")]
    models += [make_llama4(tmp_path / "llama4"), make_granite(tmp_path / "granite")]
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-qq", "-e", "trace=open,openat", "-o", str(trace), sys.executable, "-c", BUILD]
    subprocess.run([*command, *map(str, models)], cwd=tmp_path, timeout=600, check=True)
    opened = set()
    for line in trace.read_text(errors="replace").splitlines():
        for model in models:
            if (found := re.search(re.escape(f'"{model}/') + r'([^"]+)".*= \d', line)) and (model / found[1]).is_file():
                opened.add(found[1])
    assert {"config.json", "model.safetensors"} <= opened
    unlisted = [each for each in opened if not each.endswith(WEIGHTS) and identity.rule("files", each) is None]
    assert unlisted == []
