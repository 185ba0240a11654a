"""`Limit`: what a backend declares must not be run. Import it from `contract`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SURFACES_BY_DESIGN = (
    "exchange",
    "experts",
    "layer",
)  # the surfaces that lie on ranks by ep and etp: methods of `Session`
OF_LAYOUTS = ("spread_experts", "sharded_experts")  # what a limit may be on for all of a layout


@dataclass(frozen=True)
class Limit:
    """A declared limit of a backend: a case outside of `allowed` is not run, and the report says why.

    The values of `on`, and for each the value of a case that has to be in `allowed`:

    * `dtype`, `device`: of the tokens; "cpu" or "cuda".
    * `spread_experts`, `sharded_experts`: whether ep > 1; whether etp > 1.
    * `tokens`: the T of each rank and microbatch, all of which have to be allowed; `range(0, 1 << 20, 8)` allows the
      multiples of 8.
    * `uneven_tokens`: whether ranks have different T. It does not cover `Config.padding.packed`: an exchange that needs
      equal T has to refuse that while it is built.
    * `uneven_tp_tokens`: whether the ranks of a tp group have different T, in a layer with shared experts.
    * `zero_tokens`: whether some rank has T = 0. `token_dims`: number of dimensions before D.
    * `duplicate_experts`: whether an expert occurs twice in a token. `dropped_slots`: whether slots are empty.
    * `zero_weights`, `negative_weights`: whether a routed slot has such a weight, which a dense map of weights may take
      for an empty slot (weight != 0, weight > 0).
    * `in_flight`: number of microbatches between forward and backward. `halves_in_flight`: between dispatch and
      combine.
    * `steps`: how often the gradients of the same modules are finished; between two steps the suite sets them to None,
      or to zero in place.
    * `recomputed`: whether forwards run again in the backward, by `Session.recompute`.
    * `deterministic`: whether it runs under `torch.use_deterministic_algorithms`, set before the session is opened.
    * `wrong_use`: whether there is invalid input on one rank, for which the other ranks may wait for ever, or expert
      outputs that do not fit the handle of a combine, on any rank. Input that violates the config (more tokens than
      `padding.bound`, or `token_copies` that differ) is not covered by it.

    `proof="refused"`: outside of it the library raises on every rank, while it is built or in the step; the suite tries
    it and checks that.
    `proof="undefined"`: outside of it the library may hang or corrupt the device; not run, reported as unproved, and a
    failure with --strict. All of ep > 1 cannot be excluded so.
    `proof="design"`: of `spread_experts` and `sharded_experts` alone: by design the library has nothing there to adapt,
    such as an exchange on one rank, or shards of an expert. Then exchange, experts and layer are not run on these
    layouts, and are reported as not applicable by design, with the reason, in one line. Routers and others are run.

    Raises:
        ValueError: `proof` is none of these, or "design" for another `on`.
    """

    on: Literal[
        "dtype", "device", "spread_experts", "sharded_experts", "tokens", "uneven_tokens", "zero_tokens", "token_dims",
        "uneven_tp_tokens", "duplicate_experts", "zero_weights", "negative_weights", "dropped_slots", "in_flight",
        "halves_in_flight", "steps", "recomputed", "deterministic", "wrong_use",
    ]  # fmt: skip
    allowed: tuple[Any, ...] | range  # values of the case that may run, e.g. (torch.float32,) or (False,)
    reason: str  # quoted or derived from the library's own documentation or code
    proof: Literal["refused", "undefined", "design"] = "refused"

    def __post_init__(self) -> None:
        """Raise ValueError for a proof that there is not, or not of this limit."""
        if self.proof not in ("refused", "undefined", "design"):
            raise ValueError(f"Limit.proof is {self.proof!r}; allowed: 'refused', 'undefined', 'design'")
        if self.proof == "design" and self.on not in OF_LAYOUTS:
            of = f"a limit on {self.on} is proof = 'refused' or 'undefined'"
            raise ValueError(f"Limit.proof is 'design', which is for {' and '.join(OF_LAYOUTS)} alone; {of}")

    def allows(self, value: Any) -> bool:
        """Return whether a case with this value may run."""
        return all(T in self.allowed for T in value) if self.on == "tokens" else value in self.allowed
