"""Judge of configurations that may be refused: by all ranks or by none, and only where the spec allows it."""

from __future__ import annotations

from typing import Literal

from moe_conformance.judging.findings import some
from moe_conformance.judging.observed.script import answers, judge_no_slip
from moe_conformance.judging.verdict import NotOffered, Refused, Tally, WrongForm
from moe_conformance.reference.config_rules.outcomes import outcomes
from moe_conformance.reference.config_rules.rules import Settings
from moe_conformance.scenarios.outcome import Answer, Outcome

# The dispatcher by the claimed wire. Where an adapter gathers all tokens on all ranks, the exchange is an all-gather.
_DISPATCHERS: dict[str, Literal["alltoall", "fused", "allgather"]] = {
    "pairs": "alltoall",
    "tokens": "fused",
    "all": "allgather",
    "copies": "allgather",
    "capacity": "alltoall",
}
_KINDS = {"alltoall": "an all-to-all", "fused": "a fused token exchange", "allgather": "an all-gather"}
_PLAIN, _PACKED = 0, 1  # numbers of the calls


def judge_packed(outcome: Outcome, tally: Tally) -> None:
    """Decide whether an exchange for packed sequences is built on all ranks, or refused on all where allowed.

    What is allowed depends on the wire that the exchange claims without packed sequences.

    Raises:
        NotOffered: it is not built without packed sequences either, or the adapter cannot configure them.
        Refused: all ranks refuse what must be built, or some ranks do.
        WrongForm: it does not claim the same wire on all ranks.
        Raised: building raised an internal error; see `judge_no_slip`.
    """
    plain, packed = answers(outcome, _PLAIN), answers(outcome, _PACKED)
    judge_no_slip(outcome, _PLAIN)
    judge_no_slip(outcome, _PACKED)
    if problem := next((answer for answer in plain if answer.raised), None):
        raise NotOffered(problem.error)
    if all(answer.error_by == "adapter" for answer in packed):
        raise NotOffered(packed[0].error)
    dispatcher = _dispatcher(plain)
    refusing = tuple(rank for rank, answer in enumerate(packed) if answer.raised)
    if refusing:
        where = f"on {some([f'rank {rank}' for rank in refusing])}: {packed[refusing[0]].error!r}"
        if "refused" not in outcomes(Settings(packed=True, dispatcher=dispatcher)):
            must = "refuses packed sequences (T differs between ranks), which it must accept,"
            sentence = f"{_KINDS[dispatcher]} {must} {where}"
            raise Refused("run", sentence, ranks=refusing)
        if len(refusing) < len(packed):
            building = some([f"rank {rank}" for rank in range(len(packed)) if rank not in refusing])
            sentence = f"{_KINDS[dispatcher]} for packed sequences is built on {building} and refused {where}"
            raise Refused("run", sentence, ranks=refusing)
    for rank in range(len(packed)):
        tally.add(pairs=1, rank=rank)


def _dispatcher(built: tuple[Answer, ...]) -> Literal["alltoall", "fused", "allgather"]:
    wires = {answer.claims.wire for answer in built}
    if len(wires) > 1:
        raise WrongForm("run", f"the ranks claim wire = {', '.join(sorted(wires))}; expected the same on all ranks")
    return _DISPATCHERS[wires.pop()]
