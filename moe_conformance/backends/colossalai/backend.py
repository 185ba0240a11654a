"""The backend's name, variants and limits, and its session on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import ClassVar, Literal

import torch

from moe_conformance.backends.colossalai.blocks import Exchange, Layer
from moe_conformance.backends.colossalai.gates import Router, TrainingRouters
from moe_conformance.backends.colossalai.placement import Placement
from moe_conformance.backends.library import Library
from moe_conformance.contract import Config, Limit, Parametrised, Session, Topology, Unsupported

_SHAPE = ("variant", "experts", "top_k", "hidden", "ffn", "dtype")


class ColossalAI:
    """The published colossalai; on CPU ranks over gloo."""

    name: ClassVar[str] = "colossalai"
    variants: ClassVar[tuple[str, ...]] = ("deepseek", "deepseek-v3", "mixtral")
    sampled: ClassVar[tuple[str, ...]] = ("mixtral",)  # whole layers alone, of the functions that DeepSeek's block has
    library: ClassVar[Library] = Library(
        "colossalai",
        "colossalai",
        ">=0.5,<0.6",
        "pip install --no-deps colossalai, and what it imports",
        lambda folder: (folder / "version.txt").read_text().strip(),
    )
    preload: ClassVar[tuple[str, ...]] = ("moe_conformance.backends.colossalai.library",)

    def versions(self) -> Mapping[str, str]:
        """Versions of colossalai and of torch."""
        return {"colossalai": self.library.version(), "torch": version("torch")}

    def limits(self, variant: str) -> Sequence[Limit]:
        """Every slot is sent; nothing is checked."""
        sent = "every slot is sent: bincount and scatter take no id of -1"
        trust = "nothing is checked: what one rank raises leaves the others waiting, and other sizes abort the process"
        limits = [
            Limit("sharded_experts", (False,), "experts are sharded over the tensor ranks of all else", proof="design"),
            Limit("dropped_slots", (False,), sent, proof="undefined"),
            Limit("wrong_use", (False,), trust, proof="undefined"),
        ]
        if variant == "deepseek-v3":
            counted = "pairs are counted in a map of tokens and experts, in which a token has an expert once"
            limits.append(Limit("duplicate_experts", (False,), counted, proof="undefined"))
        return tuple(limits)

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Import the library if the ranks did not preload it, and open a session."""
        self.versions()
        return _Session(topology, device)


class _Session(Session):
    """Blocks; gradients are reduced by the library's ZeRO optimizer, of stage 1."""

    loss_convention: Literal["sum", "mean_over_dp"] = "mean_over_dp"

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._topology, self._placement = topology, Placement(topology, device)

    def exchange(self, config: Config) -> Exchange:
        """Build a block of DeepSeek around a given routing and given experts; it takes any T, also packed."""
        config.only(*_SHAPE, "padding.packed")
        if config.variant == "mixtral":
            raise Unsupported("Mixtral's block computes its routing itself, in the function that sends rows")
        if config.variant == "deepseek" and config.dtype.itemsize < 4:
            raise Unsupported("where weights are float32, so is the output: DeepSeek's gate has the dtype of tokens")
        return Exchange(config, self._placement)

    def router(self, config: Config) -> Router:
        """Build the gate of DeepSeek."""
        config.only(*_SHAPE, "routing.score", "routing.normalise")
        self._require_one_tensor_rank()
        if config.variant != "deepseek":
            raise Unsupported(f"the gate of {config.variant} is part of its block, or a model's")
        return Router(config, self._placement)

    def layer(self, config: Config) -> Layer:
        """Build a whole block."""
        config.only(*_SHAPE, "routing.score", "routing.normalise", "shared.ffn")
        self._require_one_tensor_rank()
        if config.variant == "deepseek-v3":
            raise Unsupported("the gate of DeepSeek-V3 is a model's")
        if config.variant == "mixtral" and (config.shared.ffn or not config.routing.normalise):
            raise Unsupported("Mixtral's block has no shared experts, and always normalises")
        if config.variant == "mixtral" and config.routing.score != "softmax":
            raise Unsupported(f"Mixtral's block takes the softmax of all logits, not {config.routing.score}")
        return Layer(config, self._placement)

    def training_routers(self, config: Config) -> TrainingRouters:
        """Build the gates of DeepSeek of a model."""
        config.only(
            *_SHAPE, "routing.score", "routing.normalise", "losses.auxiliary", "losses.sequence", "losses.layers"
        )
        self._require_one_tensor_rank()
        if config.variant != "deepseek" or self._topology.sizes["cp"] > 1:
            raise Unsupported("a loss is that of DeepSeek's gate, for whole sequences")
        return TrainingRouters(config, self._placement)

    def _require_one_tensor_rank(self) -> None:
        if self._topology.sizes["tp"] > 1:
            raise Unsupported("tp > 1 shards the parts of a block, for tensor ranks with the same tokens")

    def finish_gradients(self, *built: Parametrised) -> None:
        """Let the ZeRO optimizer of every surface average gradients."""
        for surface in built:
            assert isinstance(surface, Layer | Router)  # there are no others with parameters
            surface.finish()
