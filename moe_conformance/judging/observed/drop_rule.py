"""The rule by which a backend drops slots, as it claims, where the requirements allow several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from moe_conformance.contract import Claims, Config
from moe_conformance.reference.capacity import limits
from moe_conformance.reference.capacity.after_drops import after_drop
from moe_conformance.reference.capacity.drops import Policy
from moe_conformance.reference.shared_experts.whole_layer import Drop


@dataclass(frozen=True)
class DropRule:
    """The fields of `Claims` that state which slots are dropped, and what the weights of the others are.

    The claims are verified: a backend that claims a field and does something else fails.
    """

    drop_order: Literal["tokens", "choices"] = "tokens"
    drop_by: Literal["weights", "scores"] = "weights"
    capacity_rounding: Literal["up", "down"] = "up"
    normalised_over: Literal["selected", "kept"] = "selected"

    @classmethod
    def of(cls, claims: Claims) -> DropRule:
        """Return the rule that a backend claims."""
        return cls(**{claim.name: getattr(claims, claim.name) for claim in fields(cls)})

    def policy(self, config: Config) -> Policy:
        """Return the order in which slots are kept."""
        if config.capacity.drop_policy == "weights":
            return "weight"
        return "choice" if self.drop_order == "choices" else "position"

    def capacities(self, config: Config, tokens: int) -> tuple[int, ...]:
        """Return the legal capacities of a rank with `tokens` tokens; see `limits.capacities`."""
        assert config.capacity.factor is not None  # callers have a capacity
        sizes, (factor, minimum) = (
            (tokens, config.top_k, config.experts),
            (config.capacity.factor, config.capacity.minimum),
        )
        return limits.capacities(*sizes, factor=factor, minimum=minimum, rounding=self.capacity_rounding)

    def renormalises(self, config: Config) -> bool:
        """Return whether weights are divided by their sum over the kept slots."""
        return config.routing.normalise and self.normalised_over == "kept"

    def after_drop(self, config: Config) -> Drop:
        """Return the function that changes ids and weights after a drop."""
        return (
            partial(after_drop, renormalise=True, scale=config.routing.scale)
            if self.renormalises(config)
            else after_drop
        )

    def others(self) -> Iterator[tuple[DropRule, str]]:
        """Yield the rules that differ in one field, each with a note for a failure that would be none by that rule."""
        for claim in fields(self):
            (other,) = {*_WORDS[claim.name]} - {getattr(self, claim.name)}
            claims = f"claims {claim.name} = {other!r}"
            if other == claim.default:
                claims = f"does not claim {claim.name} = {getattr(self, claim.name)!r}"
            changed: dict[str, Any] = {claim.name: other}
            yield replace(self, **changed), f"; a backend that {_WORDS[claim.name][other]} by design {claims}"


_WORDS = {
    "drop_order": {"tokens": "keeps the slots of the first tokens", "choices": "keeps first choices first"},
    "drop_by": {"weights": "keeps the highest routing weights", "scores": "keeps the highest scores"},
    "capacity_rounding": {"up": "rounds the capacity up", "down": "rounds the capacity down"},
    "normalised_over": {
        "selected": "normalises weights over all selected slots",
        "kept": "normalises weights over the kept slots",
    },
}
