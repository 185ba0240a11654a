"""EXCH: wrong input, which is refused where it is detected and leaves no rank waiting."""

from __future__ import annotations

from moe_conformance.judging.observed.script import judge_arguments
from moe_conformance.judging.shared.exchange.misuse import (
    judge_wrong_answers,
    judge_wrong_input,
    wrong_answers,
    wrong_input,
)
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import ON_EXCHANGE


class TestWrongUse:
    test_wrong_input_is_refused_by_every_rank = Row("EXCH-44", ON_EXCHANGE, judge_wrong_input, when=wrong_input)
    """Input that cannot be routed raises on every rank of the exchange group, and the next step works."""

    test_answers_that_do_not_fit_are_refused = Row("EXCH-45", ON_EXCHANGE, judge_wrong_answers, when=wrong_answers)
    """A combine with another dispatch's handle, or another width, raises on its rank, and no other rank waits."""

    test_what_is_wrong_is_not_put_right_in_place = Row("EXCH-08", ON_EXCHANGE, judge_arguments)
    """Arguments of a step that is refused hold the bytes that were given."""
