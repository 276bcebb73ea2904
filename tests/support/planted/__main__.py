"""The process that forks for each planted fault: a line of JSON in, a line out."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy.random
import pytest
import torch

HERE = Path(__file__).resolve().parent
SLOW_TO_IMPORT = (numpy.random, torch)  # none of ours: it may be the one to change


def run(fault: dict[str, str], tests: list[str], variables: dict[str, str]) -> int:
    """In the fork: plant the fault, here and in what the tests start, and run them."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update({**variables, "PLANTED": json.dumps(fault), "PYTHONPATH": path})
    sys.path.insert(0, str(HERE))  # some tests hand it on as PYTHONPATH
    from tests.support.planted.sitecustomize import plant

    plant()
    # Without capture, or the last line of a process that ends itself would be lost.
    return int(pytest.main(["-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *tests]))


def forked(order: Any) -> list[Any]:
    with tempfile.TemporaryFile("w+") as output:
        if (child := os.fork()) == 0:
            status = 98
            try:
                for name in (1, 2):
                    os.dup2(output.fileno(), name)
                status = run(*order)
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        _, waited = os.waitpid(child, 0)
        output.seek(0)
        return [os.waitstatus_to_exitcode(waited), output.read()]


for line in sys.stdin:
    print(json.dumps(forked(json.loads(line))), flush=True)
