"""The pool of threads: how large, where, and what forks and idle times do to it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from longspan.errors import CapacityError
from longspan.ops.native import dense
from longspan.ops.native.extension import extension
from longspan.ops.native.threads import default_threads, use_threads


def product() -> torch.Tensor:
    return dense.lm_head(torch.ones(1, 64), torch.ones(300, 64))


def test_processors_that_the_process_may_not_use_are_refused() -> None:
    with pytest.raises(CapacityError, match=r"cpus names \[99999\], this process may run on \["):
        use_threads(None, [99999])


def test_threads_stay_on_their_processors_and_the_caller_where_it_was(with_threads) -> None:
    allowed = os.sched_getaffinity(0)
    before = set(os.listdir("/proc/self/task"))
    with_threads(1)
    extension().set_threads(3, sorted(allowed)[:1])
    product()
    (first, second) = sorted(set(os.listdir("/proc/self/task")) - before)[-2:]
    assert os.sched_getaffinity(int(first)) == os.sched_getaffinity(int(second)) == set(sorted(allowed)[:1])
    assert os.sched_getaffinity(0) == allowed


def test_a_quota_and_hyperthreads_limit_the_default(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    for cpu in cpus:
        topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text("all of one core")
    assert default_threads(tmp_path) == 1
    for cpu in cpus:
        (tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu}\n")
    assert default_threads(tmp_path) == len(cpus)
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpu.max").write_text("50000 100000\n")
    assert default_threads(tmp_path) == 1
    (tmp_path / "fs/cgroup/cpu.max").write_text("max 100000\n")
    assert default_threads(tmp_path) == len(cpus)


def test_idle_threads_sleep(with_threads) -> None:
    before = set(os.listdir("/proc/self/task"))
    with_threads(4)
    product()
    time.sleep(0.2)  # they spin for a moment first
    fresh = set(os.listdir("/proc/self/task")) - before
    states = [
        Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()[0] for task in fresh
    ]
    assert states and set(states) == {"S"}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_computes_too(with_threads) -> None:
    with_threads(3)
    expected = product()
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(product(), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_pool_may_be_replaced_while_others_compute(with_threads) -> None:
    expected, wrong = product(), []

    def compute() -> None:
        for _ in range(300):
            if not torch.equal(product(), expected):
                wrong.append(1)

    workers = [threading.Thread(target=compute) for _ in range(2)]
    for worker in workers:
        worker.start()
    for threads in (1, 2, 3, 4) * 5:
        with_threads(threads)
    for worker in workers:
        worker.join(timeout=120)
        assert not worker.is_alive()
    assert not wrong
