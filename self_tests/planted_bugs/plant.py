"""What a planted bug is, and how native is made to carry it.

A plant is written as the class that it changes, with one method overridden and the mechanism for a docstring:

    @planted(Expectation("EXCH-05", "even", "combine", "the weight was not applied"))
    class Unweighted(AllToAllExchange):
        def _weigh(self, rows_PD, weights_P):
            return rows_PD

`Unweighted` is a `Plant` then. Its name is `unweighted` and its backend native with that class in place of its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.dispatch_layout import DispatchLayout
from moe_conformance.backends.native.exchange import AllGatherExchange, AllToAllExchange, LocalExchange
from moe_conformance.backends.native.experts import Experts
from moe_conformance.backends.native.float8 import Float8Wire
from moe_conformance.backends.native.forcing import ForcedRouter
from moe_conformance.backends.native.gradients import GradientFinisher
from moe_conformance.backends.native.layer import Layer
from moe_conformance.backends.native.low_latency import LowLatencyExchange
from moe_conformance.backends.native.managers import DeepEPManager, HybridEPManager, NCCLEPManager
from moe_conformance.backends.native.packing import Packing
from moe_conformance.backends.native.padding import PaddedExchange, TokenPadding
from moe_conformance.backends.native.reordering import Reordering
from moe_conformance.backends.native.reusable import ReusableExchange
from moe_conformance.backends.native.routing import Router
from moe_conformance.backends.native.routing_forms import RoutingForms
from moe_conformance.backends.native.row_index import RowIndex
from moe_conformance.backends.native.rows import Permutation
from moe_conformance.backends.native.shared_experts import SharedExperts
from moe_conformance.backends.native.token_copies import TokenCopies
from moe_conformance.backends.native.token_exchange import TokenExchange
from moe_conformance.backends.native.transport import Transport
from moe_conformance.topology import Layout

SINGLE = Layout(1)
EP2 = Layout(2, ep=2)
EP2_EDP2 = Layout(4, ep=2)
TP2_EP2 = Layout(4, tp=2, ep=2)
EP2_ETP2 = Layout(4, ep=2, etp=2)

# What a session builds, and the attribute that names the class of it; a class before its bases.
_ATTRIBUTES = {
    LowLatencyExchange: "lowlatency_class",
    AllToAllExchange: "alltoall_class",
    AllGatherExchange: "allgather_class",
    LocalExchange: "local_class",
    DeepEPManager: "deepep_class",
    HybridEPManager: "hybridep_class",
    NCCLEPManager: "ncclep_class",
    TokenExchange: "token_exchange_class",
    ReusableExchange: "reusable_class",
    Float8Wire: "float8_class",
    TokenPadding: "padding_class",
    PaddedExchange: "padded_class",
    TokenCopies: "copies_class",
    Packing: "packing_class",
    Experts: "experts_class",
    ForcedRouter: "forced_router_class",
    Router: "router_class",
    Layer: "layer_class",
    SharedExperts: "shared_class",
    GradientFinisher: "finisher_class",
    Permutation: "permutation_class",
    Reordering: "reordering_class",
    RowIndex: "row_index_class",
    RoutingForms: "routing_forms_class",
    DispatchLayout: "dispatch_layout_class",
    Transport: "transport_class",
}
_VARIANTS = {  # all others show behind "alltoall"
    "allgather_class": "allgather",
    "local_class": "local",
    "lowlatency_class": "lowlatency",
    "deepep_class": "deepep",
    "hybridep_class": "hybridep",
    "ncclep_class": "ncclep",
    "token_exchange_class": "deepep",
}


@dataclass(frozen=True, init=False)
class Expectation:
    """A requirement that must be found broken on a workload of the quick corpus, at a stage, in words.

    The workload is empty where nothing runs: groups are only asked for.
    """

    requirement: str
    workload: str
    stage: str
    words: tuple[str, ...]

    def __init__(self, requirement: str, workload: str, stage: str, *words: str) -> None:
        """Expect all the words in the sentence."""
        for name, value in (("requirement", requirement), ("workload", workload), ("stage", stage), ("words", words)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Plant:
    """A small, named change to the native backend."""

    name: str  # kebab-case
    mechanism: str
    real: str  # the dated bug whose mechanism it re-creates; empty where it is only of a known class
    expects: tuple[Expectation, ...]
    variant: str
    layout: Layout
    backend: str  # dotted path of `native`
    native: type[Native]


def planted(
    *expects: Expectation, real: str = "", layout: Layout = EP2, also: Mapping[str, Any] | None = None
) -> Callable[[type], Plant]:
    """Make a plant of a subclass of `Native` or of anything that its session builds.

    `also` are further attributes of the session, for a bug that takes two classes.
    """

    def plant(bug: type) -> Plant:
        name = re.sub(r"(?<=.)(?=[A-Z])", "-", bug.__name__).lower()
        attribute = next((attribute for base, attribute in _ATTRIBUTES.items() if issubclass(bug, base)), None)
        if attribute is None:
            native = bug
        else:
            session = type("PlantedSession", (NativeSession,), {attribute: bug, **(also or {})})
            native = type("PlantedNative", (Native,), {"name": f"native-{name}", "session_class": session})
        return Plant(
            name=name,
            mechanism=" ".join((inspect.getdoc(bug) or "").split()),
            real=real,
            expects=expects,
            variant=_VARIANTS.get(attribute or "", "alltoall"),
            layout=layout,
            backend=f"{bug.__module__}:{bug.__name__}.native",
            native=native,
        )

    return plant


def collect(names: Mapping[str, object]) -> tuple[Plant, ...]:
    """Return the plants among the names of a module, in order."""
    return tuple(value for value in names.values() if isinstance(value, Plant))
