"""A worker of vLLM: its process groups as the `Layout` of our parallel maths, and its processors."""

from __future__ import annotations

import os
import re
import time

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_dcp_group, get_ep_group, get_tp_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.logger import init_logger

from longspan.config import ModelConfig
from longspan.ops.backend import Operators
from longspan.parallel.group import Group
from longspan.parallel.layout import Layout
from longspan.parallel.traffic import Traffic

logger = init_logger(__name__)

REPORT_SECONDS = 30
BINDINGS = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES")


def make_layout(config: ModelConfig, vllm_config: VllmConfig) -> Layout:
    """The groups of this worker. Raises ConfigError for sizes that the model can't be dealt to.

    Experts are dealt over the tensor group, or with --enable-expert-parallel over those of all replicas.
    """
    parallel = vllm_config.parallel_config
    traffic = Traffic()
    tensor = _group(get_tp_group(), traffic)
    dispatched = parallel.enable_expert_parallel and parallel.data_parallel_size > 1 and config.moe_layers
    layout = Layout(
        config,
        tensor=tensor,
        context=_group(get_dcp_group(), traffic),
        expert=_group(get_ep_group(), traffic) if dispatched else tensor,
        interleave=parallel.cp_kv_cache_interleave_size,
    )
    layout.check_page_size(vllm_config.cache_config.block_size)
    return layout


def _group(group: GroupCoordinator, traffic: Traffic) -> Group:
    return Group(group.cpu_group if group.world_size > 1 else None, traffic)


class TrafficReport:
    """What this rank received from the others, in the log while it works: by kind, token and layer."""

    def __init__(self, layout: Layout) -> None:
        self._traffic = layout.tensor.traffic  # all groups count into the same
        self._due = time.monotonic() + REPORT_SECONDS

    def after_step(self) -> None:
        now = time.monotonic()
        if now < self._due or not any(self._traffic.nbytes.values()):
            return
        self._due = now + REPORT_SECONDS
        logger.info("Received from other ranks since the start:\n%s", self._traffic)


def use_bound_cpus(ops: Operators) -> None:
    """Native threads on the processors that vLLM gave to this worker, or where it gave none on all.

    It says so to whichever OpenMP runtime there is, which has bound this thread to the first of them.
    """
    named = [os.environ[name] for name in BINDINGS if os.environ.get(name)]
    cpus = [int(cpu) for cpu in re.findall(r"\d+", named[0])] if named else []
    if cpus:
        os.sched_setaffinity(0, cpus)
    # vLLM has put a warning in the place of torch's function, but two pools on the same cores would fight:
    # native operators ask for one thread of torch.
    torch.set_num_threads = torch._C.set_num_threads
    ops.use_threads(None, cpus)
    if cpus:
        os.sched_setaffinity(0, cpus[:1])
