"""The shortcuts that pull request 11 of saforem2/torchtitan adds to a torchtitan of May 2026.

With forced load balance the all-to-all dispatcher knows all sizes without asking, keeps the order of the slots, pads to
equal splits and may take every ep-th token in place of an index. Without gradients, rows are added in place, and
experts with equally many rows each are one batched product of weights that are kept. The MoE module is in
`fast_layer`, what works on rows alone in `fast_rows`.

T tokens, K slots, E experts, N experts of this rank, R rows, D hidden.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_conformance.backends.torchtitan.backend import TorchTitan
from moe_conformance.backends.torchtitan.balance import BalancingRouters, require_balanced
from moe_conformance.backends.torchtitan.exchange import Exchange, placement
from moe_conformance.backends.torchtitan.experts import Experts
from moe_conformance.backends.torchtitan.fast_layer import (
    NAMES,
    FastLayer,
    FastRouter,
    dispatcher_config,
    experts_config,
)
from moe_conformance.backends.torchtitan.fast_rows import (
    FastCombineAdd,
    FastEqualSplits,
    FastPermutation,
    FastReordering,
    FastScatterAdd,
)
from moe_conformance.backends.torchtitan.layer import ROUND_ROBIN, require_placed
from moe_conformance.backends.torchtitan.router import require_routed
from moe_conformance.contract import (
    Claims,
    Config,
    Counted,
    Delivery,
    Parametrised,
    Routing,
    Session,
    Topology,
    Unsupported,
)

_FORCED = "forced load balance"  # the shortcut that the library can be built without
_COUNTING, _CACHES = "TT_MOE_DEBUG_FASTPATHS", ("cached_w13", "cached_w2_t")
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

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        """Refuse: the meshes are those of torchtitan, which is judged by itself."""
        del sizes
        raise Unsupported("the rank lists of the fork's meshes are not adapted")

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session on the suite's groups."""
        self.versions()
        return _Session(topology, device)


class _Session(Session):
    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._topology, self._device = topology, device
        self._optional = True

    @contextmanager
    def without_optional(self) -> Iterator[Sequence[str]]:
        """Build dispatchers that do not rely on forced load balance until the context ends."""
        self._optional = False
        try:
            yield (_FORCED,)
        finally:
            self._optional = True

    def _relies_on_forced(self, config: Config) -> bool:
        return self._optional and config.routing.forced == ROUND_ROBIN

    def exchange(self, config: Config) -> _Exchange:
        """Build a dispatcher; a forced round robin and equal splits are options of it."""
        config.only(
            *("variant", "experts", "top_k", "hidden", "ffn", "dtype", "weights_applied"),
            *("routing.forced", "padding.packed", "padding.splits"),
        )
        require_routed(config)
        first, held = placement(self._topology, config)
        dispatcher = self._dispatcher(config)
        return _Exchange(config, dispatcher, range(first, first + held))

    def _dispatcher(self, config: Config) -> Any:
        built, ep = dispatcher_config(config, forced=self._relies_on_forced(config)).build(), self._topology.group("ep")
        if ep.size() > 1:
            built.ep_mesh = DeviceMesh.from_group(ep, self._device.type, mesh_dim_names=("ep",))
        return built

    def experts(self, config: Config) -> _Experts:
        """Build this rank's GroupedExperts with products in a loop, which have shortcuts; they do not route."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "routing.forced")
        first, held = placement(self._topology, config)
        if len(self._topology.ranks("edp")) > 1 and config.dtype == torch.float64:
            raise Unsupported("torchtitan keeps and reduces in float32 what FSDP2 shards, not in torch.float64")
        return _Experts(config, first, held, self._topology, self._device)

    def router(self, config: Config) -> FastRouter:
        """Build an MoE module whose experts hand over what they would receive."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "routing", "gate_bias", "router_dtype")
        require_routed(config)
        if config.router_dtype is not None:
            raise Unsupported(f"the router computes in the dtype of its tokens on CPU, not in {config.router_dtype}")
        return FastRouter(config, self._device)

    def balancing_routers(self, config: Config) -> BalancingRouters:
        """Build the MoE modules of a model as for their routers, and register the hook that updates their biases."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "routing", "balance")
        require_routed(config)
        require_balanced(config, self._topology)
        routers = [FastRouter(config, self._device) for _ in range(config.balance.layers)]
        return BalancingRouters(routers, [router.layer for router in routers], self._topology, self._device)

    def layer(self, config: Config) -> FastLayer:
        """Build an MoE module with a dispatcher on this rank's ep group; FSDP2 shards it where it is replicated."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "routing", "shared.ffn", "shared.bias")
        require_routed(config)
        if (tp := self._topology.sizes["tp"]) > 1:
            raise Unsupported(
                f"tp = {tp}: torchtitan of May 2026 places the module by a plan of its model, not adapted"
            )
        first, held = placement(self._topology, config)
        require_placed(config, self._topology)
        dispatcher = dispatcher_config(config, forced=self._relies_on_forced(config))
        return FastLayer(config, self._topology, self._device, range(first, first + held), dispatcher)

    def permutation(self, config: Config) -> FastPermutation:
        """Build a dispatcher that sends nothing."""
        return FastPermutation(config.only("variant", "experts", "top_k", "hidden", "dtype"))

    def reordering(self, config: Config) -> FastReordering:
        """Build the all-to-all dispatcher."""
        return FastReordering(config.only("variant", "experts", "top_k", "hidden", "dtype"))

    def equal_splits(self, config: Config) -> FastEqualSplits:
        """Return the dispatcher's functions."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype")
        return FastEqualSplits(self._dispatcher(config), self._device)

    def scatter_add(self, config: Config) -> FastScatterAdd:
        """Return the operator that adds rows, and the function that adds them in place."""
        config.only("variant", "hidden", "dtype")
        return FastScatterAdd()

    def combine_add(self, config: Config) -> FastCombineAdd:
        """Return the choice between the two."""
        config.only("variant", "hidden", "dtype")
        return FastCombineAdd()

    def finish_gradients(self, *built: Parametrised) -> None:
        """Reduce the experts' gradients over their replicas, as the pipeline schedules do after the last backward."""
        for surface in built:
            if isinstance(surface, FastLayer):  # FSDP2 has reduced in every backward
                continue
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


class _Exchange(Exchange):
    """A dispatcher, with equal splits where the config has them."""

    def __init__(self, config: Config, dispatcher: Any, local_experts: range) -> None:
        super().__init__(dispatcher, local_experts)
        self._equal = config.padding.splits == "equal"

    @property
    def resolved(self) -> Mapping[str, str]:
        """As of a dispatcher without shortcuts, and which ones are on; alone it relies on nothing."""
        relies = self._dispatcher.force_load_balance and self._dispatcher.ep_mesh is not None
        return {
            **super().resolved,
            "equal splits": str(self._equal),
            "optional": _FORCED if relies else "none",
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


# ---- experts -------------------------------------------------------------------------------------------------


class _GivenRows:
    """Replaces the dispatcher of the module: its rows are those that were dispatched already."""

    def dispatch(self, rows_RD: Tensor, _scores: None, _ids: None, counts_N: Tensor) -> tuple[Tensor, Tensor, None]:
        return rows_RD, counts_N, None

    def combine(self, out_RD: Tensor, _metadata: None, _rows: Tensor, _shared: None) -> Tensor:
        return out_RD


class _Counters:
    """The library's counters of the shortcuts of experts; those of other parts are left out.

    It counts shortcuts that are taken, and not those that are not (FP-08).
    """

    def __init__(self) -> None:
        from torchtitan.models.common import token_dispatcher

        self._counts: Counter[str] = token_dispatcher._MOE_FASTPATH_COUNTERS

    def enable(self, on: bool) -> None:
        """Set the variable that the library reads in every call."""
        if on:
            os.environ[_COUNTING] = "all"
        else:
            os.environ.pop(_COUNTING, None)

    def reset(self) -> None:
        self._counts.clear()

    def read(self) -> Counted:
        caches = {name: (self._counts[f"{name}_hit"], self._counts[f"{name}_miss"]) for name in _CACHES}
        return Counted({"equal_counts": (self._counts["batched_no_grad_experts"], 0)}, caches)


class _Experts(Experts):
    """GroupedExperts that multiply expert by expert, or all at once."""

    names: ClassVar[Mapping[str, str]] = NAMES

    @property
    def counters(self) -> _Counters:
        """The counters of the process."""
        return _Counters()

    def built(self, config: Config, held: int) -> nn.Module:
        """Return the module, whose dispatcher hands rows through."""
        module: Any = experts_config(config, held, dispatcher_config(config, forced=False)).build()
        module.token_dispatcher = _GivenRows()
        made: nn.Module = module
        return made

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the output of every row."""
        assert delivery.counts_N is not None  # the dispatchers count
        out_RD: Tensor = self.module(delivery.rows_RD, None, None, delivery.counts_N.to(delivery.rows_RD.device))
        return out_RD
