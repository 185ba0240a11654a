"""Parameters of a new model, read before anything is written into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_conformance.contract import Claims, Config, Parametrised
from moe_conformance.engine import RankContext
from moe_conformance.scenarios import state
from moe_conformance.scenarios.reported import claims_of
from moe_conformance.scenarios.sessions import Opened, build

_SEED = 20_000  # of all generators on every rank, where a model is new


@dataclass(frozen=True)
class Initial:
    """One parameter, or a shard of it: (dim, index, of)."""

    name: str
    expert: int | None
    shard: tuple[int, int, int] | None
    value: Tensor


@dataclass(frozen=True)
class Initials:
    """All parameters of a surface, buffers included, as `named` yields them."""

    parameters: tuple[Initial, ...]


class InitialSurface:
    """A surface whose parameters are read."""

    def __init__(self, surface: Parametrised) -> None:
        """Keep what was built."""
        self.surface = surface

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the surface reports of itself."""
        shown: Mapping[str, str] = getattr(self.surface, "resolved", {})
        return shown

    @property
    def claims(self) -> Claims:
        """What the surface claims."""
        return claims_of(self.surface)

    def read(self) -> Initials:
        """Return copies of all parameters."""
        windows = self.surface.named(lambda parameter: parameter.detach())
        return Initials(
            tuple(Initial(each.name, each.expert, each.shard, each.view.to("cpu", copy=True)) for each in windows)
        )


def built_new(kept: Opened, method: str, config: Config, context: RankContext) -> InitialSurface:
    """Build a surface by its method of Session, behind one seed of all generators on every rank."""
    with state.seeded(_SEED, context.device):
        return InitialSurface(build(kept.session, method, config))
