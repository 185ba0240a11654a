"""Whether a group stays within one fast transport domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_conformance.backends.native.offered import Offered


class Transport(Offered):
    """Compares the domains of the members, and nothing else.

    Implements: GROUP-05.
    """

    surface = "transport"

    @property
    def resolved(self) -> Mapping[str, str]:
        """What decides."""
        return {"transport": "domains of the members"}

    def is_local(self, members: Sequence[int], domain_of: Sequence[str], visible_devices: int) -> bool:
        """Return whether all members have one domain; the number of devices of this process does not matter."""
        del visible_devices
        return len({domain_of[rank] for rank in members}) == 1
