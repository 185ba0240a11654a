"""The backend's name, variants and limits, and its session on one rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch

from moe_conformance.backends.automodel.exchange import Exchange
from moe_conformance.backends.automodel.experts import Experts
from moe_conformance.backends.automodel.layer import Layer
from moe_conformance.backends.automodel.placement import VARIANTS, Placement
from moe_conformance.backends.automodel.router import BalancingRouters, Router, TrainingRouters
from moe_conformance.backends.library import Library
from moe_conformance.contract import Config, Limit, Parametrised, Session, Topology, Unsupported

_INSTALL = "pip install --no-deps nemo-automodel transformers, and what transformers needs"

_SHAPE = ("variant", "experts", "top_k", "hidden", "ffn", "dtype")
_OF_EXPERTS = ("activation.limit", "expert_biases")  # the exchange asks the experts that it is given
_ROUTING = (
    "routing.score", "routing.normalise", "routing.scale", "routing.groups", "routing.group_score",
    "routing.balance_bias", "router_dtype", "gate_bias",
)  # fmt: skip


def _declared(folder: Path) -> str:
    """Return the version that a checkout declares, in four constants."""
    text = (folder / "nemo_automodel" / "package_info.py").read_text()
    parts = dict(re.findall(r'^(MAJOR|MINOR|PATCH|PRE_RELEASE) = "?(\w*)"?$', text, re.MULTILINE))
    return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{parts['PRE_RELEASE']}"


class Automodel:
    """The published nemo-automodel; on CPU ranks over gloo or on GPUs."""

    name: ClassVar[str] = "automodel"
    variants: ClassVar[tuple[str, ...]] = tuple(VARIANTS)
    sampled: ClassVar[tuple[str, ...]] = ("grouped",)  # it shares all but the products of experts with the other
    preload: ClassVar[tuple[str, ...]] = (
        "torch.distributed.fsdp",
        "nemo_automodel.components.moe.parallelizer",
        "nemo_automodel.components.training.utils",
    )
    library: ClassVar[Library] = Library("nemo-automodel", "nemo_automodel", ">=0.7,<0.8", _INSTALL, _declared)
    environment: ClassVar[Mapping[str, str]] = {"HF_HUB_OFFLINE": "1"}  # nothing is ever asked of a server

    def versions(self) -> Mapping[str, str]:
        """Versions of nemo-automodel and of torch."""
        return {"nemo-automodel": self.library.version(), "torch": version("torch")}

    def limits(self, variant: str) -> Sequence[Limit]:
        """Nothing checks input, and experts are whole."""
        del variant
        trust = "nothing is checked: what one rank raises leaves the others waiting, and an unknown id adds nothing"
        return (
            Limit("sharded_experts", (False,), "experts are never split by columns", proof="design"),
            Limit("wrong_use", (False,), trust, proof="undefined"),
        )

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session on the suite's groups."""
        self.versions()
        return _Session(topology, device)


class _Session(Session):
    loss_convention = "mean_over_dp"  # FSDP2 divides by the number of distinct batches, and the trainer experts

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._topology, self._device = topology, device
        torch.compiler.set_stance("force_eager")  # else the library's activations are compiled once per shape

    def exchange(self, config: Config) -> Exchange:
        """Build experts whose products are replaced by the given ones; they take any T, also packed."""
        config.only(*_SHAPE, *_OF_EXPERTS, "weights_applied", "padding.packed", "sharding")
        if config.weights_applied != "native":
            raise Unsupported(f"routing weights are applied between the projections: not {config.weights_applied}")
        return Exchange(config, self._placement(config))

    def experts(self, config: Config) -> Experts:
        """Build experts, over ep as DTensors, their replicas sharded by FSDP2."""
        config.only(*_SHAPE, *_OF_EXPERTS, "weights_applied", "sharding")
        if config.weights_applied != "native":
            raise Unsupported(f"routing weights are applied between the projections: not {config.weights_applied}")
        if config.sharding == "gradients":
            raise Unsupported("FSDP2 shards parameters over replicas, and never gradients alone")
        return Experts(config, self._placement(config))

    def layer(self, config: Config) -> Layer:
        """Build the whole module."""
        config.only(*_SHAPE, *_ROUTING, "shared.ffn", "shared.gate")
        return Layer(config, self._placement(config))

    def router(self, config: Config) -> Router:
        """Build a gate; a session of several batches shards it."""
        config.only(*_SHAPE, *_ROUTING)
        return Router(config, self._placement(config))

    def initial_router(self, config: Config) -> Router:
        """Build a gate, whose weight a model initialises."""
        return self.router(config)

    def initial_experts(self, config: Config) -> Experts:
        """Build experts, whose weights a model initialises."""
        return self.experts(config)

    def masked_router(self, config: Config) -> Router:
        """Build a gate, which takes a mask of tokens that are counted."""
        return self.router(config)

    def training_routers(self, config: Config) -> TrainingRouters:
        """Build the gates of a model with their auxiliary loss."""
        config.only(*_SHAPE, *_ROUTING, "losses")
        return TrainingRouters(config, self._placement(config))

    def balancing_routers(self, config: Config) -> BalancingRouters:
        """Build the gates of a model whose score correction is updated by the load."""
        config.only(*_SHAPE, *_ROUTING, "balance")
        return BalancingRouters(config, self._placement(config))

    def _placement(self, config: Config) -> Placement:
        if config.variant not in VARIANTS:
            raise Unsupported(f"variant {config.variant!r} is not one of {', '.join(VARIANTS)}")
        return Placement(config, self._topology, self._device)

    def finish_gradients(self, *built: Parametrised) -> None:
        """Scale the gradients of experts, as the trainer does; FSDP2 has reduced in every backward."""
        for surface in built:
            assert isinstance(surface, Experts | Layer | Router)  # there are no others with parameters
            surface.finish()

    def close(self) -> None:
        """Let torch compile again."""
        torch.compiler.set_stance("default")
