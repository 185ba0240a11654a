"""The losses of routers: `Config.losses`, a surface, claims. Import them from `contract`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Parametrised, Resolved, Routed
from moe_conformance.contract.values import check

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class Losses:
    """`Config.losses`: coefficients of the losses of a router besides the main loss; 0: none. Read by routers."""

    auxiliary: float = 0.0  # E sum_e f_e P_e of a microbatch, f of its K choices per token, P of its scores
    sequence: float = 0.0  # the same of each sequence of a microbatch, averaged
    global_batch: float = 0.0  # f over all data parallel ranks and the microbatches of the step so far
    first_choice: float = 0.0  # as auxiliary, f of the first choice of each token (GShard)
    z: float = 0.0  # mean over tokens of the squared logarithm of the sum of exponentials of the logits
    per_token: bool = False  # finished gradients are divided by the number of valid tokens of the step
    recompute: bool = False  # activation recomputation of the router
    layers: int = 1  # routers of the model, one per MoE layer
    dense_layers: int = 0  # layers of the model without a router, before those with one

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        coefficients = ("auxiliary", "sequence", "global_batch", "first_choice", "z")
        check(self, "losses.", **dict.fromkeys(coefficients, 0), layers=1, dense_layers=0)


@dataclass(frozen=True)
class Trained:
    """The results of all routers of a model for one microbatch, in the order of layers."""

    routed: tuple[Routed, ...]
    loss: Tensor | None = None  # (): the losses that are returned, for the caller to add; None: they are attached


class TrainingRouters(Parametrised, Resolved, Protocol):
    """The routers of a model with the losses that train them (`Config.losses`), one per MoE layer.

    A microbatch is what the tp x cp ranks process together: every rank has its own part of S positions of B sequences,
    S the same on all of these ranks. `named` yields "router" with the number of the layer, from 0, in place of an
    expert id, and "balance_bias" likewise. It claims `loss_gradients`, `loss_fractions`, `reported_losses`,
    `reported_z` and `global_counts`.

    A loss is attached (the backward through the routing weights adds its gradient, whatever gradient they have) or
    returned. Both in training only, and only where gradients are recorded.

    Optional: `takes_mask = False`, where the library has no padding mask; then no token is padding.
    """

    def train(self, mode: bool = True) -> object:
        """Switch between training and evaluation, as `nn.Module` does; what is built is in training."""

    def begin_step(self, microbatches: int, scale: float) -> None:
        """Begin a step of that many microbatches, whose main loss is multiplied by `scale`: attached losses are too."""

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        """Return the routing of x (S, B, D) of every layer; the mask, bool (S * B,), is True at padding."""

    def finish(self, tokens: int) -> None:
        """Do what the trainer does between the last backward and the optimizer step; collective.

        `tokens` is the number of valid tokens of this rank's tp group in all microbatches of the step, by which
        gradients are divided, summed over dp and cp, if `Config.losses.per_token`.
        """

    def report(self) -> Mapping[str, Tensor] | None:
        """Return the loss, (), of the microbatches since the last report, by option of `Config.losses`; collective.

        The mean over microbatches, data parallel groups and layers with a router, the same on all ranks. None where the
        backend returns its losses and reports none: then the returned ones are judged alone.
        """


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def training_routers(self, config: Config) -> TrainingRouters:
        """Build the routers of a model with their losses; collective. It reads routing, capacity and losses."""
        raise Unsupported("this backend offers no router with losses")


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # Whether finished gradients are those of the mean, or of the sum, of the losses of M microbatches and dp groups
    # (LOSS-06, LOSS-08, LOSS-11); the main loss of this backend is taken alike.
    loss_gradients: Literal["mean", "sum"] = "mean"
    # f_e of an auxiliary loss (LOSS-01). slots: the share of the routed slots, all f_e add up to 1; tokens: slots per
    # token, all f_e add up to K, and the loss is K times as large.
    loss_fractions: Literal["slots", "tokens"] = "slots"
    # Whether a reported loss is divided by its coefficient (LOSS-19).
    reported_losses: Literal["divided", "with_coefficient"] = "divided"
    # A reported z-loss (LOSS-19). same: it is the same on all ranks; own: it is that of the tokens of the rank, and the
    # z-loss is its mean over ranks.
    reported_z: Literal["same", "own"] = "same"
    # A global loss counts slots of the microbatches of the step so far, or of the present one alone (LOSS-07).
    global_counts: Literal["step", "microbatch"] = "step"


SECTIONS = {"losses": Losses}
