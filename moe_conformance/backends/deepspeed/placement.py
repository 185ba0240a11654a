"""The library's process groups of a rank, and the model parallel unit of which it requests sizes."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from moe_conformance.backends.deepspeed import library
from moe_conformance.contract import Config, Topology, Unsupported, refusals


class _Unit:
    """The model parallel unit (mpu) that a trainer passes: sizes and groups of the suite, under the library's names.

    The layer knows of no context parallelism: its ranks have tokens of their own, as data parallel ones have.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._topology.sizes["tp"]

    def get_tensor_model_parallel_rank(self) -> int:
        return self._topology.ranks("tp").index(self._topology.rank)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._topology.group("tp")

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._topology.sizes["pp"]

    def get_model_parallel_world_size(self) -> int:
        return self._topology.sizes["tp"] * self._topology.sizes["pp"]

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        assert self._topology.sizes["pp"] == 1  # the suite has no group of tp and pp
        return self._topology.group("tp")

    def get_model_parallel_rank(self) -> int:
        stage = self._topology.ranks("pp").index(self._topology.rank)
        return stage * self._topology.sizes["tp"] + self.get_tensor_model_parallel_rank()

    def get_data_parallel_world_size(self) -> int:
        return len(self._topology.ranks("dp_cp"))

    def get_data_parallel_rank(self) -> int:
        return self._topology.ranks("dp_cp").index(self._topology.rank)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._topology.group("dp_cp")


class Placement:
    """The library's process groups of one topology, until it is closed. Collective."""

    def __init__(self, topology: Topology) -> None:
        """Initialise the library's communication over torch's, and let it make the groups of experts.

        Raises:
            Unsupported: experts would be split.
        """
        if topology.sizes["etp"] > 1:
            raise Unsupported(f"etp = {topology.sizes['etp']}: what splits an expert is the module of the user")
        self.topology, self.ep = topology, topology.sizes["ep"]
        self.unit = _Unit(topology)
        self._local_rank = os.environ.get("LOCAL_RANK")
        os.environ["LOCAL_RANK"] = str(topology.rank)  # which the engine reads
        library.comm.init_distributed(dist.get_backend())
        library.groups.mpu = self.unit
        library.groups._create_expert_and_data_parallel(self.ep)

    @property
    def name(self) -> str:
        """The library's name of the group of this rank's experts."""
        return f"ep_size_{self.ep}"

    @property
    def group(self) -> dist.ProcessGroup:
        """The library's group of expert parallel ranks."""
        group: dist.ProcessGroup = library.groups._get_expert_parallel_group(self.name)
        return group

    @property
    def ep_rank(self) -> int:
        """The place of this rank in its group of expert parallel ranks."""
        return self.topology.ranks("ep").index(self.topology.rank)

    def held(self, experts: int) -> range:
        """Return the global ids of this rank's experts.

        Raises:
            Unsupported: experts cannot be placed; where ep does not divide them the layer itself raises.
        """
        if experts < 1 or experts % self.ep:
            raise Unsupported(f"every rank holds the same number of experts: {experts} on ep = {self.ep}")
        N = experts // self.ep
        first = self.ep_rank * N
        return range(first, first + N)

    def close(self) -> None:
        """Destroy the groups that the library made, and clear its records of groups."""
        made = (library.groups._EXPERT_PARALLEL_GROUP, library.groups._EXPERT_DATA_PARALLEL_GROUP)
        for group in [group for groups in made for group in groups.values()]:
            dist.destroy_process_group(group)
        library.forget_groups()
        if self._local_rank is None:
            os.environ.pop("LOCAL_RANK")
        else:
            os.environ["LOCAL_RANK"] = self._local_rank


def build(config: Config, placement: Placement, expert: Any, **gate: Any) -> Any:
    """Build a MoE layer of the library, of these experts.

    Raises:
        Unsupported: by the library, where ep does not divide the experts.
    """
    with refusals(AssertionError, match="should be divisible by expert parallel size"):
        return library.MoE(
            config.hidden, expert, num_experts=config.experts, ep_size=placement.ep, k=config.top_k, **gate
        )
