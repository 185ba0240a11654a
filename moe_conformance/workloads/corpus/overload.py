"""Scripts for the load meter: steps of metered passes, each step a call that reports.

Every rank draws its own tokens, uneven in number; what is in flight at once follows 1F1B, all forwards first, or an
interleaving of two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.surfaces import MeteredPass
from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus.chapter import EP2, EP2_EDP2, EP2_ETP2, SINGLE, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Call, Workload
from moe_conformance.workloads.selection.profiles import Profile

_E, _K, _D = 8, 2, 4
PP2_EP2 = Layout(4, pp=2, ep=2)
_LAYOUTS = (SINGLE, EP2, EP2_EDP2, EP2_ETP2, PP2_EP2)

Passes = tuple[MeteredPass, ...]
Step = Callable[["_Drawn"], Passes]  # the passes of one rank


class _Drawn:
    """What one rank draws: its tokens, and the numbers of the layers of its stage."""

    def __init__(self, name: str, rank: int, layout: Layout) -> None:
        self.generator = draw.generator(f"{name}-{rank}")
        self.rank = rank
        self.stage = next(ranks.index(rank) for ranks in layout.groups()["pp"] if rank in ranks)
        self.layers = (2 * self.stage, 2 * self.stage + 1)

    def ids(self, tokens: int | None = None, *, within: int = _E) -> Tensor:
        """Return distinct experts of every token, all of them below `within`."""
        T = int(torch.randint(1, 12, (), generator=self.generator)) if tokens is None else tokens
        return torch.rand(T, within, generator=self.generator).argsort(1)[:, :_K]

    def forward(self, layer: int | None, microbatch: int, kind: str = "forward", ids_TK: Tensor | None = None,
                padding_T: Tensor | None = None) -> MeteredPass:  # fmt: skip
        """Return a forward, of tokens that lean to the first experts in odd microbatches."""
        ids_TK = self.ids(within=3 if microbatch % 2 else _E) if ids_TK is None else ids_TK
        padding_T = torch.zeros(len(ids_TK), dtype=torch.bool) if padding_T is None else padding_T
        return MeteredPass(kind, layer, microbatch, ids_TK, padding_T)  # type: ignore[arg-type]

    def block(self, microbatch: int) -> tuple[Passes, Passes]:
        """Return the forwards and the backwards of one microbatch through the stage."""
        forwards = tuple(self.forward(layer, microbatch) for layer in self.layers)
        return forwards, tuple(MeteredPass("backward", layer, microbatch) for layer in reversed(self.layers))


def _one(ids: Callable[[_Drawn], Tensor]) -> Step:
    return lambda drawn: (
        drawn.forward(drawn.layers[0], 0, ids_TK=ids(drawn)),
        MeteredPass("backward", drawn.layers[0]),
    )


def _even(drawn: _Drawn) -> Tensor:
    return torch.arange(3 * _E).remainder(_E).reshape(-1, _K)


def _uneven_tokens(drawn: _Drawn) -> Tensor:
    """Return pairs that arrive evenly, of ranks with 12 and 100 tokens."""
    return torch.arange(_K * (100 if drawn.rank % 2 else 12)).remainder(_E).reshape(-1, _K)


def _dropped(drawn: _Drawn) -> Passes:
    ids_TK = drawn.ids(9)
    ids_TK[::3, 0], ids_TK[4] = -1, -1
    return drawn.forward(drawn.layers[0], 0, ids_TK=ids_TK), MeteredPass("backward", drawn.layers[0])


def _forwards_first(drawn: _Drawn) -> Passes:
    blocks = [drawn.block(microbatch) for microbatch in range(3)]
    return (*(each for forwards, _ in blocks for each in forwards), *(each for _, back in blocks for each in back))


def _one_f_one_b(drawn: _Drawn) -> Passes:
    (f0, b0), (f1, b1), (f2, b2) = (drawn.block(microbatch) for microbatch in range(3))
    return (*f0, *f1, *b0, *f2, *b1, *b2)


def _uneven_layers(drawn: _Drawn) -> Passes:
    first, second = drawn.layers
    uses = ((first, 0), (first, 1), (second, 0), (first, 2), (second, 1))
    forwards = tuple(drawn.forward(layer, microbatch) for layer, microbatch in uses)
    return (*forwards, *(MeteredPass("backward", layer, microbatch) for layer, microbatch in reversed(uses)))


def _alone(drawn: _Drawn) -> Passes:
    (f0, b0), (f1, b1) = drawn.block(0), drawn.block(1)
    apart = tuple(drawn.forward(layer, 5, "alone") for layer in drawn.layers)
    return (*f0, *apart, *f1, *b1, *b0)


def _evaluated(drawn: _Drawn) -> Passes:
    (f0, b0), (f1, b1) = drawn.block(0), drawn.block(1)
    apart = tuple(drawn.forward(layer, 7, "evaluation", drawn.ids(11, within=2)) for layer in drawn.layers)
    return (*f0, *apart, *b0, *f1, *b1, *apart)


def _abandoned(drawn: _Drawn) -> Passes:
    lost = [drawn.forward(layer, 9, ids_TK=drawn.ids(11, within=2)) for layer in drawn.layers]
    return (*lost, MeteredPass("backward", drawn.layers[1], 9), MeteredPass("abandon"), *_one_f_one_b(drawn))


def _nothing(drawn: _Drawn) -> Passes:
    return ()


_SCRIPTS: Mapping[str, Sequence[Step]] = {
    "load-entries": (
        _one(_even), _one(lambda drawn: drawn.ids(5, within=2)),
        _one(lambda drawn: drawn.ids(3 + 8 * (drawn.rank % 2))),
        _one(lambda drawn: drawn.ids(6 * (drawn.rank % 2))), _one(lambda drawn: drawn.ids(0)),
    ),
    "load-dropped": (_dropped, _one(lambda drawn: torch.full((3, _K), -1))),
    "load-steps": (_forwards_first, _one_f_one_b, _nothing, _uneven_layers),
    "load-uneven-tokens": (_one(_uneven_tokens),),
    "load-alone": (_alone,),
    "load-evaluation": (_evaluated,),
    "load-abandoned": (_abandoned,),
}  # fmt: skip


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts on small layouts."""
    del profile
    if layout in _LAYOUTS:
        config = Config(variant=variant, experts=_E, top_k=_K, hidden=_D)
        for name, steps in _SCRIPTS.items():
            ranks = [_Drawn(name, rank, layout) for rank in range(layout.world)]
            calls = tuple(
                Call("step", tuple({"passes": step(drawn), "number": 10 + i} for drawn in ranks))
                for i, step in enumerate(steps)
            )
            yield Workload(name, Script("load_meter"), config, layout, (), calls=calls)


CHAPTERS = (Chapter((Script("load_meter"),), tuple(_SCRIPTS), scripts, quick=_LAYOUTS),)
