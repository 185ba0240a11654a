"""VeOmni 0.1: the all-to-all of its MoE layers, around given experts or its own.

What the library does, as read in its code and observed here. One row travels for each routed pair; the rows of a rank's
experts are sorted by expert; weights are applied in the combine, which adds up in float32. Experts are a function of
torch.autograd with a backward of its own, over two Triton kernels, which have no CPU target: loops of plain products
take their place, and what is judged is what the function computes of them. FSDP2 divides the gradients of experts by
all ranks. Importing the package imports models of one version of transformers: its folders are imported here without
what they run first.

T tokens, K slots, E experts, N experts of this rank, R rows received, D hidden, F intermediate size, W ranks.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from moe_conformance.backends.fsdp_windows import local
from moe_conformance.backends.library import Library
from moe_conformance.contract import (
    Config,
    Delivery,
    Limit,
    Named,
    Parametrised,
    Read,
    Routing,
    Session,
    Topology,
    Unsupported,
)  # fmt: skip

_SHAPE = ("variant", "experts", "top_k", "hidden", "ffn", "dtype", "sharding", "activation.limit")
_PACKAGES = ("veomni", "veomni.distributed", "veomni.utils", "veomni.distributed.moe")


def _declared(folder: Path) -> str:
    """Return the version that a checkout declares."""
    text = (folder / "veomni" / "_version.py").read_text()
    versions: list[str] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return versions[0]


class VeOmni:
    """The published veomni; on CPU ranks over gloo."""

    name: ClassVar[str] = "veomni"
    variants: ClassVar[tuple[str, ...]] = ("alltoall",)
    library: ClassVar[Library] = Library("veomni", "veomni", ">=0.1.12,<0.2", "pip install --no-deps veomni", _declared)

    def versions(self) -> Mapping[str, str]:
        """Versions of veomni and of torch."""
        return {"veomni": self.library.version(), "torch": version("torch")}

    def limits(self, variant: str) -> Sequence[Limit]:
        """One map (T, E) of what is routed, in which ids are an index; nothing is checked."""
        del variant
        of_map = "rows are counted by slots, and taken by a map, in which a token has an expert once or not at all"
        trust = "nothing is checked: what one rank raises leaves the others waiting, and other sizes abort the process"
        cast = "where weights are float32, so is the output; the models cast them to the dtype of their tokens"
        return (
            Limit("sharded_experts", (False,), "experts are never split", proof="design"),
            Limit("dtype", (torch.float32,), cast, proof="undefined"),
            Limit("duplicate_experts", (False,), of_map, proof="undefined"),
            Limit("dropped_slots", (False,), "one_hot takes no id of -1", proof="undefined"),
            Limit("wrong_use", (False,), trust, proof="undefined"),
        )

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Import the library, and open a session."""
        self.versions()
        return _Session(topology, _imported(self.library, device), device)


def _imported(installed: Library, device: torch.device) -> Any:
    """Import the layer's module without the packages around it."""
    if "veomni" not in sys.modules:
        root = installed.folder()
        assert root is not None  # `versions` has looked
        for name in _PACKAGES:
            sys.modules[name] = package = ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")))]
        _stub("veomni.utils.import_utils", is_torch_npu_available=lambda: True)  # which leaves the kernels out
        _stub("veomni.distributed.parallel_state", get_parallel_state=None)
    library: Any = importlib.import_module("veomni.distributed.moe.moe_layer")
    library.group_gemm_same_nk, library.group_gemm_same_mn = _rows_by_weights, _rows_by_rows
    if device.type == "cpu":  # gloo gathers into a flat buffer what is flat
        library.dist = _FlatGather("torch.distributed")
    return library


def _rows_by_weights(a: Tensor, b: Tensor, cumsum_M: Tensor, transpose_b: bool, **_: Any) -> Tensor:
    """Take the place of a kernel: every expert's rows times its matrix, or the transpose of it."""
    assert a.is_contiguous()  # as the kernel asserts
    assert b.is_contiguous()
    parts = a.split(torch.diff(cumsum_M, prepend=cumsum_M.new_zeros(1)).tolist())
    return torch.cat([part @ (matrix.T if transpose_b else matrix) for part, matrix in zip(parts, b, strict=True)])


def _rows_by_rows(a: Tensor, b: Tensor, c: Tensor, cumsum_K: Tensor, **_: Any) -> None:
    """Take the place of a kernel: write the product of every expert's rows, the first transposed, into c."""
    assert a.is_contiguous()  # as the kernel asserts
    assert b.is_contiguous()
    counts = torch.diff(cumsum_K, prepend=cumsum_K.new_zeros(1)).tolist()
    for out, left, right in zip(c, a.split(counts), b.split(counts), strict=True):
        torch.mm(left.T, right, out=out)


def _stub(name: str, **attributes: Any) -> None:
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(attributes)


class _FlatGather(ModuleType):
    """torch.distributed, with one collective that takes the shapes that NCCL does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_gather_into_tensor(output: Tensor, local: Tensor, group: Any) -> None:
        dist.all_gather_into_tensor(output.view(-1), local, group=group)


class _Session(Session):
    loss_convention: Literal["sum", "mean_over_dp"] = "mean_over_dp"

    def __init__(self, topology: Topology, library: Any, device: torch.device) -> None:
        self._topology, self._library, self._device = topology, library, device

    def exchange(self, config: Config) -> _Exchange:
        """Build the exchange of this rank's ep group; it takes any T, also packed."""
        config.only(*_SHAPE, "padding.packed")
        self._require_experts(config)
        return _Exchange(config.experts, self._topology, self._library)

    def experts(self, config: Config) -> _Experts:
        """Build the experts of this rank, wrapped by FSDP2."""
        config.only(*_SHAPE)
        self._require_experts(config)
        if self._topology.sizes["edp"] > 1:
            raise Unsupported("a model's plan says how experts are sharded over their replicas")
        return _Experts(config, self._topology, self._library, self._device)

    def finish_gradients(self, *built: Parametrised) -> None:
        """Nothing is left to do: FSDP2 reduces gradients in the backward."""

    def _require_experts(self, config: Config) -> None:
        sizes = self._topology.sizes
        if sizes["etp"] > 1:
            raise Unsupported(f"etp = {sizes['etp']}: experts are never split")
        if config.experts < 1 or config.experts % sizes["ep"]:
            raise Unsupported(f"every rank holds the same number of experts: {config.experts} on ep = {sizes['ep']}")
        if config.dtype == torch.float64:
            raise Unsupported("outputs of experts are added up in float32: not float64")


class _Exchange:
    """The three functions around the experts; all state goes into the handle."""

    def __init__(self, experts: int, topology: Topology, library: Any) -> None:
        self._experts, self._library, self._group = experts, library, topology.group("ep")
        held, index = experts // self._group.size(), topology.ranks("ep").index(topology.rank)
        self.local_experts = tuple(range(index * held, (index + 1) * held))

    @property
    def resolved(self) -> Mapping[str, str]:
        return {"dispatch": self._library.token_pre_all2all.__qualname__, "ep ranks": str(self._group.size())}

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        mask_EKT = torch.nn.functional.one_hot(routing.ids_TK, self._experts).permute(2, 1, 0)
        sent, received, counts_WN, counts_N = self._library.preprocess(mask_EKT, self._experts, self._group)
        how = self._experts, sent, received, counts_WN
        rows_RD, map_ET, order, shape = self._library.token_pre_all2all(x, mask_EKT, *how, self._group)
        return Delivery.grouped(rows_RD, counts_N), (routing, how[1:], map_ET, order, shape, x.shape)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        routing, how, map_ET, order, shape, lead = handle
        y_TD: Tensor = self._library.tokens_post_all2all(
            rows, routing.weights_TK, routing.ids_TK, self._experts, *how, map_ET, order, shape, self._group
        )
        return y_TD.reshape(lead)


class _Function(nn.Module):
    """SwiGLU experts, as the parameters of the function that a layer calls between the halves of its exchange."""

    def __init__(self, function: Any, config: Config, held: int, device: torch.device) -> None:
        super().__init__()
        self._function, self._limit = function, config.activation.limit
        in_NFD, out_NDF = (held, config.ffn, config.hidden), (held, config.hidden, config.ffn)
        for name, shape in (("gate", in_NFD), ("up", in_NFD), ("down", out_NDF)):
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=config.dtype, device=device)))

    def forward(self, rows_RD: Tensor, cumsum_N: Tensor) -> Tensor:
        out_RD: Tensor = self._function.apply(rows_RD, cumsum_N, self.gate, self.up, self.down, self._limit)
        return out_RD


class _Experts:
    """Experts in FSDP2, with the divisor that the library gives it."""

    def __init__(self, config: Config, topology: Topology, library: Any, device: torch.device) -> None:
        held, index = config.experts // topology.sizes["ep"], topology.ranks("ep").index(topology.rank)
        self._held, self._function = range(index * held, (index + 1) * held), library.EPGroupGemm
        module = _Function(self._function, config, held, device)
        mesh = DeviceMesh.from_group(topology.group("edp"), device.type)
        self._module: Any = fully_shard(module, mesh=mesh, reshard_after_forward=True)  # as of a module within a model
        self._module.set_gradient_divide_factor(float(topology.sizes["world"]))

    @property
    def resolved(self) -> Mapping[str, str]:
        return {"experts": self._function.__qualname__, "stand-ins": "group_gemm_same_nk, group_gemm_same_mn"}

    def __call__(self, delivery: Delivery) -> Tensor:
        assert delivery.counts_N is not None
        cumsum_N = torch.cumsum(delivery.counts_N, 0).to(delivery.rows_RD.device)
        out_RD: Tensor = self._module(delivery.rows_RD, cumsum_N)
        return out_RD

    def named(self, read: Read) -> Iterator[Named]:
        for name in ("gate", "up", "down"):
            for expert, view in zip(self._held, read(local(getattr(self._module, name))), strict=True):
                yield Named(name, expert, view)
