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

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, LocalExchange
from moe_conformance.backends.native.fused.low_latency import LowLatencyExchange
from moe_conformance.backends.native.fused.managers import DeepEPManager, HybridEPManager, NCCLEPManager
from moe_conformance.backends.native.fused.token_exchange import TokenExchange
from moe_conformance.backends.native.layer.activated_experts import ActivatedExperts
from moe_conformance.backends.native.session import native_class
from moe_conformance.contract.topology import Layout

SINGLE = Layout(1)
EP2 = Layout(2, ep=2)
EP2_EDP2 = Layout(4, ep=2)
TP2_EP2 = Layout(4, tp=2, ep=2)
EP2_ETP2 = Layout(4, ep=2, etp=2)

_VARIANTS: Mapping[type, str] = {  # in which what is built in place of these shows; of all others, "alltoall"
    AllGatherExchange: "allgather",
    LocalExchange: "local",
    LowLatencyExchange: "lowlatency",
    DeepEPManager: "deepep",
    HybridEPManager: "hybridep",
    NCCLEPManager: "ncclep",
    TokenExchange: "deepep",
    ActivatedExperts: "deepep",  # where the experts apply the weights
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
    *expects: Expectation, real: str = "", layout: Layout = EP2, also: tuple[type, ...] = ()
) -> Callable[[type], Plant]:
    """Make a plant of a subclass of `Native` or of any class that its session builds.

    `also` are further such subclasses, for a bug that takes two.
    """

    def plant(bug: type) -> Plant:
        name = re.sub(r"(?<=.)(?=[A-Z])", "-", bug.__name__).lower()
        variant = "alltoall"
        if issubclass(bug, Native):
            native = bug
        else:
            variant = _VARIANTS.get(native_class(bug), variant)
            session = NativeSession.building(bug, *also)
            native = type("PlantedNative", (Native,), {"name": f"native-{name}", "session_class": session})
        return Plant(
            name=name,
            mechanism=" ".join((inspect.getdoc(bug) or "").split()),
            real=real,
            expects=expects,
            variant=variant,
            layout=layout,
            backend=f"{bug.__module__}:{bug.__name__}.native",
            native=native,
        )

    return plant
