"""An adapter for moe-conformance: dispatch and combine of a library. my_library.py is the example; adapt yours."""

from __future__ import annotations

import my_library  # a library that takes seconds to import: inside the methods instead, and named in Backend.preload

from moe_conformance.contract import Delivery, Limit, Session, Unsupported


class MyExchange:  # what a session builds, on every rank
    def __init__(self, config, topology):
        self.dispatcher = my_library.Dispatcher(config.experts, topology.group("ep"))
        self.local_experts = tuple(self.dispatcher.expert_ids)  # global ids of this rank's experts, in their order
        self.resolved = {"dispatcher": type(self.dispatcher).__name__}  # for display: what was really built

    def dispatch(self, x, routing):  # x: (..., D) of this rank; routing.ids_TK: -1 is an empty slot
        rows, counts, handle = self.dispatcher.dispatch(x, routing.ids_TK, routing.weights_TK)
        return Delivery.grouped(rows, counts), handle  # rows sorted by local expert; see also Delivery.listed, .batched

    def combine(self, rows, handle):  # rows: the experts' output, laid out as the delivery
        return self.dispatcher.combine(rows, handle)  # y, in the shape of x, the routing weights applied


class MySession(Session):  # one layout of ranks; a surface that is not here is reported as not adapted
    def __init__(self, topology):
        self.topology = topology

    def exchange(self, config):
        config.only("experts", "top_k", "hidden", "dtype")  # what is mapped; any other option is refused, never ignored
        if self.topology.sizes["etp"] > 1 or config.experts < 1 or config.experts % self.topology.sizes["ep"]:
            raise Unsupported("experts lie whole on one rank each, as many on every rank")
        return MyExchange(config, self.topology)


class Backend:  # moe-conformance run --backend my_adapter:Backend
    name, variants = "mine", ("default",)  # variants: of the exchange; config.variant says which one is asked for

    def versions(self):  # what the results depend on
        return {"my-library": my_library.__version__}

    def limits(self, variant):  # what must not be tried: here, invalid input on one rank
        return (Limit("wrong_use", (False,), "one rank raises, the others wait", proof="undefined"),)

    def open(self, topology, device):  # on every rank, once for each layout
        return MySession(topology)
