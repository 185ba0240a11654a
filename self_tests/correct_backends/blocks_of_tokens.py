"""A layer whose kernels take tokens in blocks of 8: it refuses others, and its adapter states that as a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from moe_conformance.contract import Config, ExpertFn, Limit, Routing, Session, Topology
from self_tests.correct_backends.gathered_tokens import AdaptedExchange, Gathered, GatheredSession

BLOCK = 8


class _InBlocks(AdaptedExchange):
    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        tokens = x.shape[:-1].numel()
        if tokens % BLOCK:
            raise ValueError(f"{tokens} tokens are no multiple of {BLOCK}")
        return super().__call__(x, routing, expert)


class _Session(GatheredSession):
    def exchange(self, config: Config) -> AdaptedExchange:
        return _InBlocks(self.moe(config.only("experts", "top_k", "hidden", "dtype")))


class Blocks(Gathered):
    """What `--backend self_tests.correct_backends.blocks_of_tokens:Blocks` names."""

    name = "blocks-of-tokens"
    judged: Mapping[int, int] = {1: 42, 2: 57, 4: 67}

    def limits(self, variant: str) -> Sequence[Limit]:  # noqa: D102 - see `contract`
        blocks = Limit("tokens", range(0, 1 << 20, BLOCK), f"blocks of {BLOCK} tokens", proof="undefined")
        return (*super().limits(variant), blocks)

    def open(self, topology: Topology, device: object) -> Session:  # noqa: D102 - see `contract`
        return _Session(topology)
