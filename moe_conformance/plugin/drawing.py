"""How Hypothesis draws in a run: the same batches every time, so that running twice gives the same verdicts."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

NAME = "moe-conformance"

_EXAMPLES = {"quick": 12, "full": 100, "virtual": 12}


def load_profile(profile: str) -> None:
    """Make the profile the default of this process.

    A fixture lives as long as its item and not as one example: what the examples of an item share, they share on
    purpose. There is no deadline, since the first run on a layout starts its ranks.
    """
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    settings.register_profile(
        NAME,
        max_examples=_EXAMPLES[profile],
        derandomize=True,
        database=None,
        deadline=None,
        phases=phases,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile(NAME)
