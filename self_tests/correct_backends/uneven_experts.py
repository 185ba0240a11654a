"""Experts that ep does not divide: a correct backend places all of them, and one that loses some is wrong."""

from __future__ import annotations

from moe_conformance.contract import Config, Session, Topology
from self_tests.correct_backends.gathered_tokens import AdaptedExperts, Gathered, GatheredSession


class _Fewer(GatheredSession):
    def experts(self, config: Config) -> AdaptedExperts:
        divided = config.experts // self.topology.sizes["ep"]
        return AdaptedExperts(config, self.moe(config).expert_ids[: max(divided, 1)])


class FewerParameters(Gathered):
    """It is wrong: its exchange places every expert, and those left over by the division have no parameters."""

    def open(self, topology: Topology, device: object) -> Session:  # noqa: D102 - see `contract`
        return _Fewer(topology)
