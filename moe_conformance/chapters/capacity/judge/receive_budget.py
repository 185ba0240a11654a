"""Judges of receive buffers of fixed size: the size does not change, and is large enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import NotOffered, WrongForm
from moe_conformance.reference.capacity.receive_budget import worst_case_rows
from moe_conformance.reference.capacity.static_budget import least_budget


@judge(WrongForm, "dispatch")
def judge_fixed_size(reading: Reading) -> Comparisons:
    """Decide whether a rank's receive buffer has one size in all microbatches of equally many tokens.

    Raises:
        WrongForm: two sizes differ.
        NotOffered: the experts are called more than once, so that the buffer is not visible.
    """
    first: dict[int, int] = {}
    for rank, m, rows in _sizes(reading):
        size = first.setdefault(rank, rows)
        sizes = f"{size} rows in microbatch 0 and {rows} in microbatch {m}"
        wrong = f"the receive buffer of rank {rank} has {sizes}; expected one size"
        yield Comparison(rank, wrong if rows != size else "", pairs=1, kind="size")


@judge(WrongForm, "dispatch")
def judge_budget(reading: Reading) -> Comparisons:
    """Decide whether every rank's receive buffer holds its balanced load times the configured factor.

    Where the rows of each expert are padded to a multiple, the padding has to fit too. No buffer needs more than the
    most rows that any routing can send.

    Raises:
        WrongForm: a buffer is smaller.
        NotOffered: the experts are called more than once, so that the buffer is not visible.
    """
    work = reading.outcome.workload
    config, layout = work.config, work.layout
    assert config.receive_buffer.factor is not None
    multiple = reading.claims.multiple
    group_of = {rank: group for group in layout.groups()["ep_etp"] for rank in group}
    for rank, m, rows in _sizes(reading):
        tokens = [len(reading.batches[m][member].x_TD) for member in group_of[rank]]
        held = len(reading.ranks[rank].local_experts)
        sizes = {"ep": layout.ep, "etp": layout.etp, "held": held, "multiple": multiple}
        least = least_budget(tokens, config.top_k, factor=config.receive_buffer.factor, **sizes)
        most = _most_rows(reading, rank, m, tokens, multiple)
        padded = f" with experts padded to multiples of {multiple}" if multiple > 1 else ""
        words = f"{config.receive_buffer.factor:g} times its balanced load is {least}{padded}"
        words += f", and no routing sends more rows than {most}" if most < least else ""
        has = f"the receive buffer of rank {rank} has {rows} rows instead of at least {min(least, most)}"
        wrong = Finding("small", f"{has}: {words}", (rank,))
        yield Comparison(rank, wrong if rows < min(least, most) else "", pairs=1)


def _most_rows(reading: Reading, rank: int, m: int, tokens: Sequence[int], multiple: int) -> int:
    """Return the most rows that any routing can send; one per token where a row has several experts."""
    seen, held = reading.seen(m, rank), len(reading.ranks[rank].local_experts)
    if seen.exchange.handed[0].ids_RJ.shape[1] > 1:
        return worst_case_rows(tokens, reading.outcome.workload.config.top_k, held, per_token=True)
    return worst_case_rows(tokens, reading.outcome.workload.config.top_k, held, alignment=multiple)


def _sizes(reading: Reading) -> Iterator[tuple[int, int, int]]:
    """Yield every rank and microbatch, and the number of rows of the buffer."""
    for rank in reading.ranks:
        for m, seen in enumerate(rank.microbatches):
            if len(seen.exchange.handed) != 1:
                raise NotOffered(f"the experts of rank {rank.rank} are called {len(seen.exchange.handed)} times")
            yield rank.rank, m, len(seen.exchange.handed[0].rows_RD)
