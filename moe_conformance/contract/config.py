"""`Config`: the options with which a backend builds its surfaces. Import it from `contract`.

Options of the exchange, experts and routers are defined here. The surface.py of a chapter of the spec may define a
further section of options: `config.capacity` is the section of the chapter `capacity`. docs/glossary.md lists the
option of Megatron-Core, torchtitan, transformers and DeepSpeed for each. Letters are those of `contract`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from moe_conformance.contract.assembled import Sections
from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.values import check


@dataclass(frozen=True)
class Config(Sections):
    """The options of a surface, the same for every backend.

    A value that its annotation does not allow raises ValueError.

    Every builder of an adapter starts with `config.only(...)`, which refuses options that the adapter does not map: if
    it ignored one, the report would state something that was not tested. Options have names: "top_k"; "capacity.factor"
    is an option of a section, and "capacity" the whole section.
    """

    variant: str = "default"  # one of `Backend.variants`: "alltoall", "allgather", "local", ...; every surface maps it
    experts: int = 8  # E; 0 is refused by the backend
    top_k: int = 2  # K
    hidden: int = 32  # D
    ffn: int = 16  # F
    dtype: torch.dtype = torch.float32
    weights_applied: Literal["native", "input", "output"] = "native"  # routing weights; native: as the backend does
    expert_biases: Literal["none", "output", "all"] = "none"  # of routed experts, behind down; all: gate and up as well
    # How experts are sharded over their replicas (edp). own: as the backend does it; gradients: every replica keeps a
    # part of each finished gradient; parameters: it keeps a part of each parameter, and gathers all of it for a pass.
    sharding: Literal["own", "gradients", "parameters"] = "own"
    gate_bias: bool = False  # the logits of a router are x W^T + c, with c (E,) a parameter as W is
    router_dtype: torch.dtype | None = None  # in which a router computes logits, scores and weights; None: its choice
    jitter: float = 0.0  # in training the input of a router is multiplied by factors between 1 - jitter and 1 + jitter
    token_copies: bool = False  # tp > 1 without sequence parallelism: the tp ranks hold the same tokens, counted once
    wire: Literal["plain", "float8"] = "plain"  # float8: fp8 dispatch, hidden states are sent in eight bits with scales
    extra: tuple[tuple[str, Any], ...] = ()  # options of one backend, under the library's own names

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        check(self, experts=0, top_k=1, hidden=1, ffn=1, jitter=0)

    def options(self) -> dict[str, Any]:
        """Return the value of every option by its name: first those outside of sections, then section by section."""
        found: dict[str, Any] = {}
        for field in sorted(fields(self), key=lambda item: is_dataclass(item.default)):
            value = getattr(self, field.name)
            if is_dataclass(value):
                found |= {f"{field.name}.{inner.name}": getattr(value, inner.name) for inner in fields(value)}
            else:
                found[field.name] = value
        return found

    def _refuse_unknown(self, names: Iterable[str]) -> None:
        known = {*_default_options(), *(field.name for field in fields(self))}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"Config has no option {', '.join(map(repr, unknown))}")

    def only(self, *mapped: str) -> Config:
        """Return the config itself, or raise `Unsupported` if an option outside `mapped` differs from its default.

        `variant` is an option like the others: a surface of a backend whose `variants` are not ("default",) maps it.

        Raises:
            ValueError: a name in `mapped` is no option and no section.
        """
        self._refuse_unknown(mapped)
        default = _default_options()
        changed = {name: value for name, value in self.options().items() if value != default[name]}
        odd = [name for name in changed if not {name, name.partition(".")[0]} & {*mapped}]
        if odd:
            what = ", ".join(f"{name}={changed[name]!r}" for name in odd)
            raise Unsupported(f"this adapter does not map {what}{_VARIANT if 'variant' in odd else ''}")
        return self

    def changed(self, options: Mapping[str, Any]) -> Config:
        """Return a copy of the config in which the given options or sections, by name, have other values.

        >>> Config().changed({"top_k": 1, "capacity.factor": 1.5}).capacity
        Capacity(factor=1.5, minimum=0, drop_policy='weights', padded=False)

        Raises:
            ValueError: a name is no option and no section, a section is given as well as an option of it, or a value is
                not allowed.
        """
        whole: dict[str, Any] = {}
        self._refuse_unknown(options)
        for name, value in options.items():
            section, _, option = name.partition(".")
            if option and section in options:
                raise ValueError(f"{section} and {name} are both given")
            before = whole.get(section, getattr(self, section))
            whole[section] = replace(before, **{option: value}) if option else value
        return replace(self, **whole)


_VARIANT = "; it is a name of Backend.variants: map it too, config.only('variant', ...), in every surface"


@cache
def _default_options() -> dict[str, Any]:
    return Config().options()
