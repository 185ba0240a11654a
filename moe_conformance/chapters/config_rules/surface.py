"""How a library resolves or refuses the settings of a run: `Settings`, a surface. Import them from `contract`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from moe_conformance.contract.errors import Unsupported

if TYPE_CHECKING:
    from moe_conformance.contract import OverlappedStep
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class Settings:
    """Options of a training run that are resolved without running it; the defaults are valid.

    Values are those of a user, and may be wrong: a backend refuses what it does not know. Ranks and experts that are
    named need not exist. A kernel is one of the kernels of the fused dispatcher, other than its default: "present" one
    that works on this machine, "absent" one that does not, "freeing" one that works and whose overlapped path frees the
    input of the experts' first product.
    """

    experts: int | None = 8  # E; None: a dense model
    top_k: int = 2  # K
    groups: int | None = None  # group-limited routing: number of expert groups
    groups_chosen: int | None = None  # and groups selected
    ep: int = 1
    pp: int = 1
    virtual_stages: int | None = None  # virtual pipeline stages per rank
    dispatcher: str = "alltoall"  # or "allgather", "fused" (Megatron-Core's flex)
    kernel: Literal["present", "absent", "freeing"] | None = None  # None: the documented default
    dtype: torch.dtype = torch.bfloat16
    overlap: bool = False  # overlap the exchange with the computation of another microbatch
    overlap_shared: bool = False  # overlap the exchange with the shared experts
    shared_experts: int = 0
    recompute: str = "none"  # or "full", "selective": activation recomputation
    recompute_method: str | None = None  # "uniform", "block"
    recompute_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()  # with "selective": "moe", "layernorm"
    prediction_layers: int | None = None  # of multi-token prediction
    capture: tuple[str, ...] | None = None  # graph of "attention", "router", "moe", "mlp"; (): everything; None: none
    offload_first_product: bool = False  # the input of the experts' first product is offloaded to the host
    defer_weight_gradients: bool = False
    accumulate_in_product: bool = True  # the weight-gradient product adds to the gradient
    attention_bias: bool = False  # the projections of attention have a bias
    packed: bool = False  # packed sequences: T differs between ranks
    versions: tuple[tuple[str, str], ...] = ()  # versions of libraries that are found, in place of those installed
    extra: tuple[tuple[str, Any], ...] = ()  # further options, under the library's own names


class VersionLimit(NamedTuple):
    """A library that an option needs, in a version of at least `needed`; `found` is None if it is absent."""

    library: str
    needed: str
    found: str | None


class ConfigRules(Protocol):
    """Resolves settings as the library does: by its own validation, and by building what can be built on one rank.

    A refusal is any exception with a message, raised here and not by a later step. It is called alike on all ranks,
    which have the same settings unless a kernel is present on some of them only. `Unsupported` with `by="adapter"` says
    that the library has no such option, or that it cannot be built here.
    """

    def limits(self, asked: Settings) -> Sequence[VersionLimit]:
        """Return the limits on versions that the library documents for the options that are on."""

    def resolve(self, asked: Settings) -> Settings:
        """Return the settings as they will run, read from what was built, in the form in which they were asked for.

        An option that runs with another value than asked is warned of, in each call, by `warnings` or `logging`.
        """

    def build(self, asked: Settings, layers: int) -> Any:
        """Build that many MoE layers, and return what `change` and `shown` need."""

    def change(self, built: Any, to: Settings) -> None:
        """Change the configuration of all layers as the library lets its users or itself do it after building.

        An exception leaves all layers as they were; `Unsupported` where there is no such way.
        """

    def shown(self, built: Any) -> Sequence[Settings]:
        """Return the settings of every layer, read from what it will run."""


class RunRules(ConfigRules, Protocol):
    """Also runs what it accepts. What cannot be run is not judged: that settings are accepted proves nothing."""

    def step(self, asked: Settings) -> OverlappedStep:
        """Build a model of one MoE layer with settings that `resolve` accepted, and the schedule of its step.

        Collective. Hidden sizes are those of the config; a shared expert has the width of a routed one, and no gate.
        The step runs with what `resolve` returned, with overlap or without. `Unsupported` with `by="adapter"` says that
        these settings cannot be run here; any other error is a failure, as is one of the step.
        """


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def config_rules(self, config: Config) -> ConfigRules:
        """Build the object that resolves settings; of `config` the variant and the sizes matter."""
        raise Unsupported("this backend does not tell how it resolves settings")
