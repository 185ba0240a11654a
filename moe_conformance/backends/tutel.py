"""Tutel 0.4: its gate, its encode, all-to-all and decode, and its SwiGLU experts, on CPUs.

What the library does, as read in its code and observed here. A routed pair gets a place among the C of its expert,
first choices of all tokens before second ones; C is the same for all experts, with the capacity factor 0 the largest
load of an expert on any rank, and every rank sends every expert C rows, filled or not. What it encodes and decodes it
casts to float32. Weights multiply the experts' output, or with `is_postscore=False` their input. Experts stand on the
ranks of one group, by default of the world; nothing reduces the gradients of replicas. Its C++ extension has the loops
of CPUs; its options `2dh`, `megablocks` and overlap need a GPU, and are not adapted.

T tokens, K slots, E experts, N experts of this rank, D hidden, F intermediate size, C places of an expert, W ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from moe_conformance.backends.library import Library
from moe_conformance.contract import (
    Claims,
    Config,
    Delivery,
    Limit,
    Named,
    Parametrised,
    Read,
    Routed,
    Routing,
    Session,
    Topology,
    Trained,
    Unsupported,
    refusals,
)

_INSTALL = "NO_CUDA=1 pip install --no-deps --no-build-isolation git+https://github.com/microsoft/Tutel"
_SHAPE = ("variant", "experts", "top_k", "hidden", "ffn", "dtype")
_ROUTING = ("routing.score", "routing.normalise", "router_dtype")


def _declared(folder: Path) -> str:
    """Return the version that a checkout declares."""
    versions: list[str] = re.findall(r"^ +version='(.+)',$", (folder / "setup.py").read_text(), re.MULTILINE)
    return versions[0]


class Tutel:
    """Tutel, built without CUDA; on CPU ranks over gloo."""

    name: ClassVar[str] = "tutel"
    variants: ClassVar[tuple[str, ...]] = ("alltoall",)
    process_per_rank: ClassVar[bool] = True  # the groups that it caches
    library: ClassVar[Library] = Library("tutel", "tutel", ">=0.4,<0.5", _INSTALL, _declared)
    preload: ClassVar[tuple[str, ...]] = ("tutel.moe",)

    def versions(self) -> Mapping[str, str]:
        """Versions of Tutel and of torch.

        Raises:
            Unsupported: Tutel or its extension is missing.
        """
        found = self.library.version()
        if find_spec("tutel_custom_kernel") is None:
            raise Unsupported(f"Tutel's extension tutel_custom_kernel is not built: {_INSTALL}")
        return {"tutel": found, "torch": version("torch")}

    def limits(self, variant: str) -> Sequence[Limit]:
        """What a gate of Tutel never returns; nothing is checked."""
        del variant
        of_gate = "its gate selects the K best experts, all of them others, and gives every pair a place"
        trust = "nothing is checked: what one rank raises leaves the others waiting, and other sizes abort the process"
        shared = "ranks share an expert where there are more ranks than experts, and in no other way"
        kernels = "its loops on CPUs are those of float32, to which it casts all types but float16"
        return (
            Limit("sharded_experts", (False,), shared, proof="design"),
            Limit("dtype", (torch.float32, torch.bfloat16, torch.float64), kernels, proof="undefined"),
            Limit("duplicate_experts", (False,), of_gate, proof="undefined"),
            Limit("dropped_slots", (False,), of_gate, proof="undefined"),
            Limit("wrong_use", (False,), trust, proof="undefined"),
        )

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Import the library if the ranks did not preload it, and open a session."""
        self.versions()
        return _Session(topology, device)


class _Session(Session):
    """Parts of layers whose experts stand on the ranks of ep; `finish` is that of the library's optimizer wrapper."""

    loss_convention: Literal["sum", "mean_over_dp"] = "sum"

    def __init__(self, topology: Topology, device: torch.device) -> None:
        from tutel.impls import communicate

        self._topology, self._device, self._communicate = topology, device, communicate
        self._restore = communicate.RestoreBackward
        self._group: Any = topology.group("ep")
        if repaired := 1 < topology.sizes["ep"] < topology.sizes["world"]:
            communicate.RestoreBackward = _in_group(self._restore, self._group)
        self._note = {"ep ranks": str(self._group.size())} | ({"repaired": "TU-01"} if repaired else {})

    def exchange(self, config: Config) -> _Exchange:
        """Build the exchange of this rank's ep group; it takes any T, also packed."""
        config.only(*_SHAPE, "weights_applied", "padding.packed")
        return _Exchange(config, self._held(config), self._group, self._note)

    def experts(self, config: Config) -> _Experts:
        """Build a layer, of which the experts are called."""
        config.only(*_SHAPE)
        return _Experts(self._built(config), self._held(config), self._note)

    def router(self, config: Config) -> _Router:
        """Build a gate."""
        config.only(*_SHAPE, *_ROUTING, "capacity.factor", "capacity.drop_policy")
        self._require_one_tensor_rank()
        if config.capacity.factor is not None and config.capacity.drop_policy != "position":
            raise Unsupported("pairs are kept by the position of their tokens, or by the best score of each")
        return _Router(config, self._topology, self._device)

    def training_routers(self, config: Config) -> _TrainingRouters:
        """Build the gates of a model; their loss is returned."""
        config.only(*_SHAPE, *_ROUTING, "losses.first_choice", "losses.layers")
        self._require_one_tensor_rank()
        return _TrainingRouters(config, self._topology, self._device)

    def layer(self, config: Config) -> _Layer:
        """Build a whole layer."""
        config.only(*_SHAPE, *_ROUTING)
        return _Layer(self._built(config), self._held(config), self._note)

    def _require_one_tensor_rank(self) -> None:
        if self._topology.sizes["tp"] > 1:
            raise Unsupported(
                "the gradients of gates are added up over ranks with other data: there are no tensor ranks"
            )

    def _held(self, config: Config) -> range:
        """Return the global ids of this rank's experts."""
        sizes = self._topology.sizes
        if sizes["etp"] > 1:
            raise Unsupported(f"etp = {sizes['etp']}: ranks share an expert where there are more ranks than experts")
        if config.experts < 1 or config.experts % sizes["ep"]:
            raise Unsupported(f"every rank holds the same number of experts: {config.experts} on ep = {sizes['ep']}")
        held = config.experts // sizes["ep"]
        first = self._topology.ranks("ep").index(self._topology.rank) * held
        return range(first, first + held)

    def _built(self, config: Config) -> Any:
        """Build a layer of the library's gate and SwiGLU experts."""
        from tutel.moe import moe_layer

        held, sizes = self._held(config), self._topology.sizes
        if sizes["edp"] > 1:
            raise Unsupported(f"edp = {sizes['edp']}: nothing reduces the gradients of an expert's replicas")
        if 1 < sizes["ep"] < sizes["world"]:
            raise Unsupported("llama_ffn raises in a group of some ranks of the world: 'not allowed' to nest groups")
        with refusals(AssertionError, match="must be even value"):
            layer = moe_layer(
                {"type": "top", "capacity_factor": 0} | _gate_options(config),
                config.hidden,
                {"type": "llama_ffn", "num_experts_per_device": len(held), "hidden_size_per_expert": config.ffn},
                group=self._group,
                normalize_gate=config.routing.normalise,
            )
        return layer.to(self._device, config.dtype)

    def finish_gradients(self, *built: Parametrised) -> None:
        """Add up the gradients of what is not an expert over data parallel ranks."""
        for surface in built:
            assert isinstance(surface, _Built | _Gates)  # there are no others with parameters
            _finish(surface.module, self._topology.group("dp_cp"))

    def close(self) -> None:
        """Forget the groups that the library made for experts."""
        self._communicate.RestoreBackward = self._restore
        for made in self._communicate.TUTEL_GROUPING_CACHE.values():
            for group in {made.model_group, made.data_group} - {torch.distributed.group.WORLD}:
                torch.distributed.destroy_process_group(group)
        self._communicate.TUTEL_GROUPING_CACHE.clear()


def _finish(module: nn.Module, group: Any) -> None:
    """Add up gradients as the library's wrapper of optimizers does, which steps with a chunk of each on every rank.

    The chunks are gathered for the suite to read.
    """
    from tutel.net import TutelDistributedOptimizer, simple_all_gather

    wrapper = TutelDistributedOptimizer(module.parameters(), group)
    wrapper.chunk_param()
    wrapper.chunk_grad()
    for parameter, chunk in zip(wrapper.params, wrapper.virt_params, strict=True):
        if chunk.grad is not None:
            whole = simple_all_gather(chunk.grad, group).flatten()
            parameter.grad = whole[: parameter.numel()].view_as(parameter)


def _in_group(function: Any, group: Any) -> Any:
    """Return the library's function whose backward is an all-to-all, for a caller that gives it no group (TU-01)."""

    class InGroup(function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, given: Tensor, output: Tensor) -> Any:
            return function.forward(ctx, given, output, group)

    return InGroup


class _Exchange:
    """The four functions that a layer of the library calls around experts, as its example from scratch calls them."""

    def __init__(self, config: Config, held: range, group: Any, note: dict[str, str]) -> None:
        from tutel import moe, net

        self._moe, self._net, self._group, self._note = moe, net, group, note
        self._on_output, self.local_experts = config.weights_applied != "input", tuple(held)

    @property
    def resolved(self) -> Mapping[str, str]:
        return {"dispatch": self._moe.fast_encode.__qualname__} | self._note

    @property
    def claims(self) -> Claims:
        """Every rank sends C rows to every expert."""
        return Claims(wire="capacity", handed="static", weights_at="combine" if self._on_output else "input")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Let the library give pairs their places: scores that fall from slot to slot select the experts of a routing.

        The weights are what the library's gate would have made of such scores: those of the routing replace them.
        """
        K, x_TD = routing.ids_TK.shape[1], x.reshape(-1, x.shape[-1]).contiguous()  # encode asserts that it is
        falling_TK = torch.arange(K, 0, -1.0, device=x.device).expand(routing.ids_TK.shape)
        scores_TE = falling_TK.new_zeros(len(x_TD), routing.experts).scatter(1, routing.ids_TK, falling_TK)
        (E, ids, places, _, *sizes), _ = self._moe.top_k_routing(
            scores_TE, K, None, capacity_factor=0, normalize_gate=False, group=self._group
        )
        pairs = (E, ids, places, list(routing.weights_TK.T.contiguous()), *sizes)
        rows_ECD = self._moe.fast_encode(x_TD, pairs, self._on_output)
        return Delivery.batched(self._net.all_to_all(rows_ECD, 1, 0, group=self._group)), (pairs, x.shape)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        pairs, shape = handle
        out_ECD = self._net.all_to_all(rows, 0, 1, group=self._group)
        y_TD: Tensor = self._moe.fast_decode(out_ECD, pairs, self._on_output)
        return y_TD.reshape(shape)


class _Built:
    """A layer with its gate and experts, of which a part or all is called."""

    def __init__(self, layer: Any, held: range, note: dict[str, str]) -> None:
        self.module, self._held, self._note = layer, held, note

    @property
    def resolved(self) -> Mapping[str, str]:
        parts = {"layer": self.module, "gate": self.module.gates[0], "experts": self.module.experts}
        return {name: type(part).__qualname__ for name, part in parts.items()} | self._note

    def _of_experts(self, read: Read) -> Iterator[Named]:
        experts = self.module.experts
        for name, number in (("gate", 1), ("up", 2), ("down", 3)):
            whole = read(getattr(experts, f"W_fc{number}")).view(getattr(experts, f"W_fc{number}_full_shape"))
            for expert, view in zip(self._held, whole, strict=True):
                yield Named(name, expert, view.T)


class _Layer(_Built):
    """All of it."""

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y

    def named(self, read: Read) -> Iterator[Named]:
        yield Named("router", None, read(self.module.gates[0].wg.weight))
        yield from self._of_experts(read)


class _Experts(_Built):
    """Its experts."""

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the output, (N, R, D).

        Raises:
            ValueError: the rows have another form, of which the library knows none.
        """
        if len(delivery.shape) != 3:
            raise ValueError("the library's experts have as many rows each: they take no rows sorted by expert")
        out: Tensor = self.module.experts(delivery.rows_RD.reshape(delivery.shape), self.module)
        return out

    def named(self, read: Read) -> Iterator[Named]:
        return self._of_experts(read)


def _gate_options(config: Config) -> dict[str, Any]:
    """Return the arguments of a gate.

    Raises:
        Unsupported: it has no such rule.
    """
    if config.routing.score != "softmax":
        raise Unsupported(f"the gate takes the softmax of all logits, not {config.routing.score}")
    if config.routing.normalise and config.top_k == 1:
        raise Unsupported("with one choice the gate does not normalise")
    if config.router_dtype not in (None, config.dtype, torch.float32):
        raise Unsupported(f"logits are in the dtype of the gate or in float32, not in {config.router_dtype}")
    return {"k": config.top_k, "fp32_gate": config.router_dtype == torch.float32}


class _Gates:
    """The gates of the layers of a model, and what a layer calls behind each."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        from tutel import moe
        from tutel.gates.top import Gate

        gates = [Gate(config.hidden, config.experts, **_gate_options(config)) for _ in range(config.losses.layers)]
        self.module: Any = nn.ModuleList(gates).to(device, config.dtype)
        self._config, self._select, self._group = config, moe.top_k_routing, topology.group("ep")
        self._replicas = topology.group("dp_cp")

    @property
    def resolved(self) -> Mapping[str, str]:
        gate = self.module[0]
        return {
            "router": f"{type(gate).__qualname__} and {self._select.__qualname__}",
            "gate": str(gate.wg.weight.dtype),
        }

    @property
    def claims(self) -> Claims:
        return Claims(dtype=self._config.router_dtype, drop_order="choices")

    def train(self, mode: bool = True) -> None:
        """Switch the gates."""
        self.module.train(mode)

    def route(self, gate: Any, x: Tensor) -> tuple[Routed, Tensor]:
        """Do what a layer does ahead of its exchange, which drops pairs that have a place beyond the capacity."""
        logits_TE = gate(x.reshape(-1, x.shape[-1]))
        (E, ids, places, weights, C, counts_E), loss = self._select(
            nn.functional.softmax(logits_TE, dim=1), gate.top_k,
            capacity_factor=self._config.capacity.factor or 0,
            normalize_gate=self._config.routing.normalise, group=self._group,
        )  # fmt: skip
        ids_TK = torch.where(torch.stack(places, 1) < C, torch.stack(ids, 1).long(), -1)
        routing = Routing(ids_TK, torch.stack(weights, 1), E)
        return Routed(routing, logits_TE, counts_E), loss


class _Router(_Gates):
    """One gate."""

    def __call__(self, x: Tensor) -> Routed:
        return self.route(self.module[0], x)[0]

    def named(self, read: Read) -> Iterator[Named]:
        yield Named("router", None, read(self.module[0].wg.weight))


class _TrainingRouters(_Gates):
    """The gates with the loss that a layer returns as `l_aux`."""

    takes_mask = False

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the weight of every gate."""
        for number, gate in enumerate(self.module):
            yield Named("router", number, read(gate.wg.weight))

    def begin_step(self, microbatches: int, scale: float) -> None:
        """Nothing is kept of a step: the caller scales what is returned."""

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        """Route, and add up the losses in training, as a model does."""
        assert padding_mask_T is None  # takes_mask
        made = [self.route(gate, part) for gate, part in zip(self.module, x, strict=True)]
        routed, losses = zip(*made, strict=True)
        trains = self.module.training and torch.is_grad_enabled() and self._config.losses.first_choice
        return Trained(routed, self._config.losses.first_choice * torch.stack(losses).sum() if trains else None)

    def finish(self, tokens: int) -> None:
        """Add up gradients over data parallel ranks."""
        del tokens
        _finish(self.module, self._replicas)

    def report(self) -> None:
        """Return nothing: the library reports no loss."""
        return None
