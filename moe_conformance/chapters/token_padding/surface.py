"""The padding of token counts and row counts: `Config.padding`, a surface, claims. Import them from `contract`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Resolved
from moe_conformance.contract.values import check

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class Padding:
    """`Config.padding`: how the token counts of ranks and the row counts of experts are padded."""

    # All ranks of the exchange group dispatch equally many tokens, padded by rows with empty slots: the largest T of
    # the group, or a fixed bound that no T may exceed; "no": only if the exchange itself cannot work otherwise.
    tokens: Literal["no", "group_max", "bound"] = "no"
    alignment: int = 1  # the padded number of tokens is a multiple of this
    bound: int | None = None
    packed: bool = False  # packed sequences (THD): T differs between ranks; an exchange that needs equal T refuses it
    row_multiple: int = 1  # the rows of each expert are padded to a multiple of this
    splits: Literal["own", "equal"] = "own"  # equal: every rank sends equally many rows to each other one, zero-padded

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        check(self, "padding.", alignment=1, bound=0, row_multiple=1)


class TokenPadding(Resolved, Protocol):
    """The padded number of tokens of each rank of an exchange (`Config.padding.tokens`), as the exchange computes it.

    It claims `alignment` and `padding`, and so does an exchange that pads.
    """

    def count(self, tokens: int) -> int:
        """Return P, the rows that this rank dispatches for its T tokens; collective over ep_etp, or not at all."""


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def token_padding(self, config: Config) -> TokenPadding:
        """Build the function that returns the padded number of tokens of the exchange of `config`; collective."""
        raise Unsupported("this backend offers no padding of token counts")


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # Token counts are padded to a common number, as `Config.padding.tokens`; also where it is not configured, if the
    # exchange cannot work otherwise (PACK-02, PACK-13).
    padding: Literal["no", "group_max", "bound"] = "no"
    # The padded number of tokens is a multiple of this; needed with `padding` (PACK-02).
    alignment: int | None = None


SECTIONS = {"padding": Padding}
