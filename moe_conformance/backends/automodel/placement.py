"""The library's meshes of a rank, its config of a module, and a model of one module, placed by the library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_conformance.backends.fsdp_windows import require_parts
from moe_conformance.contract import Config, Topology, Unsupported

VARIANTS = {"loop": "torch", "grouped": "torch_mm"}  # the library's option `experts`


class Placement:
    """The meshes of one rank, made of the suite's groups, and the experts that it holds."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        """Refuse what the library has not.

        Raises:
            Unsupported: experts would be split, tensor ranks would need a model's plan, or sums are in float32 alone.
        """
        sizes = topology.sizes
        if sizes["etp"] > 1:
            raise Unsupported(f"etp = {sizes['etp']}: experts are never split by columns")
        if sizes["tp"] > 1:
            raise Unsupported(f"tp = {sizes['tp']} takes the plan of a whole model: not adapted")
        if config.experts < 1 or config.experts % sizes["ep"]:
            raise Unsupported(f"every rank holds the same number of experts: {config.experts} on ep = {sizes['ep']}")
        if config.dtype == torch.float64:
            raise Unsupported("outputs of experts are added up, and gradients reduced, in float32: not float64")
        self.topology, self.device = topology, device
        self.batches, self.ep, self.edp = sizes["dp"] * sizes["cp"], sizes["ep"], sizes["edp"]
        self.held = config.experts // self.ep
        self.first = topology.ranks("ep").index(topology.rank) * self.held

    @property
    def dense_mesh(self) -> DeviceMesh:
        """The ranks with different batches, over which all parameters but those of experts are sharded."""
        return DeviceMesh.from_group(self.topology.group("dp_cp"), self.device.type, mesh_dim_names=("dp_shard_cp",))

    @property
    def cp_mesh(self) -> DeviceMesh | None:
        """The ranks with other positions of the same sequences; none where there are no others."""
        cp = self.topology.group("cp")
        return DeviceMesh.from_group(cp, self.device.type, mesh_dim_names=("cp",)) if cp.size() > 1 else None

    @property
    def moe_mesh(self) -> DeviceMesh | None:
        """The axes ep_shard and ep, under the library's names; it has no such mesh without expert parallelism."""
        if self.ep == 1:
            return None
        return DeviceMesh.from_group(
            [self.topology.group("edp"), self.topology.group("ep")],
            self.device.type,
            mesh=torch.tensor(self._stage()).reshape(self.edp, self.ep),
            mesh_dim_names=("ep_shard", "ep"),
        )

    def _stage(self) -> list[int]:
        """Return the ranks of this rank's pipeline stage, ep counting fastest."""
        ranks = len(self.topology.ranks("world")) // self.topology.sizes["pp"]
        first = self.topology.rank // ranks * ranks
        return list(range(first, first + ranks))

    def require_rows(self, *rows: int) -> None:
        """Raise `Unsupported` unless FSDP2 gives every rank windows on equal parts of parameters of so many rows."""
        for count in rows:
            require_parts((count,), self.batches)

    def require_experts(self, config: Config) -> None:
        """Raise `Unsupported` unless every replica holds equal parts of the experts."""
        if self.ep == 1:
            self.require_rows(config.experts)
        elif config.hidden % self.edp or config.ffn % self.edp:
            raise Unsupported(f"FSDP2 shards dimension 1 in equal parts: {config.hidden}, {config.ffn} on {self.edp}")
        elif config.expert_biases != "none" and self.edp > 1:
            raise Unsupported(f"edp = {self.edp} cuts the bias of gate and up in parts of both")

    def part(self, parameter: Tensor) -> tuple[int, tuple[int, int, int] | None]:
        """Return the first expert in this rank's part of a parameter of all experts, and which part of each it is."""
        if not isinstance(parameter, DTensor):
            return 0, None
        if self.ep == 1:  # sharded with all other parameters, by experts
            mesh = parameter.device_mesh
            return mesh.get_local_rank() * -(-parameter.shape[0] // mesh.size()), None
        index = self.topology.ranks("edp").index(self.topology.rank)
        return self.first, (1, index, self.edp) if self.edp > 1 else None


def moe_config(config: Config, **further: Any) -> Any:
    """Return the library's config of one module."""
    from nemo_automodel.components.moe.config import MoEConfig

    groups, chosen = config.routing.groups or (1, 1)
    shared = sum(config.shared.ffn)
    options = {
        "n_routed_experts": config.experts,
        "n_shared_experts": int(shared > 0),
        "n_activated_experts": config.top_k,
        "n_expert_groups": groups,
        "n_limited_groups": chosen,
        "train_gate": True,
        "gate_bias_update_factor": 0.0,
        "aux_loss_coeff": 0.0,
        "score_func": "softmax",
        "route_scale": config.routing.scale,
        "dim": config.hidden,
        "inter_dim": config.ffn,
        "moe_inter_dim": config.ffn,
        "norm_topk_prob": config.routing.normalise,
        "router_bias": config.gate_bias,
        "router_weights_fp32": config.router_dtype == torch.float32,
        "expert_bias": config.expert_biases == "all",
        "swiglu_limit": config.activation.limit or 0.0,
        "dtype": config.dtype,
        "force_e_score_correction_bias": config.routing.balance_bias,
        "shared_expert_inter_dim": shared or None,
        "shared_expert_gate": config.shared.gate,
    }
    return MoEConfig(**options | further)


def backend_config(config: Config) -> Any:
    """Return the library's config of how a module computes: on CPUs, with the torch dispatcher."""
    from nemo_automodel.components.models.common import BackendConfig

    return BackendConfig(
        linear="torch",
        rms_norm="torch",
        experts=VARIANTS[config.variant],
        dispatcher="torch",
        gate_precision=config.router_dtype,
    )


class _Block(nn.Module):
    """A block of a decoder that has only the module, and returns what a call makes of it."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.mlp = moe

    def forward(self, call: Any, *given: Any) -> Any:
        return call(self.mlp, *given)


class Model(nn.Module):
    """A decoder of blocks that have only such modules, placed as the library's `parallelize_model` does. Collective."""

    def __init__(self, placement: Placement, modules: list[Any], *, experts: bool) -> None:
        """Give the modules parameters of a new model, and place them; `experts`: with their experts."""
        super().__init__()
        from nemo_automodel.components.moe.parallelizer import apply_ep, apply_fsdp
        from torch.distributed.fsdp import MixedPrecisionPolicy

        with torch.no_grad():
            for module in modules:
                module.to(placement.device).init_weights(placement.device)
        self.layers = nn.ModuleList(_Block(module) for module in modules)
        self._placement, self._moe_mesh = placement, placement.moe_mesh if experts else None
        mesh = self._moe_mesh
        if mesh is not None:
            apply_ep(self, mesh["ep"], moe_mesh=mesh)
        if placement.batches > 1:
            dtype = next(self.parameters()).dtype
            apply_fsdp(
                self,
                placement.dense_mesh,
                ep_enabled=mesh is not None,
                ep_shard_enabled=mesh is not None and placement.edp > 1,
                ep_shard_mesh=None if mesh is None else mesh["ep_shard"],
                mp_policy=MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
            )

    def forward(self, call: Any, *given: Any) -> list[Any]:
        """Return what `call(module, *its part of what is given)` returns for every module."""
        return [layer(call, *part) for layer, part in zip(self.layers, zip(*given, strict=True), strict=True)]

    @property
    def modules_of_layers(self) -> list[Any]:
        """The placed modules."""
        return [layer.mlp for layer in self.layers]

    def free_gathered(self) -> None:  # not `reshard`: FSDP2 gives the model one, of its outermost parameters
        """Free the parameters that FSDP2 has gathered."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def finish(self) -> None:
        """Divide the gradients of experts, as the trainer does after the last backward."""
        from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

        mesh = self._moe_mesh
        scale_grads_and_clip_grad_norm(
            None,
            [self],
            moe_mesh=mesh,
            ep_axis_name=None if mesh is None else "ep",
            dp_group_size=self._placement.batches,
        )
