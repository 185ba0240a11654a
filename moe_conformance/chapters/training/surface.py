"""A whole training step: `Config.training`, a surface, claims. Import them from `contract`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Parametrised, Resolved
from moe_conformance.contract.values import check

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class Training:
    """`Config.training`: the model that is trained, and its optimiser. Read by trainers."""

    dense_layers: int = 1  # layers of one SwiGLU of width `Config.ffn` for all tokens, before the MoE layers
    layers: int = 2  # MoE layers
    optimiser: Literal["adamw", "sgd"] = "adamw"  # as torch.optim.AdamW and SGD: the decay of SGD is in its momentum
    rate: float = 0.01  # learning rate, of every parameter alike
    betas: tuple[float, float] = (0.9, 0.95)  # of adamw
    epsilon: float = 1e-8  # of adamw
    momentum: float = 0.9  # of sgd
    decay: float = 0.0  # weight decay, of every parameter alike
    largest_norm: float | None = None  # gradients are clipped by their norm to this one; None: they are not
    sharded_state: bool = False  # of what the optimiser keeps, each data parallel rank has a part, and updates that

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        check(self, "training.", dense_layers=0, layers=1)


@dataclass(frozen=True)
class TrainingBatch:
    """One microbatch of this rank: its tokens, what their outputs should be, and which of them count in the loss."""

    x_TD: Tensor
    target_TD: Tensor
    counted_T: Tensor  # bool


@dataclass(frozen=True)
class TrainingReport:
    """What a trainer reports of a step, on every rank."""

    loss: Tensor  # (), the mean over the counted tokens of all ranks and microbatches
    norm: Tensor | None  # (), of the gradient before it was clipped; None where this trainer computes none
    updated: bool = True  # False: the step was skipped


class Trainer(Parametrised, Resolved, Protocol):
    """A model with its loss, its optimiser and the loop around them: the library's own, of which ours is the input.

    The model: h <- h + f_l(h) for every layer in turn, where f is a SwiGLU in the dense layers, and in MoE layers the
    sum of the K experts that the softmax of the router selects, each times its softmax score over all experts. The
    loss of a token is |y_t - target_t|^2 / 2; that of a step is its mean over the counted tokens of all data parallel
    ranks and microbatches. All ranks of tp have different tokens, equally many of them.

    `named` yields "layer{l}/gate", "layer{l}/up" and "layer{l}/down" of every layer, of no expert where it is dense,
    and "layer{l}/router", for the number l of the layer in the model. A window of a dense layer may be the shard of a
    tp rank. It claims `steps_not_finite`.
    """

    def begin(self) -> None:
        """Called once, after the parameters were written and before the first step: copies of them follow."""

    def step(self, batches: Sequence[TrainingBatch]) -> TrainingReport:
        """Train one step on the microbatches of this rank: forwards, backwards, clipping and update; collective."""

    def kept(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Return what the optimiser keeps of a parameter, in its shape: "first" and "second" moment, or "momentum".

        A "master" copy in a wider dtype as well, if there is one. `parameter` is one that `named` reads; nothing is
        returned of what is not there before the first step. What is sharded is gathered: all ranks call this for the
        same parameters in the same order.
        """


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def trainer(self, config: Config) -> Trainer:
        """Build a model and its optimiser; collective. It reads training and top_k, and no section beside."""
        raise Unsupported("this backend offers no trainer")


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # A step whose gradient is not finite (TRAIN-05). skipped: nothing changes; taken: parameters are not finite after.
    steps_not_finite: Literal["skipped", "taken"] = "skipped"


SECTIONS = {"training": Training}
