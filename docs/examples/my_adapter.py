"""The adapter of README: all that it takes to test the exchange of a library."""

from __future__ import annotations

import my_library

from moe_conformance.contract import Delivery, Limit, Session, Unsupported


class MyExchange:  # dispatch and combine of a library
    def __init__(self, config, topology):
        self.dispatcher = my_library.Dispatcher(config.experts, topology.group("ep"))
        self.local_experts = tuple(self.dispatcher.expert_ids)
        self.resolved = {"dispatcher": type(self.dispatcher).__name__}

    def dispatch(self, x, routing):
        rows, counts, handle = self.dispatcher.dispatch(x, routing.ids_TK, routing.weights_TK)
        return Delivery.grouped(rows, counts), handle  # what reached this rank, as the library lays it out

    def combine(self, rows, handle):
        return self.dispatcher.combine(rows, handle)


class MySession(Session):
    def __init__(self, topology):
        self.topology = topology

    def exchange(self, config):
        config.only("experts", "top_k", "hidden", "dtype")  # anything else is refused, never ignored
        if self.topology.sizes["etp"] > 1 or config.experts < 1 or config.experts % self.topology.sizes["ep"]:
            raise Unsupported("experts lie whole on one rank each, as many on every rank")
        return MyExchange(config, self.topology)


class Backend:
    name, variants = "mine", ("default",)

    def versions(self):
        return {"my-library": my_library.__version__}

    def limits(self, variant):  # what must not be tried: here, invalid input on one rank
        return (Limit("wrong_use", (False,), "one rank raises, the others wait", proof="undefined"),)

    def open(self, topology, device):
        return MySession(topology)
