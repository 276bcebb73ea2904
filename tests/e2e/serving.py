"""Process that a template forks: vLLM's server, which need not import vLLM again, nor its engine core after it."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
from functools import partial

from benchmarks.serve.server import SERVE

ARGUMENTS = "KVPREFETCH_LAB_SERVE"  # the variable with those of the server, as JSON


def main() -> None:
    """Serve until the end."""
    os.dup2(2, 1)  # vLLM logs there
    from vllm.v1.engine import utils

    utils.get_mp_context = partial(multiprocessing.get_context, "fork")  # vLLM's default where there are GPUs
    sys.argv[1:] = json.loads(os.environ[ARGUMENTS])
    runpy.run_module(SERVE[-1], run_name="__main__")
