"""What all tests share: tests that need a CUDA device are skipped where there is none, and say why."""

import pytest

from kvprefetch.shmring import cuda


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    try:
        cuda.uuid_of("cuda", 0)
    except cuda.DeviceError as error:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {error}"))
