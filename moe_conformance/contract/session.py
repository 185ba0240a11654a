"""The two classes that an adapter implements, `Backend` and `Session`. Import them from `contract`.

A backend is opened once per topology (`Backend.open`) and returns a `Session`; a session builds *surfaces* (exchange,
experts, router; the surface.py of each chapter has further ones) from a `Config`. An adapter does not cast, reshape,
recount or repair what the library returned, does not decide a verdict, and catches exceptions with `refusals` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moe_conformance.contract.assembled import SessionPart
from moe_conformance.contract.config import Config
from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Exchange, Experts, Parametrised, Router, SplitExchange
from moe_conformance.contract.limits import Limit


class Topology(Protocol):
    """The layout and the groups of this rank. The suite creates it; the adapter reads it."""

    @property
    def rank(self) -> int:
        """Rank in the world."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes by name: world, tp, cp, pp, dp, ep, etp, edp."""

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the world ranks of this rank's group of a name: world, tp, cp, pp, dp, dp_cp, ep, etp, ep_etp, edp."""

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of that name, also of a group of one rank. The suite owns it: do not destroy it."""


class Session(SessionPart):
    """The backend opened for one topology on one rank. At most one session is open in a process.

    Subclass it and override what the backend has: a surface that is not overridden is reported as "not adapted". Most
    backends have those below; the methods of `SessionPart` of every chapter's surface.py are methods of it too. Class
    attributes describe the backend; the suite checks them by observation.
    """

    # Where routing weights are applied by default. An exchange that differs claims `weights_at`, which is read after
    # every forward.
    weights_at: Literal["input", "expert", "combine"] = "combine"
    expert_output_is_partial: bool = False  # with etp > 1: combine adds up the partial sums
    grad_attr: str = "grad"  # attribute of a parameter with its gradient after finish_gradients ("main_grad")
    loss_convention: Literal["sum", "mean_over_dp"] = "sum"  # finish_gradients: sum or mean over dp * cp

    def exchange(self, config: Config) -> Exchange | SplitExchange:
        """Build an exchange; collective. It reads the sections capacity, padding and receive_buffer."""
        raise Unsupported("this backend offers no exchange")

    def experts(self, config: Config) -> Experts:
        """Build the backend's own experts for this rank; collective."""
        raise Unsupported("this backend offers no experts")

    def router(self, config: Config) -> Router:
        """Build a router; collective. It reads the sections routing and capacity."""
        raise Unsupported("this backend offers no router")

    def recompute(self, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `call(*inputs)` under activation recomputation, as the backend's trainer does it: backward repeats it.

        The default is torch's, which restores the default generators; a trainer that restores others overrides it.
        """
        with set_checkpoint_early_stop(False):  # all ranks repeat all collectives, whatever each of them has saved
            result: Tensor = checkpoint(call, *inputs, use_reentrant=False)
            return result

    def finish_gradients(self, *built: Parametrised) -> None:
        """Do what the backend's trainer does to gradients between the last backward and the optimizer step.

        In Megatron-Core this is `finalize_model_grads`. Not called for a step without a backward.
        """
        raise Unsupported("this backend offers no gradient reduction")

    def without_optional(self) -> AbstractContextManager[Sequence[str]]:
        """Return a context in which surfaces are built without optional shortcuts and libraries; it gives their names.

        A built surface lists those that it uses in `resolved["optional"]`, separated by commas, or "none".
        """
        raise Unsupported("this backend names nothing optional that it could be built without")

    def close(self) -> None:  # not abstract: most sessions have nothing to release
        """Release what the session holds (process groups of its own, global state)."""


class Backend(Protocol):
    """An implementation under test. Importing its module must not import the library.

    Optional, without side effects: `groups(sizes) -> Mapping[str, tuple[tuple[int, ...], ...]]`, the rank lists that
    the library would build for sizes world, tp, cp, pp, ep, etp, under the names of `Topology.ranks` (and "expert_pp",
    if the expert groups have pipeline groups of their own); an exception if it refuses the sizes. With `orders:
    tuple[str, ...]`, further orders of axes by the library's names, it is also called as `groups(sizes, order)`.

    Optional: `library_modules: tuple[str, ...]`, modules of the code under test, where these are the adapter's own: a
    file that holds both, say. `single_rank = True`: there is no expert parallelism, and no run has to judge any.

    Optional: `library: Library` of `moe_conformance.backends.library`, for a backend that supports a range of versions:
    `--library PATH` is refused where the library is not in that folder.

    Optional: `sampled: tuple[str, ...]`, variants that share most of what they do with others. The quick profile
    tries them on three layouts; the other profiles leave nothing out.
    """

    name: str
    variants: tuple[str, ...]

    def versions(self) -> Mapping[str, str]:
        """Return the versions that the results depend on.

        Raises:
            Unsupported: the library is missing; the message says what to install.
        """

    def limits(self, variant: str) -> Sequence[Limit]:
        """Return the limits of that variant."""

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session; collective."""
