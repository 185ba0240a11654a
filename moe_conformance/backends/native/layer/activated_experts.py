"""Experts with any activation and with biases: f(x) = down act(gate x + b_gate, up x + b_up) + b.

N experts held, D hidden, F expert hidden, P rows that experts answer. With etp > 1 a rank holds F / etp of the hidden
units of each of its experts, with their biases, and a copy of the output biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance.backends.native.groups import CannotBuild, Placement
from moe_conformance.backends.native.layer.gradients import Replicated
from moe_conformance.backends.native.row_ops.permutation import permute, sort_pairs, unpermute, weigh
from moe_conformance.contract import Activation, Config, Delivery, Named, Read, Topology

_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda z: F.relu(z).square(),
}


class HiddenUnits(Replicated):
    """What the experts of one rank have of each hidden unit: rows of gate and up, their biases, columns of down."""

    replicas = ("edp",)

    def __init__(self, config: Config, placement: Placement, device: torch.device) -> None:
        """Make the parameters; they are NaN until someone writes them."""
        super().__init__()
        self.placement = placement
        N, units, D = placement.held, config.ffn // placement.shards, config.hidden

        def made(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.full(size, torch.nan, dtype=config.dtype, device=device))

        gated, biased = config.activation.gated, config.expert_biases == "all"
        self.gate_NFD = made(N, units, D) if gated else None
        self.up_NFD = made(N, units, D)
        self.down_NDF = made(N, D, units)
        self.bias_gate_NF = made(N, units) if gated and biased else None
        self.bias_up_NF = made(N, units) if biased else None

    def named(self, read: Read) -> Iterator[Named]:
        """Yield what there is, of every expert by global id."""
        part = (self.placement.shard, self.placement.shards)
        stacked = {
            "gate": (0, self.gate_NFD),
            "up": (0, self.up_NFD),
            "down": (1, self.down_NDF),
            "bias_gate": (0, self.bias_gate_NF),
            "bias_up": (0, self.bias_up_NF),
        }
        for name, (dim, parameter) in stacked.items():
            if parameter is not None:
                for expert, view in zip(self.placement.ids, read(parameter), strict=True):
                    yield Named(name, expert, view, (dim, *part))


class ExpertBiases(Replicated):
    """The output biases of the experts of one rank, (N, D); every rank of etp has all of them.

    The first rank of etp adds them to its part of the sum, the others add nothing and have no gradient; what training
    takes for the gradient is the sum over both groups, so that copies stay equal.
    """

    replicas = ("etp", "edp")

    def __init__(self, config: Config, placement: Placement, device: torch.device) -> None:
        """Make the parameter, NaN until someone writes it."""
        super().__init__()
        self.placement = placement
        size = placement.held, config.hidden
        self.bias_ND = nn.Parameter(torch.full(size, torch.nan, dtype=config.dtype, device=device))

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the bias of every expert by global id."""
        for expert, bias_D in zip(self.placement.ids, read(self.bias_ND), strict=True):
            yield Named("bias", expert, bias_D)

    def added(self, n: int) -> Tensor | None:
        """Return what this rank adds to the answers of its expert n.

        Implements: EXPT-06.
        """
        return self.bias_ND[n] if self.placement.shard == 0 else None


class ActivatedExperts(nn.Module):
    """The experts of one rank, in a loop over them."""

    def __init__(
        self, config: Config, topology: Topology, device: torch.device, of_output: type[ExpertBiases] = ExpertBiases
    ) -> None:
        """Make the parameters, the output biases with the class that is given.

        Raises:
            CannotBuild: the experts do not divide over ep, or F does not divide over etp.
        """
        super().__init__()
        self.config, self.placement = config, Placement.of(config.experts, topology)
        if config.ffn % self.placement.shards:
            raise CannotBuild(f"ffn = {config.ffn} does not divide over etp = {self.placement.shards} ranks")
        self.units = HiddenUnits(config, self.placement, device)
        biased = config.expert_biases != "none"
        self.biases = of_output(config, self.placement, device) if biased else None

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built, and its function."""
        return {"experts": type(self).__name__, "activation": self.config.activation.function}

    @property
    def parts(self) -> tuple[Replicated, ...]:
        """What has parameters, each with its own replicas."""
        return (self.units,) if self.biases is None else (self.units, self.biases)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield every parameter of every expert by global id."""
        for part in self.parts:
            yield from part.named(read)  # type: ignore[operator]

    def forward(self, delivery: Delivery) -> Tensor:
        """Return out_r = sum_j w_rj f(row_r), zero for a row without ids, in `delivery.shape`.

        Rows are those of tokens only, and weights multiply the answer with its bias.
        """
        pairs = sort_pairs(delivery.ids_RJ, self.placement.held)
        rows = permute(delivery.rows_RD, pairs).split(pairs.counts_E.tolist())
        out_PD = torch.cat([self.answer(of_expert, n) for n, of_expert in enumerate(rows)])
        if delivery.weights_RJ is not None:
            out_PD = weigh(out_PD, delivery.weights_RJ[pairs.token_P, pairs.slot_P])
        return unpermute(out_PD, pairs).reshape(delivery.shape)

    def answer(self, rows_RD: Tensor, n: int) -> Tensor:
        """Return f(x) of every row x under expert n, on none too: an idle expert gets zero gradients."""
        of = self.units
        up_RF = F.linear(rows_RD, of.up_NFD[n], None if of.bias_up_NF is None else of.bias_up_NF[n])
        gate_RF = None
        if of.gate_NFD is not None:
            gate_RF = F.linear(rows_RD, of.gate_NFD[n], None if of.bias_gate_NF is None else of.bias_gate_NF[n])
        hidden_RF = self.hidden(gate_RF, up_RF)
        return F.linear(hidden_RF, of.down_NDF[n], None if self.biases is None else self.biases.added(n))

    def hidden(self, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        """Return what the down projection gets."""
        return activate(self.config.activation, gate_RF, up_RF)


def activate(how: Activation, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
    """Return act(gate) * (up + offset), gate and up cut to the limit; without a gate act(up).

    Implements: EXPT-07.
    """
    function = _FUNCTIONS[how.function]
    if gate_RF is None:
        return function(up_RF)
    if how.limit is not None:
        gate_RF, up_RF = gate_RF.clamp(max=how.limit), up_RF.clamp(-how.limit, how.limit)
    activated_RF = function(gate_RF) if how.slope == 1.0 else gate_RF * (how.slope * gate_RF).sigmoid()
    return activated_RF * (up_RF + how.offset)
