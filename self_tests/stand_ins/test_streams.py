"""The stand-in of streams and events, on two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.stand_ins import streams


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks."""
    with Engine() as engine:
        yield engine


def exchanged(context: RankContext, waits: str) -> tuple[int, int, list[float]]:
    """On a rank: calls in flight behind the exchange and behind the wait, and what arrived."""
    side, event = streams.Stream(), streams.Event()
    sent, got = torch.tensor([1.0, 2.0]) + 10 * context.rank, torch.zeros(2)
    with streams.overlapping():
        with streams.stream(side):
            streams.all_to_all_single(got, sent)
            begun = len(context.in_flight())
            if waits == "own read":
                got = got * 1
        event.record(side)
        if waits == "event":
            event.wait(streams.current_stream())
        if waits == "stream":
            streams.current_stream().wait_stream(side)
        if waits == "event of its own stream":
            event.wait(side)
        left = len(context.in_flight())
        side.synchronize()
    return begun, left, got.tolist()


def blocking(context: RankContext, _: None) -> tuple[int, list[float]]:
    """On a rank: calls in flight behind an exchange on the default stream, and what arrived."""
    got = torch.zeros(2)
    with streams.overlapping():
        streams.all_to_all_single(got, torch.tensor([1.0, 2.0]) + 10 * context.rank)
    return len(context.in_flight()), got.tolist()


class TestStreams:
    @pytest.mark.parametrize(
        ("waits", "left"),
        [("event", 0), ("stream", 0), ("own read", 0), ("event of its own stream", 1), ("nothing", 1)],
    )
    def test_an_exchange_is_in_flight_until_another_stream_waits(self, engine: Engine, waits: str, left: int) -> None:
        """Or until its own stream reads what arrived."""
        result = engine.run(Job(f"{__name__}:exchanged", waits, 2, {}, deadline_s=30.0))
        assert [(1, left, [1.0, 11.0]), (1, left, [2.0, 12.0])] == [rank.value for rank in result.ranks]

    def test_on_the_default_stream_it_blocks(self, engine: Engine) -> None:
        """As a collective does that a step computes with."""
        result = engine.run(Job(f"{__name__}:blocking", None, 2, {}, deadline_s=30.0))
        assert [(0, [1.0, 11.0]), (0, [2.0, 12.0])] == [rank.value for rank in result.ranks]
