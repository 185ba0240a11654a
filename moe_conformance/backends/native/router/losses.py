"""Losses of one router: this rank's share of each, from its logits; the shares of a tp x cp group add up to the loss.

T tokens of this rank, V valid ones of a microbatch, E experts, K slots, B sequences. A microbatch is what a tp x cp
group processes together: each of its ranks holds other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Config, Topology

BALANCE = ("auxiliary", "sequence", "global_batch", "first_choice")  # losses of counts and scores, beside the z-loss


@dataclass(frozen=True)
class Tokens:
    """What losses read of the tokens of this rank."""

    logits_TE: Tensor
    valid_T: Tensor  # bool
    sequence_T: Tensor  # int64, 0 to B - 1
    sequences: int  # B
    ids_TK: Tensor  # that were routed to, for which nothing is charged


@dataclass(frozen=True)
class Charged:
    """This rank's share of each loss, and the counts of the step so far with this microbatch."""

    shares: Mapping[str, Tensor]
    counts_E: Tensor  # slots, over tp, cp and dp
    tokens: Tensor  # valid ones, over tp, cp and dp
    weight: Mapping[str, Tensor]  # valid tokens that each loss is about: of the tp x cp group, or of all dp groups


class RouterLosses:
    """Charges the router of one layer."""

    def __init__(self, config: Config, topology: Topology) -> None:
        """Read coefficients and groups."""
        self.config, self.topology = config, topology

    def coefficient(self, name: str) -> float:
        """Return the coefficient of a loss."""
        value: float = getattr(self.config.losses, name)
        return value

    def charge(self, tokens: Tokens, counts_E: Tensor, before: Tensor) -> Charged:
        """Return the shares of all losses with a coefficient; counts and number of tokens are those before it.

        Implements: LOSS-17.
        """
        p_TE, ids_TK = self.scores(tokens.logits_TE), self.choices(tokens)
        valid = tokens.valid_T.sum()
        here = self.over_microbatch(valid)
        now_E, now = counts_E, before
        shares: dict[str, Tensor] = {}
        weight: dict[str, Tensor] = {}
        for name in BALANCE:
            if not self.coefficient(name):
                continue
            weight[name] = here
            if name == "sequence":
                shares[name] = self.sequence(p_TE, ids_TK, tokens)
            elif name == "global_batch":
                weight[name] = self.over_step(valid)
                now_E = counts_E + self.over_step(self.counts(ids_TK, tokens.valid_T))
                now = before + weight[name]
                f_E = self.fractions(now_E, now, ids_TK.shape[1])
                shares[name] = self.balance(name, f_E, p_TE, tokens.valid_T, weight[name])
            else:
                chosen_TK = ids_TK[:, :1] if name == "first_choice" else ids_TK
                n_E = self.over_microbatch(self.counts(chosen_TK, tokens.valid_T))
                f_E = self.fractions(n_E, here, chosen_TK.shape[1])
                shares[name] = self.balance(name, f_E, p_TE, tokens.valid_T, here)
        if self.coefficient("z"):
            weight["z"] = here
            shares["z"] = self.z(tokens.logits_TE, tokens.valid_T, here)
        return Charged(shares, now_E, now, weight)

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores of all experts, divided by their sum.

        Implements: LOSS-02, LOSS-20.
        """
        score = self.config.routing.score
        if score in ("softmax", "softmax_topk"):
            return logits_TE.softmax(1)
        if score == "sigmoid":
            s_TE = logits_TE.sigmoid()
        else:
            softplus_TE = -torch.nn.functional.logsigmoid(-logits_TE)
            s_TE = softplus_TE.clamp_min(torch.finfo(softplus_TE.dtype).tiny).sqrt()
        return s_TE / s_TE.sum(1, keepdim=True).clamp_min(torch.finfo(s_TE.dtype).tiny)

    def choices(self, tokens: Tokens) -> Tensor:
        """Return the K experts of highest score, best first: without bias, groups and drops.

        Implements: LOSS-03.
        """
        return tokens.logits_TE.detach().topk(self.config.top_k, dim=1).indices

    def counts(self, ids_TK: Tensor, valid_T: Tensor) -> Tensor:
        """Return the slots of valid tokens by expert.

        Implements: LOSS-14.
        """
        return torch.bincount(ids_TK[valid_T].flatten(), minlength=self.config.experts)

    def fractions(self, n_E: Tensor, tokens: Tensor, slots: int) -> Tensor:
        """Return the share of every expert in the slots of so many tokens.

        Implements: LOSS-01.
        """
        return n_E / (slots * tokens).clamp_min(1)

    def balance(self, name: str, f_E: Tensor, p_TE: Tensor, valid_T: Tensor, tokens: Tensor) -> Tensor:
        """Return c E sum_e f_e P_e, of P the part that this rank's tokens bring.

        Implements: LOSS-01, LOSS-04.
        """
        P_E = (p_TE * valid_T[:, None]).sum(0) / tokens.clamp_min(1)
        return self.coefficient(name) * self.config.experts * (f_E * P_E).sum()

    def sequence(self, p_TE: Tensor, ids_TK: Tensor, tokens: Tokens) -> Tensor:
        """Return the mean over sequences of the auxiliary loss of each, of P the part that this rank's tokens bring.

        Implements: LOSS-05, LOSS-06.
        """
        parts_BT = torch.arange(tokens.sequences, device=p_TE.device)[:, None] == tokens.sequence_T
        shares = []
        of_BT = parts_BT & tokens.valid_T
        sizes_B = self.over_microbatch(of_BT.sum(1))
        counts_BE = self.over_microbatch(torch.stack([self.counts(ids_TK, of_T) for of_T in of_BT]))
        for of_T, size, n_E in zip(of_BT, sizes_B, counts_BE, strict=True):
            shares.append(self.balance("sequence", self.fractions(n_E, size, ids_TK.shape[1]), p_TE, of_T, size))
        return torch.stack(shares).mean()

    def z(self, logits_TE: Tensor, valid_T: Tensor, tokens: Tensor) -> Tensor:
        """Return this rank's part of the mean of the squared logarithm of the sum of exponentials.

        Implements: LOSS-09.
        """
        squares_T = logits_TE.logsumexp(1).square()
        return self.coefficient("z") * (squares_T * valid_T).sum() / tokens.clamp_min(1)

    def over_microbatch(self, local: Tensor) -> Tensor:
        """Return the sum over the ranks that process a microbatch together.

        Implements: LOSS-12.
        """
        return self._summed(local, "tp", "cp")

    def over_step(self, local: Tensor) -> Tensor:
        """Return the sum over all ranks that hold tokens.

        Implements: LOSS-07.
        """
        return self._summed(local, "tp", "dp_cp")

    def _summed(self, local: Tensor, *groups: str) -> Tensor:
        total = local.detach().clone()
        for name in groups:
            if self.topology.group(name).size() > 1:
                dist.all_reduce(total, group=self.topology.group(name))
        return total
