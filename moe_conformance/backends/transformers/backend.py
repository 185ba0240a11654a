"""The backend's name, variants and limits, and its session on one rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch

from moe_conformance.backends.library import Library
from moe_conformance.backends.transformers.config_rules import ConfigRules
from moe_conformance.backends.transformers.exchange import SharedExchange
from moe_conformance.backends.transformers.experts import GROUPED, ShardedExperts
from moe_conformance.backends.transformers.layer import ModelLayer, block_of
from moe_conformance.backends.transformers.packing import Packing
from moe_conformance.backends.transformers.placement import Placement
from moe_conformance.backends.transformers.router import ModelRouter, model_of, require_dtype
from moe_conformance.backends.transformers.training import TrainingRouters, require_trained
from moe_conformance.contract import Config, Limit, Parametrised, Session, Topology, Trainer, Unsupported

_INSTALL = "pip install --no-deps transformers, and huggingface_hub tokenizers regex pyyaml requests tqdm"

# The library's (ep_implementation, experts_implementation). In training auto is all_to_all.
_VARIANTS = {
    "alltoall": ("all_to_all", "eager"),
    "alltoall_batched_mm": ("all_to_all", "batched_mm"),
    "auto": ("auto", "grouped_mm"),
    "allreduce": ("all_reduce", "eager"),
    "allreduce_batched_mm": ("all_reduce", "batched_mm"),
    "allreduce_grouped_mm": ("all_reduce", "grouped_mm"),
}

# Options of Config: those that every surface reads, and those of a router; none is forced.
_SHAPE = ("variant", "experts", "top_k", "hidden", "ffn", "dtype")
_OF_EXPERTS = ("activation", "expert_biases")  # the exchange asks the experts that it is given
_ROUTING = (
    "routing.score", "routing.normalise", "routing.scale", "routing.groups", "routing.group_score",
    "routing.balance_bias",
)  # fmt: skip


def _declared(folder: Path) -> str:
    """Return the version that a checkout's `src` declares."""
    text = (folder / "transformers" / "__init__.py").read_text()
    versions: list[str] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return versions[0]


class Transformers:
    """The published transformers; on CPU ranks over gloo or on GPUs."""

    name: ClassVar[str] = "transformers"
    variants: ClassVar[tuple[str, ...]] = tuple(_VARIANTS)
    preload: ClassVar[tuple[str, ...]] = (
        "torch.distributed.fsdp",
        "transformers.distributed.expert_parallel",
        "transformers.models.deepseek_v2.modeling_deepseek_v2",
        "transformers.models.deepseek_v3.modeling_deepseek_v3",
        "transformers.models.deepseek_v4.modeling_deepseek_v4",
        "transformers.models.gpt_oss.modeling_gpt_oss",
        "transformers.models.qwen2_moe.modeling_qwen2_moe",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "transformers.trainer",
    )
    library: ClassVar[Library] = Library("transformers", "transformers", ">=5.23,<6", _INSTALL, _declared)
    environment: ClassVar[Mapping[str, str]] = {"HF_HUB_OFFLINE": "1"}  # nothing is ever asked of a server

    def versions(self) -> Mapping[str, str]:
        """Versions of transformers and of torch."""
        return {"transformers": self.library.version(), "torch": version("torch")}

    def limits(self, variant: str) -> Sequence[Limit]:
        """The all-to-all has no value for an empty slot; the all-reduce masks it as another rank's expert.

        With ep = 1 a model has no implementation of an exchange: the variant alltoall is then its experts alone.
        """
        whole = Limit(
            "sharded_experts", (False,), "there is no size for splitting experts in addition to ep", proof="design"
        )
        installed = "with ep = 1 the library installs no implementation: the variant alltoall has what it runs"
        trust = "nothing is checked: what one rank raises leaves the others waiting, and other sizes abort the process"
        unchecked = Limit("wrong_use", (False,), trust, proof="undefined")
        if _implementations(variant)[0] == "all_reduce":
            return (whole, Limit("spread_experts", (True,), installed, proof="design"), unchecked)
        reason = "AllToAllEP counts the pairs of every expert by scatter_add over the ids, in which -1 is out of bounds"
        return (whole, Limit("dropped_slots", (False,), reason, proof="undefined"), unchecked)

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session on the suite's groups."""
        self.versions()
        return _Session(topology, device)


class _Session(Session):
    loss_convention = "mean_over_dp"  # FSDP2 divides by the number of distinct batches

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._topology, self._device = topology, device
        self._grouped = True

    @contextmanager
    def without_optional(self) -> Iterator[Sequence[str]]:
        """Build experts that run as with a torch that has no grouped product."""
        self._grouped = False
        try:
            yield (GROUPED,)
        finally:
            self._grouped = True

    def exchange(self, config: Config) -> SharedExchange:
        """Install the implementation on a module that calls the given experts; it takes any T, also packed."""
        config.only(*_SHAPE, *_OF_EXPERTS, "weights_applied", "token_copies", "padding.packed", "sharding")
        if config.weights_applied == "input":
            raise Unsupported("the library multiplies the expert output by the weights, not weights_applied='input'")
        implementation, _ = _implementations(config.variant)
        placement = Placement(config, self._topology, self._device)
        alone = self._topology.sizes["ep"] == 1
        if alone and implementation == "all_reduce":
            raise Unsupported("with ep = 1 the library installs no implementation; see the variant alltoall")
        return SharedExchange(placement, None if alone else implementation, gathers=not config.token_copies)

    def experts(self, config: Config) -> ShardedExperts:
        """Build the experts of a model, shard them over ep, and by FSDP2 over edp."""
        config.only(*_SHAPE, *_OF_EXPERTS, "weights_applied", "token_copies", "sharding")
        if config.sharding == "gradients":
            raise Unsupported("FSDP2 shards parameters over replicas, and never gradients alone")
        _, implementation = _implementations(config.variant)
        placement = Placement(config, self._topology, self._device)
        return ShardedExperts(config, placement, implementation, grouped=self._grouped)

    def layer(self, config: Config) -> ModelLayer:
        """Build the block of the model that has the requested layer."""
        config.only(*_SHAPE, *_ROUTING, "router_dtype", "shared.ffn", "shared.gate", "shared.bias")
        if self._topology.sizes["ep"] == 1 and _implementations(config.variant)[0] == "all_reduce":
            raise Unsupported("with ep = 1 the library installs no implementation; see the variant alltoall")
        require_dtype(config, block_of(config))
        placement = Placement(config, self._topology, self._device)
        return ModelLayer(config, placement, _implementations(config.variant))

    def router(self, config: Config) -> ModelRouter:
        """Build the router of the model that has the requested routing, under FSDP2 where ranks share no batch."""
        config.only(*_SHAPE, *_ROUTING, "gate_bias", "router_dtype")
        require_dtype(config, model_of(config))
        sizes = self._topology.sizes
        shards = math.lcm(sizes["ep"], sizes["dp"] * sizes["cp"])  # of FSDP2, along the experts: none is empty
        placed = sizes["tp"] == sizes["etp"] == 1 and not config.experts % shards
        placement = Placement(config, self._topology, self._device) if placed else None
        return ModelRouter(config, model_of(config), self._device, placement)

    def trainer(self, config: Config) -> Trainer:
        """Build a model of layers of Qwen3-MoE, and its optimizer."""
        from moe_conformance.backends.transformers import trainer

        config.only(*_SHAPE, "training")
        if self._topology.sizes["ep"] == 1 and _implementations(config.variant)[0] == "all_reduce":
            raise Unsupported("with ep = 1 the library installs no implementation; see the variant alltoall")
        placement = Placement(config, self._topology, self._device)
        trainer.require_trained(config, placement)
        return trainer.Trainer(config, placement, _implementations(config.variant))

    def training_routers(self, config: Config) -> TrainingRouters:
        """Build the routers of a model, and shard them by FSDP2."""
        config.only(*_SHAPE, *_ROUTING, "losses")
        require_trained(config, self._topology.sizes["cp"])
        return TrainingRouters(config, Placement(config, self._topology, self._device))

    def config_rules(self, config: Config) -> ConfigRules:
        """Resolve settings on every rank by itself, and change those of built layers."""
        return ConfigRules(config.only(*_SHAPE, "padding.packed"))

    def packing(self, config: Config) -> Packing:
        """Build the collator of padding-free batches."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype")
        return Packing()

    def finish_gradients(self, *built: Parametrised) -> None:
        """Nothing is left to do: FSDP2 has reduced in every backward."""
        for surface in built:
            assert isinstance(surface, ShardedExperts | ModelLayer | ModelRouter)  # there are no others with parameters
            if isinstance(surface, ModelRouter) and not surface.placed:
                raise Unsupported("a router by itself is placed where every rank has its own tokens and equal shards")


def _implementations(variant: str) -> tuple[str, str]:
    if variant not in _VARIANTS:
        raise Unsupported(f"variant {variant!r} is not one of {', '.join(_VARIANTS)}")
    return _VARIANTS[variant]
