"""VeOmni 0.1: the all-to-all of its MoE layers, around given experts.

What the library does, as read in its code and observed here. One row travels for each routed pair; the rows of a rank's
experts are sorted by expert; weights are applied in the combine, which adds up in float32. Experts run as Triton
kernels, which have no CPU target, so that they are not adapted. Importing the package imports models of one version of
transformers: its folders are imported here without what they run first.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.library import Library
from moe_conformance.contract import Config, Delivery, Limit, Routing, Session, Topology, Unsupported

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
            Limit("dtype", (torch.float32,), cast, proof="undefined"),
            Limit("duplicate_experts", (False,), of_map, proof="undefined"),
            Limit("dropped_slots", (False,), "one_hot takes no id of -1", proof="undefined"),
            Limit("wrong_use", (False,), trust, proof="undefined"),
        )

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Import the library, and open a session."""
        self.versions()
        return _Session(topology, _imported(self.library, device))


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
    if device.type == "cpu":  # gloo gathers into a flat buffer what is flat
        library.dist = _FlatGather("torch.distributed")
    return library


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
    def __init__(self, topology: Topology, library: Any) -> None:
        self._topology, self._library = topology, library

    def exchange(self, config: Config) -> _Exchange:
        """Build the exchange of this rank's ep group; it takes any T, also packed."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "padding.packed", "sharding")
        sizes = self._topology.sizes
        if sizes["etp"] > 1:
            raise Unsupported(f"etp = {sizes['etp']}: experts are never split")
        if config.experts < 1 or config.experts % sizes["ep"]:
            raise Unsupported(f"every rank holds the same number of experts: {config.experts} on ep = {sizes['ep']}")
        if config.dtype == torch.float64:
            raise Unsupported("outputs of experts are added up in float32: not float64")
        return _Exchange(config.experts, self._topology, self._library)


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
