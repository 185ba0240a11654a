"""The fused token exchange under native's flex variants, on ranks: copies, handles, wrong use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_conformance.backends.native.exchange.collectives import DispatchRefused
from moe_conformance.backends.native.fused import autograd
from moe_conformance.contract import Overflow, ReceiveBuffer, Routing
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from self_tests.backends.flex_scene import EP2_ETP2, EP4, D, E, K, Scene, caught, on_ranks, rows_calls, values


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks for the tests of this file."""
    with Engine(preload=("self_tests.backends.test_native_flex",)) as engine:
        yield engine


# ---- the layout and the copies -------------------------------------------------------------------------------------


def lay_out(scene: Scene) -> tuple[Any, ...]:
    """Dispatch a batch; return its ids, its layout and what arrived."""
    x_TD, ids_TK, weights_TK = scene.batch()
    layout = scene.exchange.get_dispatch_layout(ids_TK)
    before = scene.context.calls()
    arrived = scene.exchange.dispatch(x_TD, ids_TK, weights_TK)
    sent = (x_TD, ids_TK, weights_TK)
    got = (arrived.rows_RD, arrived.handle.ids_RK, arrived.weights_RK, arrived.handle.counts_N)
    return sent, (layout.tokens_W, layout.tokens_E, layout.in_rank_TW), got, before


class TestCopies:
    @pytest.mark.parametrize("layout", [EP4, EP2_ETP2], ids=lambda layout: layout.name)
    def test_the_layout_counts_tokens_once_per_rank(self, engine: Engine, layout: Layout) -> None:
        """Expected by loops over tokens and slots; no collective is called for it."""
        held, shards = E // layout.ep, layout.etp
        for (_, ids_TK, _), (tokens_W, tokens_E, in_rank_TW), _, before in values(on_ranks(engine, lay_out, layout)):
            owners = [
                {r for e in ids_K if e >= 0 for r in range(4) if r // shards == e // held} for ids_K in ids_TK.tolist()
            ]
            assert [[r in ranks for r in range(4)] for ranks in owners] == in_rank_TW.tolist()
            assert [sum(r in ranks for ranks in owners) for r in range(4)] == tokens_W.tolist()
            assert [ids_TK.flatten().tolist().count(e) for e in range(E)] == tokens_E.tolist()
            assert 0 == before

    @pytest.mark.parametrize("layout", [EP4, EP2_ETP2], ids=lambda layout: layout.name)
    def test_one_copy_goes_to_each_rank(self, engine: Engine, layout: Layout) -> None:
        """The ledger's call that carries rows has the layout's splits, on every rank."""
        results = on_ranks(engine, lay_out, layout)
        for rank, (_, (tokens_W, _, _), _, _) in zip(results, values(results), strict=True):
            (call,) = rows_calls(rank.ledger)
            assert tuple(tokens_W.tolist()) == call.in_splits

    @pytest.mark.parametrize("layout", [EP4, EP2_ETP2], ids=lambda layout: layout.name)
    def test_what_arrives_is_the_tokens_with_the_slots_meant_here(self, engine: Engine, layout: Layout) -> None:
        """By source, then token; ids are local, and -1 with a weight of 0 for what is not this rank's."""
        found = values(on_ranks(engine, lay_out, layout))
        held, shards = E // layout.ep, layout.etp
        for rank, (_, _, (rows_RD, ids_RK, weights_RK, counts_N), _) in enumerate(found):
            expected = []
            first = rank // shards * held
            for (x_TD, ids_TK, weights_TK), *_ in found:
                for x_D, ids_K, weights_K in zip(x_TD.tolist(), ids_TK.tolist(), weights_TK.tolist(), strict=True):
                    local_K = [e - first if first <= e < first + held else -1 for e in ids_K]
                    own_K = [w if e >= 0 else 0.0 for w, e in zip(weights_K, local_K, strict=True)]
                    if max(local_K) >= 0:
                        expected.append((x_D, local_K, own_K))
            assert expected == list(zip(rows_RD.tolist(), ids_RK.tolist(), weights_RK.tolist(), strict=True))
            assert [ids_RK.flatten().tolist().count(n) for n in range(held)] == counts_N.tolist()
            assert len(expected) > 1


# ---- handles -------------------------------------------------------------------------------------------------------


def reuse(scene: Scene) -> tuple[Any, ...]:
    """Dispatch, then dispatch other tokens with the handle, and both afresh; return rows, and calls of the second."""
    x_TD, ids_TK, weights_TK = scene.batch()
    exchange, other_TD = scene.exchange, x_TD.flip(1) + 1
    handle = exchange.dispatch(x_TD, ids_TK, weights_TK).handle
    start = scene.context.calls()
    again = [exchange.dispatch(other_TD, handle=handle) for _ in range(2)]
    end = scene.context.calls()
    fresh = exchange.dispatch(other_TD, ids_TK, weights_TK)
    home = exchange.combine(2 * again[0].rows_RD, handle)[0]
    return (start, end), [each.rows_RD for each in again], fresh.rows_RD, home, (other_TD, fresh.handle)


def go_backward(scene: Scene) -> tuple[Any, ...]:
    """Return gradients of dispatch and of combine, and what the other half makes of the same numbers."""
    x_TD, ids_TK, weights_TK = (each.requires_grad_(each.is_floating_point()) for each in scene.batch())
    exchange, draw = scene.exchange, torch.Generator().manual_seed(7 + scene.context.rank)
    arrived = autograd.dispatch(exchange, x_TD, ids_TK, weights_TK)
    assert arrived.weights_RK is not None
    up_RD, up_RK = (torch.randn(each.shape, generator=draw) for each in (arrived.rows_RD, arrived.weights_RK))
    torch.autograd.backward([arrived.rows_RD, arrived.weights_RK], [up_RD, up_RK])
    rows_RD = torch.randn(arrived.rows_RD.shape, generator=draw).requires_grad_()
    y_TD = autograd.combine(exchange, rows_RD, arrived.handle)
    up_TD = torch.randn(y_TD.shape, generator=draw)
    start = scene.context.calls()
    y_TD.backward(up_TD)
    end = scene.context.calls()
    up_rows = exchange.dispatch(up_TD, handle=arrived.handle).rows_RD
    by_halves = (*exchange.combine(up_RD, arrived.handle, up_RK), up_rows)
    return (start, end), (x_TD.grad, weights_TK.grad, rows_RD.grad), by_halves


class TestHandles:
    def test_a_cached_dispatch_exchanges_rows_alone(self, engine: Engine) -> None:
        """Two dispatches with a handle are two calls, both of rows; none of counts or ids."""
        results = on_ranks(engine, reuse)
        for rank, ((start, end), *_) in zip(results, values(results), strict=True):
            assert [(D,)] * 2 == [entry.shapes_in[0][-1:] for entry in rank.ledger[start:end]]

    def test_a_cached_dispatch_delivers_what_a_fresh_one_does(self, engine: Engine) -> None:
        """In the same order, any number of times; and combine serves it."""
        for _, (first, second), fresh, home, (x_TD, handle) in values(on_ranks(engine, reuse, EP2_ETP2)):
            assert torch.equal(fresh, first)
            assert torch.equal(fresh, second)
            copies_T = torch.bincount(handle.token_M, minlength=len(x_TD))
            assert torch.allclose(2 * x_TD * copies_T.unsqueeze(1), home)

    @pytest.mark.parametrize("layout", [EP4, EP2_ETP2], ids=lambda layout: layout.name)
    def test_the_backward_of_each_half_is_the_other(self, engine: Engine, layout: Layout) -> None:
        """Bit by bit, with the same handle: tokens, weights and rows."""
        for _, by_autograd, by_halves in values(on_ranks(engine, go_backward, layout)):
            for gradient, expected in zip(by_autograd, by_halves, strict=True):
                assert torch.equal(expected, gradient)

    def test_the_backward_of_combine_is_one_call(self, engine: Engine) -> None:
        """Its layout is known."""
        results = on_ranks(engine, go_backward)
        for rank, ((start, end), *_) in zip(results, values(results), strict=True):
            assert 1 == end - start == len(rows_calls(rank.ledger[start:end]))


# ---- wrong use -----------------------------------------------------------------------------------------------------


def swap_handles(scene: Scene) -> list[str]:
    """Combine with another microbatch's handle, then each with its own, then one again."""
    flex = scene.flex(scene.payload)
    delivered = []
    for m, tokens in enumerate((scene.context.rank + 3, 2 * scene.context.rank + 9)):
        x_TD, _, weights_TK = scene.batch(m, tokens)
        ids_TK = torch.arange(tokens * K).reshape(tokens, K) % E  # every rank gets rows, and not as many of both
        delivered.append(flex.dispatch(x_TD, Routing(ids_TK, weights_TK, E)))
    (first, one), (second, two) = delivered
    rows = [delivery.rows_RD * 1 for delivery in (first, second)]
    said = [caught(lambda: flex.combine(rows[0], two)), caught(lambda: flex.combine(rows[1], one))]
    released = [one.released, two.released]
    said += [caught(lambda: flex.combine(rows[0], one)), caught(lambda: flex.combine(rows[1], two))]
    return [*said, str([*released, one.released, two.released]), caught(lambda: flex.combine(rows[0], one))]


def combine_too_few(scene: Scene) -> str:
    """Leave a row out of what goes to the token exchange, on every rank."""
    arrived = scene.exchange.dispatch(*scene.batch())
    return caught(lambda: scene.exchange.combine(arrived.rows_RD[1:], arrived.handle))


def bad_input(scene: Scene) -> str:
    """Dispatch something wrong on rank 2 alone."""
    x_TD, ids_TK, weights_TK = scene.batch()
    if scene.context.rank == 2:
        if scene.payload == "id":
            ids_TK[0, 0] = E
        elif scene.payload == "weights":
            weights_TK = weights_TK[:, 1:]
        elif scene.payload == "dtype":
            weights_TK = weights_TK.double()
        else:
            x_TD = x_TD[1:]
    return caught(lambda: scene.exchange.dispatch(x_TD, ids_TK, weights_TK))


def overflow(scene: Scene) -> tuple[str, Any]:
    """Send all pairs to the experts of the first ranks under a budget; return the error, or the deliveries' rows."""
    factor, tokens, hot = scene.payload
    flex = scene.flex("hybridep", receive_buffer=ReceiveBuffer(factor=factor))
    ids_TK = torch.arange(tokens * K).reshape(tokens, K) % (hot or E)
    routing = Routing(ids_TK, torch.rand(tokens, K), E)
    rows: list[int] = []
    return caught(lambda: rows.append(len(flex.dispatch(torch.randn(tokens, D), routing)[0].rows_RD))), rows


class TestWrongUse:
    @pytest.mark.parametrize("variant", ["deepep", "ncclep"])
    def test_another_microbatchs_handle_is_an_error_on_every_rank(self, engine: Engine, variant: str) -> None:
        """It says both numbers of rows; nothing hangs, and each combines with its own handle afterwards, once."""
        for first, second, own, other, released, again in values(on_ranks(engine, swap_handles, payload=variant)):
            for said in (first, second):
                assert said.startswith("ValueError: combine received ")
                assert said.endswith("is it the handle of another microbatch?")
            assert ("nothing", "nothing") == (own, other)
            assert "[False, False, True, True]" == released
            assert again.startswith("ValueError: this handle was combined before")

    def test_a_missing_row_is_an_error_of_the_exchange(self, engine: Engine) -> None:
        """Below the managers too."""
        for said in values(on_ranks(engine, combine_too_few)):
            assert said.startswith("ValueError: combine received ")

    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            ("id", "expert id 8 among 8 experts"),
            ("weights", "weights of shape (7, 2) for ids of shape (7, 3)"),
            ("dtype", "weights are torch.float64 with torch.float32 rows instead of torch.float32"),
            ("tokens", "tokens of shape (6, 5) for the ids of 7"),
        ],
    )
    def test_wrong_input_on_one_rank_is_an_error_on_all(self, engine: Engine, wrong: str, sentence: str) -> None:
        """The rank itself says what it is, the others say which rank; no rank waits for rows."""
        said = values(on_ranks(engine, bad_input, payload=wrong))
        others = f"{DispatchRefused.__name__}: rank 2 of the group had wrong input to dispatch"
        assert [others, others, f"ValueError: {sentence}", others] == said

    @pytest.mark.parametrize("layout", [EP4, EP2_ETP2], ids=lambda layout: layout.name)
    def test_an_overflow_is_an_error_on_every_rank(self, engine: Engine, layout: Layout) -> None:
        """Also on ranks that have room; the message has the rows of the largest load and of the buffer."""
        rows = 4 * 8 * K  # of all ranks, at the experts of the first ep coordinate
        budget = 8 * K * layout.etp
        for said, delivered in values(on_ranks(engine, overflow, layout, (1.0, 8, 2))):
            expected = f"{Overflow.__name__}: a rank of the exchange group would receive {rows} rows; the receive "
            assert said.startswith(f"{expected}buffer has {budget} (receive_buffer.factor = 1)")
            assert [] == delivered

    def test_balanced_load_fits_a_factor_of_one(self, engine: Engine) -> None:
        """It fills the buffer, which has the same number of rows on every rank."""
        assert [("nothing", [8 * K])] * 4 == values(on_ranks(engine, overflow, EP4, (1.0, 8, 0)))

    def test_no_tokens_anywhere_need_no_budget(self, engine: Engine) -> None:
        """The buffer is empty then."""
        assert [("nothing", [0])] * 4 == values(on_ranks(engine, overflow, EP4, (1.0, 0, 0)))


# ---- eight bits ----------------------------------------------------------------------------------------------------


def over_both_wires(scene: Scene) -> tuple[Any, ...]:
    """Dispatch signs and go backward, over a plain wire and one of eight bits; return rows, gradients, dtypes sent."""
    found = []
    for wire in ("plain", "float8"):
        x_TD, ids_TK, weights_TK = scene.batch()
        x_TD = x_TD.sign().requires_grad_()
        flex = scene.flex(scene.payload, wire=wire)
        delivery, handle = flex.dispatch(x_TD, Routing(ids_TK, weights_TK, E))
        y_TD = flex.combine(delivery.rows_RD * 3, handle)
        y_TD.backward(torch.randn(y_TD.shape, generator=torch.Generator().manual_seed(scene.context.rank)))
        found.append((delivery.rows_RD.detach(), y_TD.detach(), x_TD.grad))
    return tuple(found)


class TestEightBits:
    @pytest.mark.parametrize("variant", ["deepep", "hybridep", "ncclep"])
    def test_numbers_that_the_format_has_arrive_as_they_are(self, engine: Engine, variant: str) -> None:
        """Signs are the same over both wires, under every manager; gradients travel as they are."""
        for plain, rounded in values(on_ranks(engine, over_both_wires, payload=variant)):
            assert all(torch.equal(one, other) for one, other in zip(plain, rounded, strict=True))

    def test_bytes_travel_forward_alone(self, engine: Engine) -> None:
        """Of two forwards and two backwards one forward sends bytes: five numbers and a scale for each row."""
        for rank in on_ranks(engine, over_both_wires, payload="deepep"):
            sent = [entry.shapes_in[0][-1] for entry in rank.ledger if entry.dtype == "uint8"]
            assert [D + 4] == sent
