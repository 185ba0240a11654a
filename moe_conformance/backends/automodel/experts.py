"""The library's experts for the rows of an exchange. R rows, J slots, N experts of this rank, D hidden, F inner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_conformance.backends.automodel.placement import Model, Placement, backend_config, moe_config
from moe_conformance.backends.fsdp_windows import local
from moe_conformance.contract import Config, Delivery, Named, Read, Unsupported

_PARAMETERS = ("gate_and_up_projs", "down_projs", "gate_up_proj_bias", "down_proj_bias")


def require_experts(config: Config) -> None:
    """Refuse experts that the library has not, or whose products torch does not compute."""
    if config.expert_biases == "output":
        raise Unsupported("one option gives biases to all projections of the experts, not behind down alone")
    if config.variant == "grouped" and (config.hidden % 8 or config.ffn % 8):
        raise Unsupported(f"torch's grouped matmul needs rows of 16 bytes: not {config.hidden} and {config.ffn}")


class Experts:
    """GroupedExperts without what it does between ranks, in a model whose other parameters do not train."""

    def __init__(self, config: Config, placement: Placement) -> None:
        """Build and place a module, and let its experts be called with rows."""
        from nemo_automodel.components.moe.layers import MoE

        require_experts(config)
        placement.require_experts(config)
        moe = MoE(moe_config(config), backend_config(config))
        del moe.gate
        self._placement = placement
        self._experts: Any = moe.experts
        self._experts.forward = self._on_local_parameters
        self._model = Model(placement, [moe], experts=True)

    def _on_local_parameters(self, x_RD: Tensor, ids_RJ: Tensor, weights_RJ: Tensor) -> Tensor:
        experts, mask_R = self._experts, torch.ones(len(x_RD), dtype=torch.bool, device=x_RD.device)
        held = (getattr(experts, name) for name in _PARAMETERS)
        parameters = [each.to_local() if isinstance(each, DTensor) else each for each in held]
        parameters = [each if each is None else each.to(x_RD.dtype) for each in parameters]
        if experts.use_torch_mm:
            y_RD: Tensor = experts._forward_grouped_mm(
                x_RD, mask_R, weights_RJ, ids_RJ, *parameters, self._placement.held, 0
            )
        else:
            held_N = self._placement.held
            y_RD = experts._forward_loop(x_RD, weights_RJ, ids_RJ, mask_R, *parameters, held_N, 0, held_N)
        return y_RD.to(x_RD.dtype)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class, how it multiplies, and how its parameters are placed."""
        weight = self._experts.gate_and_up_projs
        return {
            "experts": type(self._experts).__name__.removeprefix("FSDP"),
            "products": "torch._grouped_mm" if self._experts.use_torch_mm else "one expert after the other",
            "shards": str(weight.placements) if isinstance(weight, DTensor) else "none",
        }

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the weighted output.

        In the library experts receive the tokens of all ranks, which are none only where no rank has any. So that this
        is no other case here, a token of another rank follows.
        """
        assert delivery.weights_RJ is not None  # the exchange leaves them to the experts
        given = (delivery.rows_RD, 0.0), (delivery.ids_RJ, -1), (delivery.weights_RJ, 0.0)
        (out_RD,) = self._model(
            _call_experts, *((nn.functional.pad(each, (0, 0, 0, 1), value=w),) for each, w in given)
        )
        result: Tensor = out_RD[:-1]
        return result

    @property
    def module(self) -> nn.Module:
        """The model of one module, which holds the parameters."""
        return self._model

    def reshard(self) -> None:
        """Free the gathered parameters, which the library keeps by default."""
        self._model.free_gathered()

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the windows on this rank's part of the experts."""
        return expert_windows(self._experts, self._placement, read)

    def finish(self) -> None:
        """Do what the trainer does after the last backward."""
        self._model.finish()


def _call_experts(moe: Any, *given: Tensor) -> Any:
    return moe.experts(*given)


def expert_windows(experts: Any, placement: Placement, read: Read) -> Iterator[Named]:
    """Yield the windows on this rank's part: (N, D, 2 F) with gate before up, (N, F, D), and their biases."""
    first, shard = placement.part(experts.gate_and_up_projs)
    for n, gate_up_DF in enumerate(read(local(experts.gate_and_up_projs))):
        gate_DF, up_DF = gate_up_DF.chunk(2, dim=1)
        yield Named("gate", first + n, gate_DF.t(), shard)
        yield Named("up", first + n, up_DF.t(), shard)
    for n, down_FD in enumerate(read(local(experts.down_projs))):
        yield Named("down", first + n, down_FD.t(), shard)
    if not experts.expert_bias:
        return
    for n, gate_up_F in enumerate(read(local(experts.gate_up_proj_bias))):
        gate_F, up_F = gate_up_F.chunk(2)
        yield Named("bias_gate", first + n, gate_F)
        yield Named("bias_up", first + n, up_F)
    for n, bias_D in enumerate(read(local(experts.down_proj_bias))):
        yield Named("bias", first + n, bias_D)
