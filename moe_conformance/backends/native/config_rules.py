"""Settings as native resolves them: what it cannot run is refused, what has no effect is dropped with a warning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.offered import offers
from moe_conformance.contract import Config, OverlappedStep, Settings, Topology, Unsupported, VersionLimit

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession

_OPTIONS: Mapping[str, tuple[str | None, ...]] = {
    "dispatcher": ("alltoall", "allgather", "fused"),
    "kernel": (None, "present", "absent", "freeing"),
    "recompute": ("none", "full", "selective"),
    "recompute_method": (None, "uniform", "block"),
}
_MODULES = {"moe", "layernorm"}
_SCOPES = {"attention", "router", "moe", "mlp"}
# What a step of one layer has; others are of models that native does not build.
_RUN = {"experts", "top_k", "groups", "groups_chosen", "ep", "dtype", "overlap", "shared_experts"}
_RUN |= {"defer_weight_gradients", "accumulate_in_product", "versions"}


class ConfigRules:
    """Checks settings one option after the other, and builds the router that they configure, or a step of one layer."""

    def __init__(
        self,
        config: Config,
        topology: Topology,
        device: torch.device,
        router: Callable[[Config], Any],
        overlapped_step: Callable[[Config], OverlappedStep],
    ) -> None:
        """Keep what builds routers and steps of a config."""
        self.config, self.topology, self.device = config, topology, device
        self.router, self.overlapped_step = router, overlapped_step

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that resolves."""
        return {"rules": type(self).__name__}

    def limits(self, asked: Settings) -> Sequence[VersionLimit]:
        """Return the limits of overlap and of deferral under a graph."""
        needed = []
        if asked.overlap:
            needed.append(("torch", "2.6"))
        if asked.defer_weight_gradients and asked.capture is not None:
            needed.append(("torch", "2.10"))
        found = dict(asked.versions)
        return [VersionLimit(name, least, found.get(name, _installed(name))) for name, least in needed]

    def resolve(self, asked: Settings) -> Settings:
        """Return what runs, or raise `CannotBuild`.

        Implements: RULE-01, RULE-02.
        """
        self.known(asked)
        ran = self.opened(asked)
        if ran.overlap:
            self.overlap_layout(ran)
            self.overlap_exchange(ran)
            self.overlap_recomputation(ran)
            self.overlap_model(ran)
        if ran.defer_weight_gradients:
            self.deferral(ran)
        self.library_versions(ran)
        self.kernel_present(ran)
        return self.built(ran)

    def known(self, asked: Settings) -> None:
        """Refuse options and values that native does not know.

        Implements: RULE-04.
        """
        for option, values in _OPTIONS.items():
            if getattr(asked, option) not in values:
                _refuse(asked, option)
        for option, names in (("recompute_modules", _MODULES), ("capture", _SCOPES)):
            if not set(getattr(asked, option) or ()) <= names:
                _refuse(asked, option)
        if asked.extra:
            raise CannotBuild(f"native has no option {asked.extra[0][0]!r}")

    def opened(self, asked: Settings) -> Settings:
        """Drop what has no effect, with a warning.

        Implements: RULE-03, RULE-15, RULE-23.
        """
        ran = asked
        if asked.overlap_shared and (not asked.shared_experts or asked.overlap):
            reason = "overlap" if asked.shared_experts else "shared_experts = 0"
            warnings.warn(f"overlap_shared is switched off: {reason}", stacklevel=2)
            ran = replace(ran, overlap_shared=False)
        if asked.kernel is not None and asked.dispatcher != "fused":
            warnings.warn(f"kernel is ignored by the dispatcher {asked.dispatcher}: it is None", stacklevel=2)
            ran = replace(ran, kernel=None)
        return ran

    def overlap_layout(self, s: Settings) -> None:
        """Refuse overlap where nothing can be exchanged, or where stages of the pipeline are whole.

        Implements: RULE-06, RULE-07, RULE-10.
        """
        if s.ep < 2:
            _refuse(s, "ep", "overlap")
        if s.experts is None or s.experts < 2:
            _refuse(s, "experts", "overlap")
        if s.pp > 1 and (s.virtual_stages or 1) < 2:
            _refuse(s, "virtual_stages", "overlap with pp > 1")

    def overlap_exchange(self, s: Settings) -> None:
        """Refuse overlap with exchanges that cannot be split, or whose memory is read too late.

        Implements: RULE-08, RULE-09, RULE-18.
        """
        if s.dispatcher == "allgather":
            _refuse(s, "dispatcher", "overlap")
        if s.dtype not in (torch.bfloat16, torch.float16):
            _refuse(s, "dtype", "overlap")
        if s.kernel == "freeing" and s.offload_first_product:
            _refuse(s, "offload_first_product", "overlap with a kernel that frees its input")

    def overlap_recomputation(self, s: Settings) -> None:
        """Refuse overlap with recomputation that contains an exchange.

        Implements: RULE-11, RULE-12, RULE-13, RULE-14.
        """
        if s.recompute == "full":
            _refuse(s, "recompute", "overlap")
        if s.recompute_method is not None:
            _refuse(s, "recompute_method", "overlap")
        if s.recompute_layers is not None:
            _refuse(s, "recompute_layers", "overlap")
        if "moe" in s.recompute_modules:
            _refuse(s, "recompute_modules", "overlap")

    def overlap_model(self, s: Settings) -> None:
        """Refuse overlap with several prediction layers, and with graphs of what is overlapped.

        Implements: RULE-16, RULE-17.
        """
        if (s.prediction_layers or 0) > 1:
            _refuse(s, "prediction_layers", "overlap")
        if _captures(s, "moe", "mlp"):
            _refuse(s, "capture", "overlap")

    def deferral(self, s: Settings) -> None:
        """Refuse deferred weight gradients where nobody would compute them.

        Implements: RULE-20, RULE-21, RULE-22.
        """
        if not s.overlap:
            _refuse(s, "overlap", "defer_weight_gradients")
        shared = s.shared_experts > 0 and not s.overlap_shared and _captures(s, "router")
        if (_captures(s, "attention") or shared) and not s.accumulate_in_product:
            _refuse(s, "accumulate_in_product", "defer_weight_gradients")
        if _captures(s, "attention") and s.attention_bias:
            _refuse(s, "attention_bias", "defer_weight_gradients")

    def library_versions(self, s: Settings) -> None:
        """Refuse what needs a newer library.

        Implements: RULE-19.
        """
        for library, needed, found in self.limits(s):
            if found is None or self.release(found) < self.release(needed):
                raise CannotBuild(f"{library} {needed} is needed; found: {found}")

    def release(self, text: str) -> Any:
        """Return what versions are compared by: their first three numbers."""
        numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[a-z+]", text)[0])]
        return (*numbers, 0, 0, 0)[:3]

    def kernel_present(self, s: Settings) -> None:
        """Refuse a kernel that is absent on any rank, on all of them.

        Implements: RULE-24.
        """
        if s.kernel is not None:
            absent = torch.tensor([float(s.kernel == "absent")], device=self.device)
            dist.all_reduce(absent, group=self.topology.group("world"))
            if absent:
                raise CannotBuild(f"kernel is absent on {int(absent)} of {self.topology.sizes['world']} ranks")

    def built(self, s: Settings) -> Settings:
        """Build the router, and return the settings with what it has.

        Implements: RULE-26, RULE-27.
        """
        return s if s.experts is None else _of(s, self.router_of(s))

    def router_of(self, s: Settings) -> Any:
        """Build the router."""
        groups = self.groups(s)
        if s.top_k < 1:
            _refuse(s, "top_k", "experts")
        return self.router(
            self.config.changed(
                {
                    "experts": s.experts,
                    "top_k": s.top_k,
                    "dtype": s.dtype,
                    "routing.groups": groups,
                    "routing.group_score": "max",
                }
            )
        )

    def step(self, asked: Settings) -> OverlappedStep:
        """Build the step that overlaps, of one layer, with the settings that were accepted."""
        ran = self.resolve(asked)
        self.runs(ran)
        return self.overlapped_step(self.step_config(ran))

    def runs(self, s: Settings) -> None:
        """Say what native does not run: a model around the layer, other exchanges, another ep than the ranks have."""
        other = [f.name for f in fields(s) if f.name not in _RUN and getattr(s, f.name) != f.default]
        if not s.overlap or s.ep != self.topology.sizes["ep"]:
            other.append("overlap" if not s.overlap else "ep")
        if other:
            raise Unsupported(f"native runs no step with {', '.join(f'{name}={getattr(s, name)!r}' for name in other)}")

    def step_config(self, s: Settings) -> Config:
        """Return the config of the step of settings."""
        return self.config.changed(
            {
                "experts": s.experts,
                "top_k": s.top_k,
                "dtype": s.dtype,
                "shared.ffn": (self.config.ffn,) * s.shared_experts,
                "overlap.deferred_weights": s.defer_weight_gradients,
            }
        )

    def build(self, asked: Settings, layers: int) -> list[Any]:
        """Build the routers of that many layers."""
        return [self.router_of(self.resolve(asked)) for _ in range(layers)]

    def change(self, built: list[Any], to: Settings) -> None:
        """Build a router for every layer, with the parameters of the one that it replaces, and only then put them in.

        Implements: RULE-05.
        """
        routers = [self.router_of(self.resolve(to)) for _ in built]
        for old, new in zip(built, routers, strict=True):
            if len(old.router_ED) != len(new.router_ED):
                raise CannotBuild(f"experts = {to.experts} cannot be changed after building")
            new.load_state_dict(old.state_dict())
        built[:] = routers

    def shown(self, built: list[Any]) -> Sequence[Settings]:
        """Return the settings of every layer, the router's from the router."""
        return [_of(Settings(), router) for router in built]

    def groups(self, s: Settings) -> tuple[int, int] | None:
        """Return the groups of a router; refuse one size without the other."""
        if s.groups is None and s.groups_chosen is None:
            return None
        if s.groups is None or s.groups_chosen is None:
            raise CannotBuild(f"groups = {s.groups} and groups_chosen = {s.groups_chosen}: both are needed")
        return s.groups, s.groups_chosen


def _of(s: Settings, router: Any) -> Settings:
    """Return settings with what a router has."""
    number, chosen = router.config.routing.groups or (None, None)
    E, K = len(router.router_ED), router.config.top_k
    return replace(s, experts=E, top_k=K, groups=number, groups_chosen=chosen)


def _captures(s: Settings, *scopes: str) -> bool:
    """Whether a graph has one of the scopes in it; one of no scope has everything."""
    return s.capture is not None and (s.capture == () or bool({*s.capture} & {*scopes}))


def _installed(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _refuse(s: Settings, option: str, other_option: str = "native") -> None:
    raise CannotBuild(f"{option} = {getattr(s, option)!r} does not go with {other_option}")


@offers("config_rules")
def config_rules(session: NativeSession, config: Config) -> ConfigRules:
    """Build what resolves settings."""
    step = partial(session.surface, "overlapped_step")
    return session.use(ConfigRules)(config, session.topology, session.device, session.router, step)
