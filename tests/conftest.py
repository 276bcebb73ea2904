"""What all tests share: the record of what they show; those that need a CUDA device are skipped without one."""

import contextlib
import signal
from dataclasses import astuple

import pytest

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from tests.support import shown

# How long an example takes says nothing on a busy machine.  Machines with a GPU may lack hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("tests", deadline=None)
    settings.load_profile("tests")

# A shell's background job ignores SIGINT, and what it starts inherits that; tests interrupt what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="keep what tests show in docs/reference/compatibility")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record"):
        config.pluginmanager.register(shown.Recorder())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties += [("shows", astuple(each)) for each in shown.shown_by(item)]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    try:
        cuda.uuid_of("cuda", 0)
    except DeviceError as error:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {error}"))
