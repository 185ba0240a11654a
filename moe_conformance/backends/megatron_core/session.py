"""One topology: the library's global parallel state, the surfaces built in it, and the end of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.megatron_core import differences, library, meter
from moe_conformance.backends.megatron_core.balancing import BalancingRouters, with_balance
from moe_conformance.backends.megatron_core.config_rules import ConfigRules
from moe_conformance.backends.megatron_core.configuration import (
    CAPACITY,
    FUNCTION,
    GATE,
    LAYER,
    OF_EXPERTS,
    ROUTER,
    SHARED,
    transformer_config,
)
from moe_conformance.backends.megatron_core.layer import Layer
from moe_conformance.backends.megatron_core.overlap import OverlappedStep, with_overlap
from moe_conformance.backends.megatron_core.packing import Packing
from moe_conformance.backends.megatron_core.permutation import Permutation, Reordering, RoutingForms
from moe_conformance.backends.megatron_core.replay import ReplayRouters, with_replay
from moe_conformance.backends.megatron_core.surfaces import Exchange, Experts, Router
from moe_conformance.backends.megatron_core.trainer import Trainer, with_training
from moe_conformance.backends.megatron_core.training import TrainingRouters, with_losses
from moe_conformance.contract import (
    Capacity,
    Config,
    Parametrised,
    ReceiveBuffer,
    Session,
    TokenPadding,
    Topology,
    Unsupported,
    refusals,
)

_SEED = 1234


class MegatronSession(Session):
    """Every surface is part of a separate MoELayer, which is built as a model builds it.

    The groups are the library's: the gather buffer of the all-gather dispatcher and the update of the balance bias
    read the global parallel state even where a collection of process groups is passed.
    """

    weights_at: Literal["input", "expert", "combine"] = "expert"
    expert_output_is_partial: bool = True
    grad_attr: str = "main_grad"
    loss_convention: Literal["sum", "mean_over_dp"] = "mean_over_dp"

    def __init__(self, topology: Topology, device: torch.device) -> None:
        """Initialise the library's parallel state; collective."""
        self._topology, self._device = topology, device
        sizes = topology.sizes
        library.parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes["tp"],
            pipeline_model_parallel_size=sizes["pp"],
            context_parallel_size=sizes["cp"],
            expert_model_parallel_size=sizes["ep"],
            expert_tensor_parallel_size=sizes["etp"],
            create_gloo_process_groups=False,
        )
        self._quiet = library.quiet()
        self._last_router: tuple[Config | None, int] = None, 0

    def exchange(self, config: Config) -> Exchange:
        """Build a layer and return its token dispatcher."""
        if config.capacity.padded and config.variant == "allgather":
            raise Unsupported("the all-gather dispatcher pads nothing: it takes a map that the router has filled up")
        config.only(*LAYER, *CAPACITY, *OF_EXPERTS, "receive_buffer", "token_copies")
        if config.token_copies:
            self._require_sequence_parallel(config)
        return Exchange(self._layer(_for_empty_slots(_with_receive_buffer(config))))

    def experts(self, config: Config) -> Experts:
        """Build a layer and return its experts, wrapped for the reduction of their gradients."""
        etp = self._topology.ranks("etp")
        layer = self._layer(config.only(*LAYER, *CAPACITY, *OF_EXPERTS))
        return Experts(layer, etp.index(self._topology.rank), len(etp))

    def router(self, config: Config) -> Router:
        """Build a layer and return its router, wrapped for the reduction of its gradients."""
        number = self._number(config) if config.routing.forced else 1
        layer = self._layer(config.only(*LAYER, *ROUTER, *CAPACITY, *GATE), number)
        layer.set_layer_number(number)  # as a transformer layer does
        return Router(layer)

    def layer(self, config: Config) -> Layer:
        """Build a whole layer, wrapped for the reduction of its gradients."""
        return Layer(self._layer(config.only(*LAYER, *ROUTER, *SHARED, *CAPACITY)), config, self._topology)

    def load_meter(self, config: Config) -> meter.LoadMeter:
        """Build layers that count and record, and where there is a tracker of overload factors record in it."""
        if config.variant == "allgather":
            raise Unsupported(
                "all ranks of the all-gather dispatcher have equally many tokens, those of steps have not"
            )
        metered = _for_empty_slots(config.only(*LAYER, *CAPACITY))
        factors = (("log_moe_overload_factor", True),) if meter.has_factors() else ()
        metered = replace(metered, extra=(*metered.extra, *meter.OPTIONS, *factors))
        library.RouterReplay.clear_global_router_replay_instances()  # of the model that was built before
        return meter.LoadMeter(lambda number: self._layer(metered, number))

    def masked_router(self, config: Config) -> Router:
        """Build a layer and return its router, which takes a padding mask."""
        return Router(self._layer(config.only(*LAYER, *ROUTER)))

    def packing(self, config: Config) -> Packing:
        """Return the library's functions."""
        config.only(*FUNCTION)
        return Packing()

    def token_padding(self, config: Config) -> TokenPadding:
        """Refuse: token counts are not padded to one."""
        del config
        raise Unsupported("Megatron-Core 0.16 pads no token counts: all its dispatchers, flex too, take T as it is")

    def permutation(self, config: Config) -> Permutation:
        """Return the library's functions."""
        config.only(*FUNCTION)
        return Permutation()

    def reordering(self, config: Config) -> Reordering:
        """Return the library's function."""
        config.only(*FUNCTION)
        return Reordering()

    def routing_forms(self, config: Config) -> RoutingForms:
        """Return the conversions of the flex dispatcher's manager."""
        return RoutingForms(config.only(*FUNCTION))

    def initial_router(self, config: Config) -> Router:
        """Build a layer with the parameters of a new model, generators seeded as a trainer does."""
        config.only(*LAYER, *ROUTER)
        self._seed()
        return Router(self._layer(replace(config, extra=(*config.extra, ("perform_initialization", True)))))

    def initial_experts(self, config: Config) -> Experts:
        """Build a layer with the parameters of a new model, generators seeded as a trainer does."""
        self._seed()
        return self.experts(replace(config, extra=(*config.extra, ("perform_initialization", True))))

    def config_rules(self, config: Config) -> ConfigRules:
        """Resolve settings on one rank, on which a layer of any sizes can be built, or on ranks of ep alone."""
        if self._topology.sizes["world"] > self._topology.sizes["ep"]:
            raise Unsupported("the adapter resolves settings on one rank, and on ranks of ep alone")
        return ConfigRules(config.only(*FUNCTION), self._topology, self._device)

    def training_routers(self, config: Config) -> TrainingRouters:
        """Build the layers of a model and return their routers."""
        layer_config, losses = with_losses(config.only(*LAYER, *ROUTER, *CAPACITY, "losses")), config.losses
        differences.forget_reports()
        numbers = range(losses.dense_layers + 1, losses.dense_layers + losses.layers + 1)
        layers = [self._layer(layer_config, number) for number in numbers]
        for number, layer in zip(numbers, layers, strict=True):
            layer.set_layer_number(number)  # as a transformer layer does
        return TrainingRouters(layers, losses, self._topology.sizes["cp"])

    def balancing_routers(self, config: Config) -> BalancingRouters:
        """Build the layers of a model and return their routers."""
        requested, balance = config.only(*LAYER, *ROUTER, *CAPACITY, "balance"), config.balance
        layer_config = with_balance(requested, self._topology.sizes["pp"])
        numbers = range(balance.dense_layers + 1, balance.dense_layers + balance.layers + 1)
        layers = [self._layer(layer_config, number) for number in numbers]
        return BalancingRouters(layers, recomputed=balance.recompute)

    def replay_routers(self, config: Config) -> ReplayRouters:
        """Build the layers of a model and return their routers."""
        layer_config, numbers = with_replay(config.only(*LAYER, *ROUTER, "replay")), config.replay.layers
        library.RouterReplay.clear_global_router_replay_instances()  # of the model that was built before
        return ReplayRouters([self._layer(layer_config, number + 1) for number in numbers], numbers)

    def overlapped_step(self, config: Config) -> OverlappedStep:
        """Build a model of MoE layers, to be run by the combined 1F1B schedule."""
        sizes = self._topology.sizes
        asked = with_overlap(config.only(*LAYER, *ROUTER, *SHARED, *CAPACITY, "overlap"))
        built = transformer_config(asked, sizes)
        if sizes["pp"] > 1 or (sizes["tp"] > 1 and config.overlap.deferred_weights):
            raise Unsupported("the adapter's step has one stage, and its delayed linear layers are of one rank of tp")
        if "moe" in (built.recompute_modules or ()):
            raise Unsupported("0.16 takes recomputation of the MoE layer under overlap, and computes nothing again")
        return OverlappedStep(built, config, self._topology, self._device)

    def trainer(self, config: Config) -> Trainer:
        """Build a model of one stage and its optimiser."""
        sizes = self._topology.sizes
        if sizes["pp"] > 1 or config.dtype != torch.float32:
            raise Unsupported("the adapter trains float32 models of one stage")
        if config.variant != "alltoall":
            raise Unsupported("data parallel ranks have differently many tokens, which the all-gather does not take")
        built = transformer_config(with_training(config.only(*LAYER, "training")), sizes)
        self._seed()  # the block of layers forks the tracker's generator, whether anything is drawn or not
        return Trainer(built, config, self._topology, self._device)

    def _require_sequence_parallel(self, config: Config) -> None:
        """Call a layer whose ranks of tp hold the same tokens: it refuses that in training, before any collective."""
        if self._topology.sizes["tp"] == 1:
            return
        layer = self._layer(config)
        with refusals(ValueError, match="without also enabling sequence parallelism"):
            layer(torch.zeros(1, 1, config.hidden, dtype=config.dtype, device=self._device))
        raise Unsupported("this version takes the same tokens on all ranks of tp in training, not adapted")

    def _layer(self, config: Config, number: int = 1) -> Any:
        built = transformer_config(config, self._topology.sizes)
        if config.routing.forced:
            self._seed()
        # Its assertion that ep divides the experts has no words.
        uneven = config.experts % self._topology.sizes["ep"]
        words = "is not divisible by|bias is not supported in the shared experts"
        with refusals(AssertionError, match=f"^$|{words}" if uneven else words):
            return differences.moe_layer(built, number).to(self._device)

    def _number(self, config: Config) -> int:
        """Return the number of the layer of a forced router: routers of one config in a row are those of a model.

        A model is built in a process that has none; what an earlier one has left behind is not this one's.
        """
        last, number = self._last_router
        self._last_router = config, number + 1 if config == last else 1
        differences.forget_kept_biases()
        return self._last_router[1]

    def _seed(self) -> None:
        """Seed only the generators of forced logits, as a trainer does."""
        with torch.random.fork_rng():
            library.random.model_parallel_cuda_manual_seed(_SEED)

    def recompute(self, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `call(*inputs)` under the library's checkpoint, which puts back the states of its tracker too."""
        result: Tensor = library.random.checkpoint(call, False, *inputs)
        return result

    def finish_gradients(self, *built: Parametrised) -> None:
        """Reduce over replicas, sum what sequence parallelism left in parts, and update the balance bias."""
        if self._topology.sizes["pp"] > 1:
            raise Unsupported("with pp > 1 finalize_model_grads needs the embeddings of a whole model")
        library.finalize_model_grads(list(dict.fromkeys(surface.chunk for surface in built)))  # type: ignore[attr-defined]

    def close(self) -> None:
        """Destroy the parallel state with its process groups, which the library does not destroy."""
        state = library.parallel_state
        for group in state._global_process_group_list[1:]:  # the first stands for the default group
            dist.destroy_process_group(group)
        state._global_process_group_list = None
        state.destroy_model_parallel()
        library.random.get_cuda_rng_tracker().reset()
        differences.forget_reports()
        library.moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
        self._quiet.__exit__(None, None, None)
        gc.collect()  # layers refer to their groups in cycles, and a group has threads and sockets until it is freed


def _with_receive_buffer(config: Config) -> Config:
    """Return the config with the capacity of a rank, which the library has as a factor, and only for other dispatchers.

    Raises:
        Unsupported: the size is in rows, or this version has no such field.
    """
    buffer = config.receive_buffer
    if buffer == ReceiveBuffer():
        return config
    field = "moe_expert_rank_capacity_factor"
    if buffer.factor is None or buffer.rows is not None or not differences.has_field(field):
        raise Unsupported(f"Megatron-Core has a receive buffer as {field} alone, since 0.19, not {buffer}")
    return replace(config, receive_buffer=ReceiveBuffer(), extra=(*config.extra, (field, buffer.factor)))


def _for_empty_slots(config: Config) -> Config:
    """Return the config with a capacity factor that drops nothing, where only layers with one may leave slots empty."""
    if config.variant != "alltoall" or config.capacity != Capacity() or not differences.permutes_to_fixed_rows():
        return config
    return replace(config, extra=(("moe_expert_capacity_factor", float(config.experts)), *config.extra))
