"""The layouts of a profile, and further layouts on which it runs a few workloads only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from moe_conformance.contract.topology import Layout

Profile = Literal["quick", "full"]

# On more ranks than this only a part of the workloads runs: recipes that are `wide` and the golden, but no routers,
# which do not depend on other ranks. They include all phases and dtypes, ranks without tokens, uneven, padded and
# bounded tokens, several in flight, empty slots, two dimensions, and the backend's experts.
USUAL_RANKS = 6


def quick_layouts() -> tuple[Layout, ...]:
    """Return the layouts of the quick profile, smallest first."""
    return (
        Layout(1),
        Layout(2, ep=2),
        Layout(4, ep=4),
        Layout(4, ep=2),  # two replicas of every expert
        Layout(4, tp=2, ep=2),
        Layout(4, ep=2, etp=2),
    )


def sampled_layouts() -> tuple[Layout, ...]:
    """Return the quick layouts for variants in `Backend.sampled`, which share most of their code with others.

    One rank is among them: if nothing is sent, an exchange may take another path, which its variants do not share.
    """
    return (Layout(1), Layout(2, ep=2), Layout(4, ep=2, etp=2))


def full_layouts() -> tuple[Layout, ...]:
    """Return the layouts of the full profile: quick ones, foldings with crossing axes, sizes that are no power of two.

    Layouts of 8 ranks have what 4 ranks have no room for: replicas together with ep and etp, and all axes at once.
    """
    return (
        *quick_layouts(),
        Layout(2),
        Layout(2, tp=2),
        Layout(2, etp=2),
        Layout(2, tp=2, etp=2),
        Layout(4, tp=2, ep=4),
        Layout(4, tp=4, ep=2),
        Layout(4, tp=2, ep=2, etp=2),
        Layout(4, tp=4),
        Layout(4, etp=4),
        Layout(4, tp=4, etp=4),
        Layout(4, tp=4, ep=2, etp=2),
        Layout(3, ep=3),
        Layout(4, cp=2, ep=2),
        Layout(4, pp=2, ep=2),
        Layout(6, ep=3, etp=2),
        Layout(8, ep=8),
        Layout(8, ep=4, etp=2),
        Layout(8, tp=2, ep=4),  # two replicas of every expert
        Layout(8, tp=2, ep=2, etp=2),
        Layout(8, tp=4, ep=2, etp=2),
        Layout(8, tp=2, cp=2, pp=2, ep=2, etp=2),
    )


_LIKENED = (Layout(1), Layout(2, ep=2), Layout(4, ep=2), Layout(4, ep=2, etp=2))


def likened_layouts(profile: Profile) -> tuple[Layout, ...]:
    """Return the layouts on which twins are compared: in the quick profile, one of each kind of exchange."""
    return _LIKENED if profile == "quick" else full_layouts()


def beside(profile: Profile) -> dict[Layout, tuple[str, ...]]:
    """Return further layouts of a profile, with the few workloads that run there and need such a layout.

    Padding of packed sequences whose rows are split over context ranks; experts that are sharded and replicated, and
    that have replicas where dense parameters have none over dp;
    layers, copies, routers, losses and forced biases where two groups, such as tp and ep, or dp and dp x cp, have the
    same ranks on all quick layouts; balance biases and load meters over several pipeline stages.
    """
    losses = ("losses-auxiliary", "losses-z", "losses-uneven", "losses-per-token")
    some = {
        Layout(4, cp=2, ep=2): ("gaps-uneven", "own-even", "route-softmax", "shared-even", *losses),
        Layout(4, tp=2, cp=2): ("losses-sequence", "losses-global", "losses-uneven", "bias-microbatches"),
        Layout(4, etp=2): ("own-even", "own-sharded-gradients"),
        Layout(2, tp=2): ("own-even",),
        Layout(4, pp=2, ep=2): (
            "bias-microbatches",
            "load-idle-stage",
            "load-schedules",
            "load-steps",
            "load-uneven-ranks",
        ),
        Layout(4, tp=2, ep=4): ("shared-even", "copies-even", "forced-bias-alone"),
    }
    return {layout: names for layout, names in some.items() if layout not in layouts(profile)}


def layouts(profile: Profile) -> tuple[Layout, ...]:
    """Return the layouts of a profile."""
    return quick_layouts() if profile == "quick" else full_layouts()


def too_large(layout: Layout, ranks: int) -> str | None:
    """Return why a layout is not applicable to that many ranks, or None."""
    if layout.problem:
        return layout.problem
    if layout.world > ranks:
        return f"{layout.name} is a layout of {layout.world} ranks, and --ranks is {ranks}"
    return None


def fitting(layouts: Sequence[Layout], ranks: int) -> list[Layout]:
    """Return the layouts that are applicable to that many ranks."""
    return [layout for layout in layouts if too_large(layout, ranks) is None]
