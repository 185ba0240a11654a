"""torchtitan's MoE modules with the hook that updates their balance bias before every step of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_conformance.contract import Claims, Config, Named, Read, Routed, Topology, Unsupported


def require_balanced(config: Config, topology: Topology) -> None:
    """Refuse options that the hook does not have."""
    if not config.routing.balance_bias:
        raise Unsupported("routers without routing.balance_bias have none to update")
    if config.balance.rule != "sign":
        raise Unsupported("torchtitan moves its bias by the sign of the load alone")
    if config.balance.recompute:
        raise Unsupported("torchtitan recomputes whole blocks, not their routers")
    if topology.sizes["tp"] > 1:
        raise Unsupported(f"tp = {topology.sizes['tp']}: torchtitan places the module by sharding configs, not adapted")
    if config.balance.rate <= 0:
        raise Unsupported("torchtitan asserts that its load_balance_coeff is positive")


class _Block(nn.Module):
    """A block of a decoder, of which the hook reads two attributes."""

    moe_enabled = True

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe


class _Dimensions:
    """The part of `ParallelDims` that the hook uses: the mesh of ranks with different tokens, which is dp x cp."""

    tp = 1

    def __init__(self, topology: Topology, device: torch.device) -> None:
        group = topology.group("dp_cp")
        self.ep_enabled = topology.sizes["ep"] > 1
        alone = group.size() == 1
        self._loss = None if alone else DeviceMesh.from_group(group, device.type, mesh_dim_names=("loss",))

    def get_optional_mesh(self, name: str) -> DeviceMesh | None:
        """Return the mesh of a name."""
        return {"loss": self._loss}[name]


class BalancingRouters:
    """One MoE module for each layer, whose router is called by the module."""

    takes_mask = False

    def __init__(self, routers: Sequence[Any], modules: Sequence[nn.Module], topology: Topology, device: torch.device):
        """Take routers and their modules, and register the hook with an optimizer that changes nothing."""
        from torchtitan.components.optimizer import register_moe_load_balancing_hook

        self._routers, self._modules = routers, nn.Module()
        self._modules.layers = nn.ModuleDict({str(n): _Block(moe) for n, moe in enumerate(modules)})
        self._optimizer = torch.optim.SGD(self._modules.parameters(), lr=0.0)
        dimensions: Any = _Dimensions(topology, device)
        register_moe_load_balancing_hook(self._optimizer, [self._modules], dimensions)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The router."""
        resolved: Mapping[str, str] = self._routers[0].resolved
        return resolved

    @property
    def claims(self) -> Claims:
        """All routed tokens are counted, also those of forced routing."""
        return Claims(forced_loads="counted")

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the gate and the bias of every module."""
        for number, router in enumerate(self._routers):
            for window in router.named(read):
                yield Named(window.name, number, window.view)

    def train(self, mode: bool = True) -> None:
        """Switch the modules."""
        self._modules.train(mode)

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> tuple[Routed, ...]:
        """Route; the modules count the tokens themselves. There is no mask."""
        assert padding_mask_T is None  # takes_mask
        return tuple(router(x_SBD) for router, x_SBD in zip(self._routers, x, strict=True))

    def update(self) -> None:
        """Make a step of the optimizer, before which the hook runs."""
        self._optimizer.step()

    def loads(self) -> Sequence[Tensor]:
        """Return the counters."""
        return [router.loads_E for router in self._routers]

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of all modules."""
        state: Mapping[str, Any] = self._modules.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of all modules."""
        self._modules.load_state_dict(state)

    def parameters(self) -> Iterable[Tensor]:
        """Return the parameters of all modules."""
        return self._modules.parameters()
