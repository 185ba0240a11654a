"""DROP: bugs in how many slots an expert takes, which of them, and what becomes of the others."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.router import capacity
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Routed
from self_tests.planted_bugs.plant import Expectation, planted

# ---- how many ------------------------------------------------------------------------------------------------------


@planted(
    Expectation("DROP-01", "capacity-fraction", "route", "rank 0 has the capacity 11 instead of 12", "rounded down")
)
class RoundedDown(Router):
    """The mean load times the factor is cut to a whole number."""

    def _capacity(self, tokens: int) -> int:
        mean = (self.config.capacity.factor or 0.0) * self.config.top_k * tokens / self.config.experts
        return max(self.config.capacity.minimum, int(mean))


@planted(
    Expectation(
        "DROP-01", "capacity-tight-position", "route", "rank 0 token", "has the id -2, which is neither an expert"
    )
)
class AnyNegativeId(Router):
    """A dropped slot gets another negative id than -1."""

    def _drop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        kept_ids_TK, kept_weights_TK = super()._drop(ids_TK, weights_TK)
        return torch.where(kept_ids_TK >= 0, kept_ids_TK, -2), kept_weights_TK


@planted(
    Expectation("DROP-01", "capacity-tight-position", "route", "rank 0 has the capacity", "computed for top-k = 1")
)
class TokensForSlots(Router):
    """The capacity is computed of the number of tokens, not of their choices."""

    def _capacity(self, tokens: int) -> int:
        return max(
            self.config.capacity.minimum, math.ceil((self.config.capacity.factor or 0.0) * tokens / self.config.experts)
        )


@planted(Expectation("DROP-02", "capacity-minimum", "route", "rank 0 has the capacity 3 instead of 4"))
class NoMinimum(Router):
    """The configured minimum is never looked at."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config.changed({"capacity.minimum": 0}), device)


class TableRouter(Router):
    """For plants that rank the tokens of every expert in a table (T, E) with zeros where a token did not choose it."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        self.seen_TE = super()._logits(x_TD)
        return self.seen_TE

    def _best_of_table(self, table_TE: Tensor, ids_TK: Tensor, room: int) -> Tensor:
        rows = table_TE.topk(room, dim=0, sorted=False).indices
        return torch.zeros_like(table_TE, dtype=torch.bool).scatter(0, rows, True).gather(1, ids_TK)


@planted(
    Expectation("DROP-03", "capacity-negative-logits", "route", "rank 0 has the capacity 0 instead of 5"),
    real="deepspeedai/DeepSpeed commit 853c93894 (#7986)",
)
class RawLogitsAmongZeros(TableRouter):
    """Tokens are ranked by logits in a table of zeros, so that below zero those win that never chose the expert."""

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        chosen_TK = self.seen_TE.detach().gather(1, ids_TK)
        table_TE = torch.zeros_like(self.seen_TE).scatter(1, ids_TK, chosen_TK)
        return self._best_of_table(table_TE, ids_TK, min(room, len(ids_TK)))


@planted(
    Expectation("DROP-04", "capacity-beyond", "run", "rank 0 raised in forward:0", "out of range"),
    real="NVIDIA/Megatron-LM commit ecb948e583 (#2214); deepspeedai/DeepSpeed commits c43cf21ce, 5fbc3eeeb",
)
class BestOfMoreThanAll(TableRouter):
    """The best C tokens of an expert are asked for where there are fewer than C tokens."""

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        table_TE = torch.zeros_like(self.seen_TE).scatter(1, ids_TK, weights_TK)
        return self._best_of_table(table_TE, ids_TK, room)


# ---- which ---------------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        *("DROP-05", "capacity-tight", "route"),
        *("rank 0 expert", "keeps token", "drops token", "the dropped token has the weight"),
    )
)
class AlwaysTheFirst(Router):
    """Whatever the policy, slots are kept as they come."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config.changed({"capacity.drop_policy": "position"}), device)


@planted(
    Expectation(
        *("DROP-05", "capacity-biased", "route"),
        *("rank 0 expert", "keeps token", "drops token", "the dropped token has the weight"),
    )
)
class RankedWithBias(Router):
    """Slots are ranked by the score that selects, balance bias included, before it is normalised."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        self.seen_TE = scores_TE.detach() + (0.0 if self.balance_bias is None else self.balance_bias)
        return super()._select(scores_TE)

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        return super()._keep(ids_TK, self.seen_TE.gather(1, ids_TK), room)


@planted(
    Expectation(
        *("DROP-06", "capacity-mean-position", "route"),
        *("rank 0 expert", "keeps token", "drops token", "by position, the first tokens"),
    )
)
class AlwaysTheHeaviest(Router):
    """Whatever the policy, the heaviest slots are kept."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config.changed({"capacity.drop_policy": "weights"}), device)


@planted(
    Expectation(
        *("DROP-06", "capacity-mean-position", "route"),
        *("rank 0 expert", "keeps token", "drops token", "by position, the first tokens"),
    ),
    real="NVIDIA/Megatron-LM core_r0.16.0, docs/findings/megatron-core.md MC-15 (2026-11-21)",
)
class FirstOfATie(TableRouter):
    """The first are the best C of a column of ones and zeros, and nothing says which of equals come first."""

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        if self.config.capacity.drop_policy == "weights":
            return super()._keep(ids_TK, weights_TK, room)
        map_TE = torch.zeros_like(self.seen_TE, dtype=torch.int32).scatter(1, ids_TK, 1)
        return self._best_of_table(map_TE, ids_TK, min(room, len(ids_TK)))


@planted(
    Expectation("DROP-07", "capacity-of-own-tokens", "route", "the capacity 4 instead of 5", "the mean number of"),
    Expectation(
        *("DROP-01", "capacity-mean", "route"),
        *("the capacity 4 instead of 5", "computed from the mean number of tokens of the"),
    ),
)
class CapacityOfAllRanks(Router):
    """The capacity is that of the mean number of tokens of all ranks."""

    def _capacity(self, tokens: int) -> int:
        every = torch.tensor([tokens])
        dist.all_reduce(every)
        return super()._capacity(int(every) // dist.get_world_size())


# ---- what is told ---------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        *("DROP-12", "capacity-filled-up", "route"),
        *("rank 0 reports the load [", "(selected by its tokens) or", "(kept of these)"),
    )
)
class LoadOfFilledExperts(Router):
    """The load is counted behind the filling up, so that every expert looks as busy as every other."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        routed = super().forward(x, padding_mask_T)
        if not self.config.capacity.padded or routed.counts_E is None:
            return routed
        room = self._capacity(len(routed.routing.ids_TK))
        return replace(routed, counts_E=torch.full_like(routed.counts_E, room))


# ---- what becomes of them ------------------------------------------------------------------------------------------


@planted(Expectation("DROP-09", "capacity-normalised", "route", "divided again, by the sum of those that were kept"))
class DividedAgain(Router):
    """Weights are normalised a second time, over the kept."""

    def _drop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = super()._drop(ids_TK, weights_TK)
        sum_T1 = weights_TK.sum(1, keepdim=True)
        return ids_TK, weights_TK / sum_T1.masked_fill(sum_T1 == 0, 1.0) * self.config.routing.scale


@planted(Expectation("DROP-11", "capacity-normalised", "gradient", "dx of rank 0 token"))
class DroppedOutOfTheSum(Router):
    """The scores of dropped slots are constants in the sum that the others are divided by."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        self.scores_TK = scores_TE.gather(1, ids_TK)
        return super()._weights(scores_TE, ids_TK)

    def _drop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        kept_ids_TK, _ = super()._drop(ids_TK, weights_TK)
        scores_TK = torch.where(kept_ids_TK >= 0, self.scores_TK, self.scores_TK.detach())
        weights_TK = scores_TK / scores_TK.sum(1, keepdim=True) if self.config.routing.normalise else scores_TK
        return kept_ids_TK, torch.where(kept_ids_TK >= 0, weights_TK * self.config.routing.scale, 0.0)


@planted(
    Expectation(
        *("DROP-11", "dropping-half-even", "gradient", "likely cause: dropped slots passed gradients to the router"),
        *("dx of rank 0 token", "which kept 1 of 2 slots, is"),
    ),
    Expectation(
        *("DROP-11", "dropping-all-even", "gradient"),
        *("likely cause: dropped slots passed gradients", "which had all slots dropped"),
    ),
)
class ZeroedBehindAutograd(Router):
    """Weights of dropped slots are set to zero where autograd does not see it, and their rows travel all the same."""

    def _drop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        kept_ids_TK, _ = super()._drop(ids_TK, weights_TK)
        weights_TK.data.masked_fill_(kept_ids_TK < 0, 0.0)
        return ids_TK, weights_TK


# ---- the formula, clause by clause -----------------------------------------------------------------------------------


@planted(Expectation("DROP-01", "capacity-tight", "route", "rank 0 has the capacity"))
class FactorLeftOut(Router):
    """The capacity is the mean load, whatever the factor."""

    def _capacity(self, tokens: int) -> int:
        return capacity.of_rank(self.config.changed({"capacity.factor": 1.0}), tokens)


@planted(Expectation("DROP-03", "capacity-negative-logits", "route", "rank 0 has the capacity"))
class OnePlaceStaysEmpty(Router):
    """The last place of every expert is never used."""

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        return super()._keep(ids_TK, weights_TK, max(0, room - 1))


@planted(Expectation("DROP-04", "capacity-beyond", "route", "rank 0"))
class LastSlotAlwaysDropped(Router):
    """The last slot of a batch is dropped where there is a capacity, whether its expert has room or not."""

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        kept_TK = super()._keep(ids_TK, weights_TK, room).clone()
        kept_TK[-1:, -1] = False
        return kept_TK


@planted(Expectation("DROP-04", "capacity-beyond", "route", "rank 0"))
class NormalisedForACapacity(Router):
    """Where there is a capacity the weights are divided by their sum, whatever was asked for."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = super()._weights(scores_TE, ids_TK)
        divides = self.config.capacity.factor is not None
        return weights_TK / weights_TK.sum(1, keepdim=True) * 0.75 if divides else weights_TK
