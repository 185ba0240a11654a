"""An adapter for moe-conformance: a router. my_router_library.py is the example; adapt yours."""

from __future__ import annotations

import my_router_library  # if that takes seconds: inside the methods instead, and named in Backend.preload
import torch.distributed as dist

from moe_conformance.contract import Claims, Named, Routed, Routing, Session, refusals


class MyRouter:  # what a session builds, on every rank
    def __init__(self, config):
        routing = config.routing
        sizes = config.hidden, config.experts, config.top_k
        options = {"score": routing.score, "normalise": routing.normalise, "scale": routing.scale}
        with refusals(ValueError, match="no score|of .* experts"):  # what the library itself refuses: proved
            self.router = my_router_library.Router(*sizes, **options, dtype=config.dtype)
        self.experts = config.experts
        self.resolved = {"router": type(self.router).__name__}  # for display: what was really built
        self.claims = Claims(dtype=self.router.wide)  # of logits and scores, where it is not that of x

    def __call__(self, x):  # x: (..., D) of this rank
        ids, weights, logits = self.router(x)
        return Routed(Routing(ids, weights, self.experts), logits)  # ids, weights: (T, K); logits: (T, E)

    def named(self, read):  # views of the parameters, which the suite sets, and of their gradients, which it reads
        yield Named("router", None, read(self.router.weight))  # (E, D)


class MySession(Session):  # one layout of ranks; a surface that is not here is reported as not adapted
    def __init__(self, topology):
        self.topology = topology

    def router(self, config):
        config.only(  # what is mapped; any other option is refused, never ignored
            "experts", "top_k", "hidden", "dtype", "routing.score", "routing.normalise", "routing.scale"
        )
        return MyRouter(config)

    def finish_gradients(self, *built):  # what your trainer does after the last backward: here, sums over all copies
        for surface in built:
            for parameter in surface.router.parameters():
                if parameter.grad is not None:
                    for group in ("dp_cp", "tp"):
                        dist.all_reduce(parameter.grad, group=self.topology.group(group))


class Backend:  # moe-conformance run --backend my_adapter:Backend
    name, variants = "mine", ("default",)
    single_rank = True  # there is no exchange, so that no run has to judge expert parallelism

    def versions(self):  # what the results depend on
        return {"my-library": my_router_library.__version__}

    def limits(self, variant):  # what must not be tried; see moe_conformance/contract/limits.py
        return ()

    def open(self, topology, device):  # on every rank, once for each layout
        return MySession(topology)
