"""Scripts for a backend's experts: forwards without gradients, and changes of the parameters between them.

All values are multiples of 1/64 with magnitudes below 1, so that every change leads to them exactly, in half precision
too. Forwards without gradients have equally many rows for each expert, for which backends take shortcuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2_EDP2, SINGLE, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.changes import Values, Way
from moe_conformance.workloads.records.runs import ON_CHANGING_EXPERTS
from moe_conformance.workloads.records.workload import Call, Mode, ParameterKey, Stride, Workload
from moe_conformance.workloads.selection.profiles import Profile

_D, _F, _E = 16, 8, 4
MARKER = 97 * 2.0**-27  # in every parameter at first; too small to result from any computation
_NAMES = {"gate": (_F, _D), "up": (_F, _D), "down": (_D, _F)}
_NO_GRAD: tuple[Mode, ...] = ("no_grad",)
_INFERENCE: tuple[Mode, ...] = ("inference_mode",)

_CHANGES: dict[str, tuple[tuple[Way, ...], tuple[Mode, ...]]] = {
    "weights-recorded": (("copy_", "add_", "a step of an optimiser"), _NO_GRAD),
    "weights-loaded": (("load_state_dict",), _NO_GRAD),
    "weights-unrecorded": ((".data.copy_", ".data = a new tensor", "a step of a fused optimiser"), _NO_GRAD),
    "weights-of-inference-mode": (("a write in inference mode", "a write in inference mode"), _INFERENCE),
    "weights-replaced": (("a new Parameter", "to another dtype and back", "to_empty"), _NO_GRAD),
}
_HALF = ("weights-recorded", "weights-replaced")  # in bfloat16 too
_GATHERED = "weights-gathered-again"
_COUNTS: tuple[tuple[int, ...], ...] = (
    *((3, 3, 3, 3), (0, 0, 0, 0), (1, 1, 1, 1)),
    *((2, 4, 3, 3), (4, 2, 3, 3), (3, 3, 2, 4), (12, 0, 0, 0), (0, 0, 0, 4), (3, 3, 3, 4)),
)
_STRIDES: tuple[Stride, ...] = ("rows", "columns", "transposed", "packed")


def _values(experts: int, seed: str) -> dict[ParameterKey, Tensor]:
    g = draw.generator("values", seed)
    return {
        (name, e): torch.randint(-63, 64, shape, generator=g) / 64
        for name, shape in _NAMES.items()
        for e in range(experts)
    }


@dataclass(frozen=True)
class _Scripts:
    """Draws the scripts of one layout and dtype."""

    layout: Layout
    dtype: torch.dtype = torch.float32
    experts: int = _E

    @property
    def held(self) -> int:
        return self.experts // self.layout.ep

    def workload(self, name: str, calls: Sequence[Call], first: Values | None = None) -> Workload:
        config = Config(
            experts=self.experts, top_k=min(2, self.experts), hidden=_D, ffn=_F, dtype=self.dtype
        )  # fmt: skip
        values = {key: value.to(self.dtype) for key, value in (first or _values(self.experts, name)).items()}
        return Workload(name, ON_CHANGING_EXPERTS, config, self.layout, (), calls=tuple(calls), parameters=values)

    def forward(
        self,
        seed: str,
        counts: Sequence[int],
        modes: tuple[Mode, ...] = (),
        *,
        backward: bool = False,
        may_raise: bool = False,
        **more: Any,
    ) -> Call:
        """Return a call of the experts with other rows on every rank; on odd ranks the counts are rotated by one."""
        given, upstream = [], []
        for rank in range(self.layout.world):
            g = draw.generator(seed, rank)
            mine = tuple(counts) if rank % 2 == 0 else (*counts[1:], *counts[:1])
            rows_RD = torch.randn(sum(mine), _D, generator=g).to(self.dtype)
            given.append({"rows_RD": rows_RD, "counts_N": mine, **more})
            upstream.append({"": torch.randn(sum(mine), _D, generator=g).to(self.dtype)})
        differentiable = ("rows_RD",) if backward else ()
        return Call(
            "forward", tuple(given), differentiable, tuple(upstream) if backward else (), may_raise, modes=modes
        )

    def everywhere(self, method: str, **given: Any) -> Call:
        return Call(method, (given,) * self.layout.world)

    def changes(self, name: str, ways: Sequence[Way], modes: tuple[Mode, ...]) -> Workload:
        calls = [self.forward(f"{name} before", (3,) * self.held, modes)]
        for number, way in enumerate(ways):
            values = _values(self.experts, f"{name} {number}")
            calls.append(self.everywhere("change", way=way, values=values))
            calls.append(self.forward(f"{name} {number}", (3,) * self.held, modes))
        return self.workload(name, calls)

    def one_alone(self, name: str) -> Workload:
        """Return the script that changes a single parameter of a single expert, for every name in turn."""
        calls = [self.forward(f"{name} before", (3,) * self.held, _NO_GRAD)]
        for expert, parameter in enumerate(_NAMES):
            key: ParameterKey = (parameter, min(expert, self.experts - 1))
            alone = {key: _values(self.experts, f"{name} {parameter}")[key]}
            calls.append(self.everywhere("change", way="copy_", values=alone))
            calls.append(self.forward(f"{name} {parameter}", (3,) * self.held, _NO_GRAD))
        return self.workload(name, calls)

    def memory(self, name: str) -> Workload:
        """Return the script that counts storages with the first values: at first, after changes, without experts."""
        marked = _values(self.experts, name)
        for value in marked.values():
            value[0, 0] = MARKER
        remains = self.everywhere("remains", marker=MARKER)
        step = (self.forward(f"{name} step", (3,) * self.held, backward=True), self.everywhere("gradients"))
        forwards = (self.forward(f"{name} 0", (3,) * self.held, _NO_GRAD), *step)
        calls = [remains, *forwards, self.forward(f"{name} again", (3,) * self.held, _NO_GRAD)]
        for number, way in enumerate(("copy_", "a new Parameter")):
            values = _values(self.experts, f"{name} {number}") if number == 0 else marked
            calls += [self.everywhere("change", way=way, values=values)]
            calls += [self.forward(f"{name} {way}", (3,) * self.held, _NO_GRAD)]
            calls += [remains] if number == 0 else []
        calls += [self.everywhere("delete"), remains]
        return self.workload(name, calls, marked)

    def gradients(self, name: str) -> Workload:
        """Return the script with backwards before and after forwards without gradients, with equal and other counts."""
        equal, other = (3,) * self.held, (4, 2, *(3,) * self.held)[: self.held]
        calls = []
        for number, counts in enumerate((equal, other)):
            step = (self.forward(f"{name} {number}", counts, backward=True), self.everywhere("gradients"))
            without = [
                self.forward(f"{name} {n}", n, modes)
                for n in (equal, (0,) * self.held)
                for modes in (_NO_GRAD, _INFERENCE)
            ]
            calls += [*step, *without, *step]
        return self.workload(name, calls)

    def gradients_last(self, name: str) -> Workload:
        """Return the script whose first backward follows a forward in inference mode and one under no_grad."""
        counts = (3,) * self.held
        without = [self.forward(f"{name} {modes}", counts, modes) for modes in (_INFERENCE, _NO_GRAD)]
        return self.workload(name, [*without, self.forward(name, counts, backward=True), self.everywhere("gradients")])

    def counts(self, name: str) -> Workload:
        """Return the script that calls the experts in all grad modes with every table of counts."""
        tables = [counts[: self.held] for counts in _COUNTS] if self.experts > 1 else [(5,), (0,), (1,)]
        modes: tuple[tuple[Mode, ...], ...] = ((), _NO_GRAD, _INFERENCE)
        return self.workload(name, [self.forward(f"{name} {c}", c, m) for c in dict.fromkeys(tables) for m in modes])

    def unknown(self, name: str) -> Workload:
        """Return the script that calls the experts with rows that have ids and no counts."""
        tables = ((3, 3, 3, 3), (2, 4, 3, 3), (12, 0, 0, 0), (0, 0, 0, 0))
        known = self.forward(f"{name} first", (3, 3, 3, 3))
        return self.workload(
            name,
            [
                known,
                *(
                    self.forward(f"{name} {c}", c, m, known=False, may_raise=True)
                    for c in tables
                    for m in ((), _NO_GRAD)
                ),
            ],
        )

    def strided(self, name: str) -> Workload:
        """Return the script that calls the experts with rows, and upstream gradients, in every memory layout."""
        counts = (3, 2, 4, 3)
        calls = [self.forward(f"{name} first", counts, backward=True), self.everywhere("gradients")]
        for stride in _STRIDES:
            calls += [
                self.forward(f"{name} {stride}", counts, backward=True, may_raise=True, stride=stride),
                self.everywhere("gradients"),
            ]
            calls += [self.forward(f"{name} {stride} batch", (3, 3, 3, 3), _NO_GRAD, may_raise=True, stride=stride)]
        return self.workload(name, calls)


def changed(
    name: str, ways: Sequence[Way], modes: tuple[Mode, ...], layout: Layout, dtype: torch.dtype, experts: int
) -> Workload:
    """Return the script of forwards in the modes, between which the parameters change in each of the ways."""
    return _Scripts(layout, dtype, experts).changes(name, ways, modes)


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts on one rank, and those that may differ where experts are spread and replicated."""
    del profile
    drawn = _Scripts(layout)
    if layout == SINGLE:
        for name, (ways, modes) in _CHANGES.items():
            yield _of(drawn.changes(name, ways, modes), variant)
            if name in _HALF:
                half = _Scripts(layout, torch.bfloat16).changes(f"{name}-bfloat16", ways, modes)
                yield _of(half, variant)
        yield _of(drawn.one_alone("weights-one-alone"), variant)
        yield _of(drawn.memory("weights-memory"), variant)
        yield _of(drawn.gradients_last("experts-gradients-last"), variant)
        yield _of(_Scripts(layout, experts=1).counts("experts-counts-one"), variant)
        yield _of(drawn.unknown("experts-counts-unknown"), variant)
        yield _of(drawn.strided("experts-strided"), variant)
    if layout in (SINGLE, EP2_EDP2):
        yield _of(drawn.gradients("experts-gradients"), variant)
        yield _of(drawn.counts("experts-counts"), variant)
        yield _of(drawn.changes(_GATHERED, ("gathered again", "gathered again"), _NO_GRAD), variant)


def _of(workload: Workload, variant: str) -> Workload:
    return workload.through(variant)


NAMES = (
    *_CHANGES,
    *(f"{name}-bfloat16" for name in _HALF),
    *("weights-one-alone", "weights-memory", _GATHERED),
    *("experts-gradients", "experts-gradients-last", "experts-counts", "experts-counts-one"),
    *("experts-counts-unknown", "experts-strided"),
)
CHAPTERS = (Chapter((ON_CHANGING_EXPERTS,), NAMES, scripts, variants="every", quick=(SINGLE, EP2_EDP2)),)
