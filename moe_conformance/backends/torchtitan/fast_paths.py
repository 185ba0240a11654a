"""The shortcuts that pull request 11 of saforem2/torchtitan adds to a torchtitan of May 2026.

With forced load balance the all-to-all dispatcher knows all sizes without asking, keeps the order of the slots, pads to
equal splits and may take every ep-th token in place of an index. Without gradients, rows are added in place, and
experts with equally many rows each are one batched product of weights that are kept. Only this code is adapted here:
all else is that of torchtitan, which has a backend of its own.

T tokens, K slots, E experts, N experts of this rank, R rows, D hidden.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_conformance.backends.torchtitan.backend import TorchTitan
from moe_conformance.backends.torchtitan.exchange import Exchange, placement
from moe_conformance.backends.torchtitan.experts import Experts
from moe_conformance.backends.torchtitan.layer import ROUND_ROBIN
from moe_conformance.backends.torchtitan.router import require_routed
from moe_conformance.contract import (
    Claims,
    Config,
    Delivery,
    Named,
    Parametrised,
    Read,
    Routed,
    Routing,
    Session,
    Topology,
    Unsupported,
)

_MARK = "def _scatter_add_forward_or_autograd"  # in a file of a checkout that has the shortcuts


class FastPaths(TorchTitan):
    """A checkout that has the shortcuts."""

    name: ClassVar[str] = "torchtitan-fast-paths"
    variants: ClassVar[tuple[str, ...]] = ("alltoall",)  # which is the local one where ep = 1
    process_per_rank: ClassVar[bool] = True  # variables of the environment switch shortcuts
    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.pipelining", "torchtitan.models.common.moe")
    environment: ClassVar[Mapping[str, str]] = {}

    def versions(self) -> Mapping[str, str]:
        """Versions of torchtitan and of torch.

        Raises:
            Unsupported: this torchtitan has no shortcuts.
        """
        found = super().versions()
        spec = find_spec("torchtitan")
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent / "models" / "common" / "token_dispatcher.py"
        if _MARK not in source.read_text(encoding="utf-8"):
            raise Unsupported("this torchtitan has no shortcuts: saforem2/torchtitan has, at 8d22a86d")
        return {package: found[package] for package in ("torchtitan", "torch")}

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session on the suite's groups."""
        self.versions()
        return _Session(topology, device)


class _Session(Session):
    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._topology, self._device = topology, device

    def exchange(self, config: Config) -> _Exchange:
        """Build a dispatcher; a forced round robin and equal splits are options of it."""
        config.only(
            *("variant", "experts", "top_k", "hidden", "ffn", "dtype", "weights_applied"),
            *("routing.forced", "padding.packed", "padding.splits"),
        )
        require_routed(config)
        first, held = placement(self._topology, config)
        return _Exchange(config, _dispatcher(config, self._topology, self._device), range(first, first + held))

    def experts(self, config: Config) -> _Experts:
        """Build this rank's GroupedExperts with products in a loop, which have shortcuts."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype")
        first, held = placement(self._topology, config)
        if len(self._topology.ranks("edp")) > 1 and config.dtype == torch.float64:
            raise Unsupported("torchtitan keeps and reduces in float32 what FSDP2 shards, not in torch.float64")
        return _Experts(config, first, held, self._topology, self._device)

    def router(self, config: Config) -> _Router:
        """Build the router alone."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "routing", "router_dtype")
        require_routed(config)
        if config.routing.balance_bias:
            raise Unsupported("the bias is of the MoE module, which is not adapted here")
        if config.router_dtype is not None:
            raise Unsupported(f"the router computes in the dtype of its tokens on CPU, not in {config.router_dtype}")
        return _Router(config, self._device)

    def equal_splits(self, config: Config) -> _EqualSplits:
        """Return the dispatcher's functions."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype")
        return _EqualSplits(_dispatcher(config, self._topology, self._device), self._device)

    def scatter_add(self, config: Config) -> _ScatterAdd:
        """Return the operator that adds rows, and the function that adds them in place."""
        config.only("variant", "hidden", "dtype")
        return _ScatterAdd()

    def combine_add(self, config: Config) -> _CombineAdd:
        """Return the choice between the two."""
        config.only("variant", "hidden", "dtype")
        return _CombineAdd()

    def finish_gradients(self, *built: Parametrised) -> None:
        """Reduce the experts' gradients over their replicas, as the pipeline schedules do after the last backward."""
        for surface in built:
            if not isinstance(surface, _Experts):
                raise Unsupported(f"the reduction of {type(surface).__name__}'s gradients is not adapted")
            surface.reduce()


# ---- exchange ------------------------------------------------------------------------------------------------


@contextmanager
def _variable(name: str, on: bool) -> Iterator[None]:
    """Set a switch of the library, which it reads in every call."""
    before = os.environ.get(name)
    os.environ[name] = "1" if on else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _dispatcher(config: Config, topology: Topology, device: torch.device) -> Any:
    from torchtitan.models.common import token_dispatcher

    options: dict[str, Any] = {
        "num_experts": config.experts,
        "top_k": config.top_k,
        "score_before_experts": config.weights_applied == "input",
        "force_load_balance": config.routing.forced == ROUND_ROBIN,
    }
    built, ep = token_dispatcher.AllToAllTokenDispatcher.Config(**options).build(), topology.group("ep")
    if ep.size() > 1:
        built.ep_mesh = DeviceMesh.from_group(ep, device.type, mesh_dim_names=("ep",))
    return built


class _Exchange(Exchange):
    """A dispatcher, with equal splits where the config has them."""

    def __init__(self, config: Config, dispatcher: Any, local_experts: range) -> None:
        super().__init__(dispatcher, local_experts)
        self._equal = config.padding.splits == "equal"

    @property
    def resolved(self) -> Mapping[str, str]:
        """As of a dispatcher without shortcuts, and which ones are on."""
        return {
            **super().resolved,
            "forced load balance": str(self._dispatcher.force_load_balance),
            "equal splits": str(self._equal),
        }

    @property
    def claims(self) -> Claims:
        """Where weights are applied; and forced ids begin at expert 0, as the router makes them."""
        return Claims(
            weights_at="input" if self._dispatcher.score_before_experts else "combine",
            round_robin="zero" if self._dispatcher.force_load_balance else "any",
        )

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Send rows to their experts."""
        with _variable("TT_MOE_NORMAL_EQUAL_A2A_PADDING", self._equal):
            return super().dispatch(x, routing)


class _EqualSplits:
    """The dispatcher's functions; the size is that of the largest piece of any rank."""

    def __init__(self, dispatcher: Any, device: torch.device) -> None:
        self._dispatcher, self._device = dispatcher, device

    @property
    def resolved(self) -> Mapping[str, str]:
        return {"equal splits": type(self._dispatcher).__qualname__}

    def size(self, pieces: Sequence[int]) -> int:
        size: int = self._dispatcher._global_equal_a2a_split_size(list(pieces), self._device, torch.int64)
        return size

    def pad(self, rows_RD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        rows_PD: Tensor = self._dispatcher._pad_to_equal_splits(rows_RD, list(pieces), size)
        return rows_PD

    def compact(self, rows_PD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        rows_RD: Tensor = self._dispatcher._compact_equal_splits(rows_PD, list(pieces), size)
        return rows_RD


# ---- experts -------------------------------------------------------------------------------------------------


class _GivenRows:
    """Replaces the dispatcher of the module: its rows are those that were dispatched already."""

    def dispatch(self, rows_RD: Tensor, _scores: None, _ids: None, counts_N: Tensor) -> tuple[Tensor, Tensor, None]:
        return rows_RD, counts_N, None

    def combine(self, out_RD: Tensor, _metadata: None, _rows: Tensor, _shared: None) -> Tensor:
        return out_RD


class _Experts(Experts):
    """GroupedExperts that multiply expert by expert, or all at once.

    They have no `counters`: the library counts shortcuts that are taken, and not those that are not (FP-08).
    """

    names: ClassVar[Mapping[str, str]] = {"w1": "gate", "w3": "up", "w2": "down"}

    def built(self, config: Config, held: int) -> nn.Module:
        """Return the module, whose dispatcher hands rows through."""
        from torchtitan.models.common.moe import GroupedExperts
        from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

        module: Any = GroupedExperts.Config(
            dim=config.hidden,
            hidden_dim=config.ffn,
            num_experts=held,
            use_grouped_mm=False,
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=held, top_k=1),
        ).build()
        module.token_dispatcher = _GivenRows()
        made: nn.Module = module
        return made

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the output of every row."""
        assert delivery.counts_N is not None  # the dispatchers count
        out_RD: Tensor = self.module(delivery.rows_RD, None, None, delivery.counts_N.to(delivery.rows_RD.device))
        return out_RD


# ---- router --------------------------------------------------------------------------------------------------


class _Torch:
    """torch as the library's module sees it on CPU, where torch has no `histc` of integers, as CUDA has."""

    def histc(self, ids: Tensor, **options: Any) -> Tensor:
        return torch.histc(ids.double(), **options).to(ids.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Router:
    """The router, without the module that adds a bias."""

    def __init__(self, config: Config, device: torch.device) -> None:
        from torchtitan.models.common import moe
        from torchtitan.models.common.linear import Linear

        if device.type == "cpu":
            moe.torch = _Torch()
        groups, chosen = config.routing.groups or (None, None)
        built = moe.TokenChoiceTopKRouter.Config(
            num_experts=config.experts,
            gate=Linear.Config(in_features=config.hidden, out_features=config.experts),
            num_expert_groups=groups,
            num_limited_groups=chosen,
            top_k=config.top_k,
            score_func=config.routing.score,
            route_norm=config.routing.normalise,
            route_scale=config.routing.scale,
            _debug_force_load_balance=config.routing.forced == ROUND_ROBIN,
        ).build()
        self._router: Any = built.to(device, config.dtype)
        self._router.gate.register_forward_hook(self._keep_logits)
        self._logits_TE = torch.empty(0)

    def _keep_logits(self, _module: nn.Module, _inputs: object, logits_TE: Tensor) -> None:
        self._logits_TE = logits_TE

    @property
    def resolved(self) -> Mapping[str, str]:
        return {
            "router": type(self._router).__qualname__,
            "forced": "round_robin" if self._router._debug_force_load_balance else "none",
            "shims": "histc of int64 on CPU" if self._router.gate.weight.device.type == "cpu" else "none",
        }

    def __call__(self, x: Tensor) -> Routed:
        scores_TK, ids_TK, counts_E = self._router(x.flatten(0, -2))
        return Routed(Routing(ids_TK, scores_TK, self._logits_TE.shape[-1]), self._logits_TE, counts_E)

    def named(self, read: Read) -> Iterator[Named]:
        yield Named("router", None, read(self._router.gate.weight))


# ---- rows ----------------------------------------------------------------------------------------------------


def _wide(index_J: Tensor, src_JD: Tensor) -> Tensor:
    """Return the index of every element, which the operators take."""
    return index_J.reshape(-1, 1).expand(-1, src_JD.shape[-1])


class _ScatterAdd:
    """The operator, and the function in place."""

    def __init__(self) -> None:
        from torchtitan.ops import scatter_add

        self._ops: Any = scatter_add

    @property
    def resolved(self) -> Mapping[str, str]:
        return {"scatter add": self._ops.deterministic_scatter_add._qualname}

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        y_ND: Tensor = self._ops.deterministic_scatter_add(out_ND, _wide(index_J, src_JD), src_JD)
        return y_ND

    def add_(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        y_ND: Tensor = self._ops.deterministic_scatter_add_(out_ND, _wide(index_J, src_JD), src_JD)
        return y_ND


class _CombineAdd:
    """The function that chooses between the two."""

    def __init__(self) -> None:
        from torchtitan.models.common import token_dispatcher

        self._add: Any = token_dispatcher._scatter_add_forward_or_autograd

    @property
    def resolved(self) -> Mapping[str, str]:
        return {"combine add": self._add.__qualname__}

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        y_ND: Tensor = self._add(out_ND, _wide(index_J, src_JD), src_JD, x_ND)
        return y_ND
