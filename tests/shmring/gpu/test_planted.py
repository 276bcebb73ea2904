"""Each rule of CUDA's that our code could break: with the fault planted, a test of this suite fails, and says why."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.support.fakecuda import needs_fake
from tests.support.planted import run_planted

pytestmark = [needs_fake, pytest.mark.stress]


class Fault(NamedTuple):
    """`says`: a part of what the failed test prints."""

    rule: str
    module: str
    old: str
    new: str
    test: str
    says: str


FAULTS = [
    Fault(
        "a copy is over only when its event says so",
        "daemon.engine.device",
        "                stream.wait()",
        "                pass",
        "tests/gpu/test_daemon.py::test_a_worker_loads_from_both_places_what_the_daemon_staged",
        "AssertionError",
    ),
    Fault(
        "an event belongs to one point in a stream",
        "connector.copies",
        "            fence = self._streams.event()\n",
        "            fence = self.__dict__.setdefault('fence', self._streams.event())\n",
        "tests/gpu/test_copies.py::test_a_fence_is_for_its_own_copies",
        "assert not behind.query()",
    ),
    Fault(
        "asynchronous loads wait for the steps before",
        "connector.copies",
        "            stream.wait_event(self._mark)\n",
        "",
        "tests/gpu/test_copies.py::test_asynchronous_loads_wait_for_what_came_before_their_step",
        "assert not is_busy()",
    ),
    Fault(
        "the context is current in the calling thread",
        "shmring.gpu.cuda",
        "            self.runtime.setDevice(self.index)",
        "            pass",
        "tests/gpu/test_daemon.py::test_a_killed_worker_holds_nothing",
        "CUDA_ERROR_INVALID_CONTEXT",
    ),
    Fault(
        "instances of a GPU share its first UUID",
        "shmring.gpu.cuda",
        '"cuDeviceGetUuid_v2"',
        '"cuDeviceGetUuid"',
        "tests/shmring/gpu/test_cuda.py::test_gpus_and_instances_of_them_have_names_of_their_own",
        "AssertionError",
    ),
    Fault(
        "a stream is given back",
        "shmring.gpu.cuda",
        '            undo.callback(driver.call, "cuStreamDestroy_v2", self.pointer)\n',
        "",
        "tests/shmring/gpu/test_cuda.py::test_a_device_is_for_any_thread_beside_those_of_other_gpus",
        "-context-",
    ),
    Fault(
        "new memory holds another user's bytes",
        "shmring.gpu.cuda",
        '            self.call("memset", memory.address, 0, whole)',
        "            pass",
        "tests/gpu/test_memory.py::test_new_memory_has_nothing_of_its_last_user",
        "assert not np.True_",
    ),
    Fault(
        "to clear memory is only queued",
        "shmring.gpu.cuda",
        '            self.call("streamSynchronize", 0)',
        "            pass",
        "tests/gpu/test_memory.py::test_new_memory_has_nothing_of_its_last_user",
        "assert not np.True_",
    ),
    Fault(
        "mapped memory has no access before it is given",
        "shmring.gpu.cuda",
        '            driver.call("cuMemSetAccess", self.address, size_bytes, driver.access(device.index), 1)\n',
        "",
        "tests/gpu/test_memory.py::test_what_one_process_writes_the_other_reads",
        "FAKECUDA: a GPU has no access",
    ),
    Fault(
        "a handle keeps its memory",
        "shmring.gpu.cuda",
        '            undo.callback(driver.call, "cuMemRelease", handle)\n',
        "",
        "tests/gpu/test_memory.py::test_slabs_made_and_unmade_leave_nothing",
        "the memory given back",
    ),
    Fault(
        "a descriptor keeps its memory: the daemon's",
        "daemon.engine.device",
        "                os.close(descriptor)",
        "                pass",
        "tests/gpu/test_daemon.py::test_the_slab_is_freed_when_both_sides_let_go",
        "AssertionError",
    ),
    Fault(
        "a descriptor keeps its memory: the worker's",
        "connector.device_cache",
        "            os.close(slab)",
        "            pass",
        "tests/gpu/test_memory.py::test_epochs_of_a_worker_leave_nothing",
        "AssertionError",
    ),
    Fault(
        "memory is unmapped after the last copy that uses it",
        "connector.device_cache",
        "        self._ending.wait()\n",
        "",
        "tests/gpu/test_daemon.py::test_a_worker_loads_from_both_places_what_the_daemon_staged",
        "FAKECUDA: a kernel reads memory that is neither its GPU's nor registered",
    ),
    Fault(
        "legacy: memory is freed when no other process maps it",
        "shmring.gpu.legacy",
        "                while other.recv(1):\n                    pass\n",
        "                pass\n",
        "tests/shmring/gpu/test_legacy.py::test_memory_is_freed_when_the_last_process_let_go",
        "FAKECUDA: memory is freed while another process has it mapped",
    ),
    Fault(
        "a copy stays within one registration",
        "shmring.gpu.driver",
        "    least = math.lcm(slot_bytes, mmap.PAGESIZE)",
        "    least = mmap.PAGESIZE",
        "tests/gpu/test_memory.py::test_registered_memory_is_copied_across_pieces_slot_by_slot",
        "memcpyAsync: CUDARuntimeError: cudaErrorInvalidValue",
    ),
    Fault(
        "whole pages are registered",
        "shmring.gpu.driver",
        "    end = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE",
        "    end = size_bytes",
        "tests/connector/test_device_cache.py::test_host_slots_are_pinned_without_a_slab",
        "FAKECUDA: a part of a page is registered",
    ),
    Fault(
        "registered memory is given up before it is unmapped",
        "connector.device_cache",
        "            self._give_back(self._device.unregister, address)",
        "            pass",
        "tests/connector/test_device_cache.py::test_host_slots_are_pinned_without_a_slab",
        "DID NOT RAISE",
    ),
    Fault(
        "a kernel touches no host memory that is not registered",
        "connector.copies",
        "        if pinned < host and any(",
        "        if False and any(",
        "tests/connector/test_copies.py::test_the_kernel_never_touches_host_slots_that_are_not_pinned",
        "FAKECUDA: a kernel reads memory that is neither its GPU's nor registered",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.rule)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    status, output = run_planted(fault.module, fault.old, fault.new, fault.test, FAKECUDA_LAG_US="20000")
    assert status in (1, -6), output
    assert fault.says in output, output
