"""What all tests share: tests that need a CUDA device are skipped where there is none, and say why."""

import contextlib
import signal

import pytest

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda

# How long an example takes says nothing on a busy machine.  Machines with a GPU may lack hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("tests", deadline=None)
    settings.load_profile("tests")

# A shell's background job ignores SIGINT, and what it starts inherits that; tests interrupt what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    try:
        cuda.uuid_of("cuda", 0)
    except DeviceError as error:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {error}"))
