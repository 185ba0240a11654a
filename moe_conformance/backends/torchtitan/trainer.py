"""A training step of torchtitan: its MoE modules under its FSDP2, loss normalisation, clipping and optimizers.

The loop is that of the library's `Trainer.train_step`, which needs its data loaders and writers of metrics; all parts
that compute are the library's: the number of valid tokens of all ranks, `BaseLoss`, `clip_grad_norm_`,
`OptimizersContainer`, `LRSchedulersContainer`. As in the library FSDP2 is there on one rank too, and keeps parameters
in float32. T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import MSELoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from moe_conformance.backends.fsdp_windows import local, require_parts, whole_window
from moe_conformance.backends.torchtitan.exchange import dispatcher_config, placement
from moe_conformance.backends.torchtitan.experts import require_rows
from moe_conformance.backends.torchtitan.layer import expert_windows, moe_config, shared_config, sum_by_gloo
from moe_conformance.backends.torchtitan.library import given
from moe_conformance.backends.torchtitan.tensor_parallel import set_sharding
from moe_conformance.contract import (
    Claims,
    Config,
    Named,
    Read,
    Topology,
    Training,
    TrainingBatch,
    TrainingReport,
    Unsupported,
    refusals,
)

_NAMES = {"exp_avg": "first", "exp_avg_sq": "second"}  # in torch's AdamW
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}


def require_trained(config: Config, topology: Topology) -> None:
    """Refuse layouts and sizes that are not adapted."""
    for axis in ("tp", "cp", "pp"):
        if topology.sizes[axis] > 1:
            raise Unsupported(f"{axis} = {topology.sizes[axis]}: its training steps are adapted for dp and ep alone")
    if config.dtype == torch.float64:
        raise Unsupported("torchtitan keeps parameters in float32, not in torch.float64")
    require_rows(config)
    for rows in (config.hidden, config.ffn, config.experts):
        require_parts((rows,), topology.sizes["dp"])


def dimensions(topology: Topology, device: torch.device) -> Any:
    """Return the library's description of the layout, whose meshes are on the suite's groups."""
    sizes = topology.sizes
    dims: Any = ParallelDims(
        dp_replicate=1, dp_shard=sizes["dp"], cp=1, tp=1, pp=1, ep=sizes["ep"], world_size=sizes["world"],
        spmd_backend="partial_dtensor",
    )  # fmt: skip

    def mesh(axis: str, name: str) -> DeviceMesh:
        return DeviceMesh.from_group(topology.group(axis), device.type, mesh_dim_names=(name,))

    dims._single_axis_meshes = {name: mesh("dp", name) for name in ("fsdp", "batch", "loss")}
    dims._single_axis_meshes |= {name: mesh(name, name) for name in ("tp", "pp", "ep")}
    if dims.ep_enabled:
        ranks = torch.arange(sizes["world"]).reshape(sizes["edp"], sizes["ep"])
        groups, names = [topology.group("edp"), topology.group("ep")], ("efsdp", "ep")
        sparse = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)
        dims._single_axis_meshes |= {name: sparse[name] for name in names}
    return dims


class Block(nn.Module):
    """A block of a decoder without attention and norms: an MoE module or a feed-forward one, and the residual."""

    def __init__(self, moe: nn.Module | None, feed_forward: nn.Module | None) -> None:
        super().__init__()
        self.moe_enabled, self.moe, self.feed_forward = moe is not None, moe, feed_forward

    def forward(self, x: Tensor) -> Tensor:
        """Return x + f(x)."""
        part: Any = self.moe if self.moe_enabled else self.feed_forward
        y: Tensor = x + part(given(part, x)).reshape(x.shape)
        return y


class Decoder(nn.Module):
    """The blocks, with the attributes of a model that `apply_fsdp_to_decoder` reads."""

    enable_weight_tying = False
    tok_embeddings = norm = lm_head = None

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last block."""
        for block in self.layers.values():
            x = block(x)
        return x


def decoder(config: Config, topology: Topology, dims: Any, device: torch.device) -> Any:
    """Build the model in float32, spread its experts over ep, and let FSDP2 shard it; collective."""
    wide = config.changed({"shared.ffn": (config.ffn,)})
    plain = replace(config, training=Training())

    def moe() -> nn.Module:
        built = moe_config(plain, config.experts, dispatcher_config(plain, topology))
        set_sharding(built)
        module: nn.Module = built.build().to(device)
        if dims.ep_enabled:
            module.parallelize(dims)  # type: ignore[operator]
        return module

    dense = [Block(None, shared_config(wide).build().to(device)) for _ in range(config.training.dense_layers)]
    model = Decoder([*dense, *(Block(moe(), None) for _ in range(config.training.layers))])
    apply_fsdp_to_decoder(
        model,
        dp_mesh=dims.get_mesh("fsdp"),
        param_dtype=config.dtype,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        ep_degree=dims.ep,
        edp_mesh=dims.get_mesh("efsdp") if dims.ep_enabled else None,
    )
    if device.type == "cpu":
        sum_by_gloo(model)
    return model.train()


def optimizers(training: Training, model: nn.Module) -> Any:
    """Return the container of the optimizer of all parameters, or its refusal of one that it does not have."""
    options = {
        "lr": training.rate, "betas": training.betas, "eps": training.epsilon, "weight_decay": training.decay,
    }  # fmt: skip
    group = ParamGroupConfig(pattern=".*", optimizer_name=_OPTIMIZERS[training.optimiser], optimizer_kwargs=options)
    with refusals(NotImplementedError, match="not added"):
        return OptimizersContainer.Config(param_groups=[group], implementation="foreach").build(model_parts=[model])


class Trainer:
    """The model, its optimizers, and the loop around them."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        """Build the model and its optimizers; collective."""
        self._training = config.training
        self._first, _ = placement(topology, config)
        self._dims = dimensions(topology, device)
        self._model = decoder(config, topology, self._dims, device)
        self._optimizers = optimizers(config.training, self._model)
        constant: Any = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
        self._schedulers = constant.build(optimizers=self._optimizers, training_steps=1000)
        self._loss = MSELoss(MSELoss.Config())
        self._loss.fn = summed_loss

    @property
    def resolved(self) -> Mapping[str, str]:
        """The optimizers, the dispatcher, and how parameters are placed."""
        moe = next(block.moe for block in self._model.layers.values() if block.moe_enabled)
        weight = moe.routed_experts.inner_experts.w1_EFD
        return {
            "optimizer": ", ".join(type(each).__qualname__ for each in self._optimizers),
            "layer": type(moe).__qualname__,
            "dispatcher": type(moe.routed_experts.token_dispatcher).__qualname__,
            "parameters": str(weight.dtype),
            "experts": f"{weight.placements} of {weight.device_mesh.mesh_dim_names}",
            "router": f"{moe.router.gate.weight.placements} of {moe.router.gate.weight.device_mesh.mesh_dim_names}",
        }

    @property
    def claims(self) -> Claims:
        """A step that is not finite is taken; the library's trainer stops where it logs the loss, after that."""
        return Claims(steps_not_finite="taken")

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the rows of every parameter, and the experts, that FSDP2 keeps on this rank."""
        for number, block in self._model.layers.items():
            for each in _windows(block, self._first, read):
                yield Named(f"layer{number}/{each.name}", each.expert, each.view, each.shard)

    def begin(self) -> None:
        """Nothing to do: the optimizers keep no copies of parameters."""

    def step(self, batches: Sequence[TrainingBatch]) -> TrainingReport:
        """Train one step, in the order of `Trainer.train_step`."""
        self._optimizers.zero_grad()
        tokens = torch.stack([batch.counted_T.sum() for batch in batches]).sum()
        if self._dims.dp_enabled:
            tokens = utils.dist_sum_tensor(tokens, self._dims.get_optional_mesh("batch"))
        losses = []
        for batch in batches:
            loss, _ = self._loss(self._model(batch.x_TD), batch, tokens)
            loss.backward()
            losses.append(loss.detach())
        norm = utils.clip_grad_norm_(
            list(self._model.parameters()),
            torch.inf if self._training.largest_norm is None else self._training.largest_norm,
            foreach=True,
            pp_mesh=self._dims.get_optional_mesh("pp"),
            ep_enabled=self._dims.ep_enabled,
        )
        self._optimizers.step()
        self._schedulers.step()
        loss = torch.stack(losses).sum()
        mesh = self._dims.get_optional_mesh("loss") if self._dims.dp_cp_enabled else None
        return TrainingReport(torch.tensor(utils.dist_sum(loss, mesh)), norm)

    def kept(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Return this rank's shards of the moments."""
        of = next(each for each in self._model.parameters() if _is_local_of(each, parameter))
        found = {}
        for optimizer in self._optimizers:
            for name, value in optimizer.state.get(of, {}).items():
                if name in _NAMES:
                    found[_NAMES[name]] = local(value)
        return found


def summed_loss(y_TD: Tensor, batch: TrainingBatch) -> Tensor:
    """Return the loss of the counted tokens, summed in float32."""
    off_TD = y_TD.float() - batch.target_TD.float()
    return torch.where(batch.counted_T[:, None], off_TD, 0.0).square().sum() / 2


def _windows(block: Block, first: int, read: Read) -> Iterator[Named]:
    part: Any = block.moe if block.moe_enabled else block.feed_forward
    if block.moe_enabled:
        yield from whole_window("router", part.router.gate.weight, read)
        yield from expert_windows(part.routed_experts.inner_experts, first, read)
        return
    for name, linear in (("gate", part.w1), ("up", part.w3), ("down", part.w2)):
        yield from whole_window(name, linear.weight, read)


def _is_local_of(parameter: Tensor, part: Tensor) -> bool:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().data_ptr() == part.data_ptr() and part.numel() > 0
