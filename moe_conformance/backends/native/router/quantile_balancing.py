"""The routers of a model whose balance bias is set to quantiles of the step's scores.

V valid tokens of the step, K slots, E experts. The bias is added to scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.offered import offers
from moe_conformance.backends.native.router.balancing import BalancingRouters
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Routed, Topology, Unsupported

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession


class QuantileRouters(BalancingRouters):
    """Keeps the scores of a step, and sets every bias so that its expert would have had its share of the tokens.

    Implements: BIAS-12.
    """

    def __init__(self, config: Config, topology: Topology, routers: Sequence[Router]) -> None:
        """Take the routers.

        Raises:
            CannotBuild: groups, capacity or forced routing: then a score does not decide alone.
        """
        super().__init__(config, topology, routers)
        if config.routing.groups or config.routing.forced or config.capacity.factor is not None:
            raise CannotBuild("quantile balancing needs routes that scores and bias alone decide")
        self.scores: list[list[Tensor]] = [[] for _ in routers]

    def load(self, routed: Routed, padding_mask_T: Tensor | None) -> Tensor:
        """Return the load, and keep the scores of the layer that is counted next."""
        assert routed.logits_TE is not None  # native's router returns them
        router = self.routers[0]
        assert isinstance(router, Router)
        scores_TE = router._scores(routed.logits_TE.detach())
        self.latest_VE = self.valid(scores_TE, padding_mask_T)
        return super().load(routed, padding_mask_T)

    def valid(self, scores_TE: Tensor, padding_mask_T: Tensor | None) -> Tensor:
        """Return the scores of valid tokens."""
        return scores_TE if padding_mask_T is None else scores_TE[~padding_mask_T]

    def count(self, number: int, load_E: Tensor) -> None:
        """Count the load, and keep the scores with it."""
        super().count(number, load_E)
        self.scores[number].append(self.latest_VE)

    @torch.no_grad()
    def update(self) -> None:
        """Set every bias by the scores of the step over all ranks, in place, and begin anew."""
        for number, parts in enumerate(self.scores):
            bias_E = self.routers[number].balance_bias
            assert isinstance(bias_E, Tensor)  # the session builds no routers without
            own_VE = torch.cat([bias_E.new_zeros(0, len(bias_E)), *parts])
            scores_VE = self.gathered(own_VE)
            if len(scores_VE) and self.config.top_k < len(bias_E):
                self.move(number, self.balanced(scores_VE, bias_E) - bias_E)
        self.begin()

    def begin(self) -> None:
        """Forget the step."""
        super().begin()
        self.scores = [[] for _ in self.scores]

    def balanced(self, scores_VE: Tensor, bias_E: Tensor) -> Tensor:
        """Return the bias between the last token that is to be admitted and the first that is not, mean 0."""
        V, E = scores_VE.shape
        cutoff_V = (scores_VE + bias_E).sort(1, descending=True).values[:, self.config.top_k]
        over_VE = (scores_VE - cutoff_V[:, None]).sort(0, descending=True).values
        share = self.config.top_k * V / E
        last, first = max(int(share), 1) - 1, min(-int(-share // 1), V - 1)
        middle_E = (over_VE[last] + over_VE[first]) / 2
        return middle_E.mean() - middle_E

    def gathered(self, own_VE: Tensor) -> Tensor:
        """Return the scores of all ranks that hold tokens of these routers."""
        for name in ("tp", "dp_cp"):
            group = self.topology.group(name)
            if group.size() == 1:
                continue
            sizes_W = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
            dist.all_gather(sizes_W, torch.tensor([len(own_VE)]), group=group)
            most = max(int(size) for size in sizes_W)
            parts = [own_VE.new_empty(most, own_VE.shape[1]) for _ in sizes_W]
            dist.all_gather(parts, F.pad(own_VE, (0, 0, 0, most - len(own_VE))), group=group)
            own_VE = torch.cat([part[: int(size)] for part, size in zip(parts, sizes_W, strict=True)])
        return own_VE


@offers("balancing_routers", maps=("balance",))
def balancing_routers(session: NativeSession, config: Config) -> BalancingRouters:
    """Build the routers of a model whose balance bias is updated."""
    if not config.routing.balance_bias:
        raise Unsupported("routers without routing.balance_bias have none to update")
    routers = [session.router(replace(config, balance=Config.balance)) for _ in range(config.balance.layers)]
    kind = QuantileRouters if config.balance.rule == "quantile" else BalancingRouters
    return session.use(kind)(config, session.topology, routers)
