"""An adapter for moe-conformance: a whole MoE layer. my_layer_library.py is the example; adapt yours."""

from __future__ import annotations

import my_layer_library  # if that takes seconds: inside the methods instead, and named in Backend.preload
import torch.distributed as dist

from moe_conformance.contract import Named, Session, Unsupported


class MyLayer:  # what a session builds, on every rank
    def __init__(self, config, topology):
        sizes = config.hidden, config.ffn, config.experts, config.top_k
        normalise = config.routing.normalise
        self.moe = my_layer_library.MoE(*sizes, normalise=normalise, group=topology.group("ep"), dtype=config.dtype)
        self.resolved = {"layer": type(self.moe).__name__}  # for display: what was really built

    def __call__(self, x):  # x: (..., D) of this rank
        return self.moe(x)  # y, in the shape of x

    def named(self, read):  # views of the parameters, which the suite sets, and of their gradients, which it reads
        yield Named("router", None, read(self.moe.router.weight))  # (E, D)
        gate_up, down = read(self.moe.gate_up), read(self.moe.down)  # (N, D, 2 F) and (N, F, D): N experts stacked
        for n, expert in enumerate(self.moe.expert_ids):
            gate, up = gate_up[n].t().chunk(2)  # (F, D) each, views
            yield Named("gate", expert, gate)
            yield Named("up", expert, up)
            yield Named("down", expert, down[n].t())  # (D, F)


class MySession(Session):  # one layout of ranks; a surface that is not here is reported as not adapted
    def __init__(self, topology):
        self.topology = topology

    def layer(self, config):
        config.only(  # what is mapped; any other option is refused, never ignored
            "experts", "top_k", "hidden", "ffn", "dtype", "routing.normalise"
        )
        if self.topology.sizes["etp"] > 1:
            raise Unsupported("experts lie whole on one rank each")
        return MyLayer(config, self.topology)

    def finish_gradients(self, *built):  # what your trainer does after the last backward: here, sums over all copies
        for surface in built:
            for name, parameter in surface.moe.named_parameters():
                if parameter.grad is not None:
                    for group in ("edp",) if name in ("gate_up", "down") else ("dp_cp", "tp"):
                        dist.all_reduce(parameter.grad, group=self.topology.group(group))


class Backend:  # moe-conformance run --backend my_adapter:Backend
    name, variants = "mine", ("default",)

    def versions(self):  # what the results depend on
        return {"my-library": my_layer_library.__version__}

    def limits(self, variant):  # what must not be tried; see moe_conformance/contract/limits.py
        return ()

    def open(self, topology, device):  # on every rank, once for each layout
        return MySession(topology)
