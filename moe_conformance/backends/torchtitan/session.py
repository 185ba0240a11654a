"""A session: builds the library's parts for one layout of ranks. The library keeps one global, its SPMD setting."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import utils

from moe_conformance.backends.torchtitan.balance import BalancingRouters, require_balanced
from moe_conformance.backends.torchtitan.config_rules import ConfigRules
from moe_conformance.backends.torchtitan.exchange import (
    INSTALL,
    Exchange,
    dispatcher,
    dispatcher_config,
    ep_mesh,
    placement,
)
from moe_conformance.backends.torchtitan.experts import Experts, require_rows
from moe_conformance.backends.torchtitan.layer import Layer, moe_config, require_placed
from moe_conformance.backends.torchtitan.meter import LoadMeter
from moe_conformance.backends.torchtitan.router import Router, require_routed
from moe_conformance.backends.torchtitan.rows import CombineAdd, Permutation, Reordering, ScatterAdd
from moe_conformance.contract import (
    Config,
    Packing,
    Parametrised,
    Session,
    TokenPadding,
    Topology,
    Trainer,
    TrainingRouters,
    Unsupported,
)


class TitanSession(Session):
    """The parts that torchtitan has."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        """Use all_to_all_single, also for pieces of other sizes, which is the library's setting partial_dtensor."""
        self._topology, self._device = topology, device
        self._setting, self._made = utils.get_spmd_backend(), list[dist.ProcessGroup]()
        utils.set_spmd_backend("partial_dtensor")

    def exchange(self, config: Config) -> Exchange:
        """Build a dispatcher and wire it to this rank's ep group; it takes any T, also packed."""
        config.only(
            "variant", "experts", "top_k", "hidden", "ffn", "dtype", "weights_applied", "padding.packed", "sharding"
        )
        if config.weights_applied == "input":
            raise Unsupported("torchtitan 0.3 applies the scores after the experts only, not weights_applied='input'")
        first, held = placement(self._topology, config)
        return Exchange(dispatcher(config, self._topology, self._device), range(first, first + held))

    def experts(self, config: Config) -> Experts:
        """Build this rank's GroupedExperts; FSDP2 shards them where they are replicated."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "weights_applied", "sharding")
        if config.sharding == "gradients":
            raise Unsupported("torchtitan shards parameters over replicas by FSDP2, and never gradients alone")
        require_rows(config)
        first, held = placement(self._topology, config)
        if len(self._topology.ranks("edp")) > 1 and config.dtype == torch.float64:
            raise Unsupported("torchtitan keeps and reduces in float32 what FSDP2 shards, not in torch.float64")
        return Experts(config, first, held, self._topology, self._device)

    def router(self, config: Config) -> Router:
        """Build an MoE layer and replace its routed experts: what they would receive is the routing."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "routing", "gate_bias", "router_dtype")
        require_routed(config)
        if config.router_dtype not in (None, torch.float32):
            raise Unsupported(f"torchtitan 0.3 computes gate and scores in float32, not in {config.router_dtype}")
        if config.router_dtype == torch.float32 != config.dtype and self._device.type == "cpu":
            raise Unsupported("torchtitan casts its gate by autocast to float32, which torch switches off on CPU")
        router = Router(config, self._device)
        router.replicate(config, self._topology, self._device)
        return router

    def training_routers(self, config: Config) -> TrainingRouters:
        """Refuse: routers have no losses."""
        del config
        raise Unsupported("torchtitan 0.3 has no loss of routers: their load is balanced by an expert bias alone")

    def balancing_routers(self, config: Config) -> BalancingRouters:
        """Build the MoE modules of a model as for their routers, and register the hook that updates their biases."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "routing", "balance")
        require_routed(config)
        require_balanced(config, self._topology)
        routers = [Router(config, self._device) for _ in range(config.balance.layers)]
        return BalancingRouters(routers, [router.layer for router in routers], self._topology, self._device)

    def config_rules(self, config: Config) -> ConfigRules:
        """Resolve settings, on every rank alike."""
        return ConfigRules(config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype"))

    def layer(self, config: Config) -> Layer:
        """Build an MoE module with a dispatcher on this rank's ep group; FSDP2 shards it where it is replicated."""
        config.only(
            "variant",
            "experts",
            "top_k",
            "hidden",
            "ffn",
            "dtype",
            "routing",
            "shared.ffn",
            "shared.gate",
            "shared.bias",
        )
        require_routed(config)
        require_rows(config)
        first, held = placement(self._topology, config)
        require_placed(config, self._topology)
        dispatcher = dispatcher_config(config, self._topology)
        layer = Layer(config, self._topology, self._device, range(first, first + held), dispatcher)
        self._made += layer.made
        return layer

    def trainer(self, config: Config) -> Trainer:
        """Build a model of dense and MoE blocks, its FSDP2, and its optimizers."""
        from moe_conformance.backends.torchtitan.trainer import Trainer, require_trained

        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "training")
        require_trained(config, self._topology)
        return Trainer(config, self._topology, self._device)

    def load_meter(self, config: Config) -> LoadMeter:
        """Build MoE modules, which count their load, with a dispatcher on this rank's ep group."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype")
        first, held = placement(self._topology, config)
        dispatcher = dispatcher_config(config, self._topology)

        def build() -> Any:
            moe: Any = moe_config(config, held, dispatcher).build().to(self._device)
            moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=ep_mesh(self._topology, self._device))
            return moe

        return LoadMeter(build, range(first, first + held))

    def permutation(self, config: Config) -> Permutation:
        """Build a dispatcher that sends nothing; torchao's pads."""
        config.only("variant", "experts", "top_k", "hidden", "dtype", "padding.row_multiple")
        if config.padding.row_multiple > 1 and find_spec("torchao") is None:
            raise Unsupported(f"rows are padded by torchao: {INSTALL}")
        return Permutation(config)

    def scatter_add(self, config: Config) -> ScatterAdd:
        """Return the operator that adds rows back."""
        config.only("variant", "hidden", "dtype")
        return ScatterAdd()

    def combine_add(self, config: Config) -> CombineAdd:
        """Return the operator that adds rows back, for the output of shared experts."""
        config.only("variant", "hidden", "dtype")
        return CombineAdd()

    def reordering(self, config: Config) -> Reordering:
        """Build the all-to-all dispatcher."""
        return Reordering(config.only("variant", "experts", "top_k", "hidden", "dtype"))

    def packing(self, config: Config) -> Packing:
        """Refuse: nothing lays sequences out."""
        del config
        raise Unsupported("torchtitan 0.3 reads documents off positions that begin anew: it lays out no lengths")

    def token_padding(self, config: Config) -> TokenPadding:
        """Refuse: T is taken as it is."""
        del config
        raise Unsupported("torchtitan 0.3 pads the rows of experts, and no rank's tokens")

    def finish_gradients(self, *built: Parametrised) -> None:
        """Reduce the experts' gradients over their replicas, as the pipeline schedules do after the last backward."""
        for surface in built:
            if isinstance(surface, Layer):  # FSDP2 has reduced in every backward
                continue
            if not isinstance(surface, Experts | Router):
                raise Unsupported(f"the reduction of {type(surface).__name__}'s gradients is not adapted")
            surface.reduce()

    def close(self) -> None:
        """Restore the library's global, and destroy groups that it does not have from the suite."""
        for group in self._made:
            dist.destroy_process_group(group)
        utils.set_spmd_backend(self._setting)
