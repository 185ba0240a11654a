"""What a backend warns of, by `warnings` and by `logging`, is heard while its settings are resolved."""

from __future__ import annotations

import logging
import warnings

from moe_conformance.scenarios.sessions import recorded


class TestRecorded:
    def test_both_ways_to_warn_are_heard(self) -> None:
        """A warning and a message of level WARNING, and none of level INFO."""
        with recorded() as said:
            logging.getLogger("a_library").warning("switched off")
            logging.getLogger("a_library").info("switched on")
            warnings.warn("not there", stacklevel=1)
        assert ["switched off", "not there"] == list(said)

    def test_a_logger_that_hands_nothing_on_is_heard_once(self) -> None:
        """DeepSpeed's is one; afterwards it has its own handlers alone."""
        logger = logging.getLogger("a_library.of_its_own")
        logger.propagate, own = False, list(logger.handlers)
        with recorded() as said:
            logger.warning("not installed")
        assert ["not installed"] == list(said)
        assert own == logger.handlers
