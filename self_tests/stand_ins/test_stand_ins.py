"""Every stand-in against loops over all ranks: what is delivered, what comes back, and what is not there to be read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_conformance.engine import Engine
from moe_conformance.stand_ins.deep_ep import Buffer, WideBuffer
from moe_conformance.stand_ins.elastic import WideElasticBuffer
from moe_conformance.stand_ins.events import EventHandle, EventOverlap
from moe_conformance.stand_ins.hybrid_ep import HybridEPBuffer, WideHybridEPBuffer
from moe_conformance.stand_ins.nccl_ep import EpBuffer, WideNcclEp
from moe_conformance.stand_ins.presenting import module, presented
from self_tests.backends.flex_scene import TOKENS, D, E, K, Scene, caught, on_ranks, values
from self_tests.stand_ins.naive import Arrived, arrivals, by_expert, summed

W = 4
N = E // W
EQUAL = 7  # tokens of every rank, for kernels that need as many


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks for the tests of this file."""
    with Engine(preload=("self_tests.stand_ins.test_stand_ins",)) as engine:
        yield engine


def group_of(scene: Scene) -> Any:
    """The exchange group of the rank."""
    return scene.topology.group("ep_etp")


def dense(ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The map (T, E) and weights of a routing."""
    map_TE, probs_TE = torch.zeros(len(ids_TK), E, dtype=torch.bool), torch.zeros(len(ids_TK), E)
    for token, ids in enumerate(ids_TK.tolist()):
        for slot, expert in enumerate(ids):
            if expert >= 0:
                map_TE[token, expert], probs_TE[token, expert] = True, weights_TK[token, slot]
    return map_TE, probs_TE


# ---- on ranks: (inputs, what arrived, what came back) ----------------------------------------------------------


def with_deep_ep(scene: Scene) -> tuple[Any, ...]:
    """Dispatch and combine, asynchronously, then dispatch by the handle."""
    x_TD, ids_TK, weights_TK = scene.batch()
    buffer = WideBuffer(group_of(scene))
    per_rank_W, _, per_expert_E, in_rank_TW, event = buffer.get_dispatch_layout(
        ids_TK, E, previous_event=EventOverlap(EventHandle()), async_finish=True
    )
    rows_RD, ids_RK, weights_RK, counts, handle, after = buffer.dispatch(
        x_TD,
        topk_idx=ids_TK,
        topk_weights=weights_TK,
        num_tokens_per_rank=per_rank_W,
        num_tokens_per_expert=per_expert_E,
        is_token_in_rank=in_rank_TW,
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=True,
    )
    early = rows_RD.clone()
    after.current_stream_wait()
    again_RD = buffer.dispatch(2 * x_TD, handle)[0]
    y_TD, back_TK, _ = buffer.combine(rows_RD + scene.context.rank, handle, topk_weights=weights_RK)
    arrived = (rows_RD, ids_RK, weights_RK, counts)
    return (x_TD, ids_TK, weights_TK), arrived, (y_TD, back_TK), again_RD, early


def with_elastic(scene: Scene) -> tuple[Any, ...]:
    """Dispatch and combine."""
    x_TD, ids_TK, weights_TK = scene.batch()
    most = max(TOKENS)
    buffer = WideElasticBuffer(group_of(scene), num_max_tokens_per_rank=most, hidden=D, num_topk=K)
    rows_RD, ids_RK, weights_RK, handle, _ = buffer.dispatch(x_TD, ids_TK, weights_TK, num_experts=E)
    assert ids_RK is not None
    assert weights_RK is not None
    again_RD = buffer.dispatch(2 * x_TD, handle=handle)[0]
    y_TD, back_TK, _ = buffer.combine(rows_RD + scene.context.rank, handle, topk_weights=weights_RK)
    arrived = (rows_RD, ids_RK, weights_RK, handle.num_recv_tokens_per_expert_list)
    return (x_TD, ids_TK, weights_TK), arrived, (y_TD, back_TK), again_RD, None


def with_hybrid_ep(scene: Scene) -> tuple[Any, ...]:
    """Dispatch with experts padded to a multiple, or into a buffer of a number of rows; combine."""
    multiple, rows = scene.payload
    x_TD, ids_TK, weights_TK = scene.batch(tokens=EQUAL)
    map_TE, probs_TE = dense(ids_TK, weights_TK)
    buffer = WideHybridEPBuffer(group_of(scene), D, EQUAL, N)
    rows_BD, weights_B, _, counts_N, handle = buffer.dispatch_with_permute(
        hidden=x_TD,
        routing_map=map_TE,
        probs=probs_TE,
        num_of_experts_per_rank=N,
        pad_multiple=multiple,
        num_permuted_tokens=rows,
        non_blocking=rows is not None,
    )
    y_TD, back_TE = buffer.combine_with_unpermute(hidden=rows_BD, probs=weights_B, handle=handle, pad_multiple=multiple)
    flag = bool(handle[-1])
    return (x_TD, ids_TK, weights_TK), (rows_BD, weights_B, counts_N.tolist(), flag), (y_TD, back_TE)


def with_nccl_ep(scene: Scene) -> tuple[Any, ...]:
    """Dispatch and combine with gradients, into a buffer of fixed capacity."""
    x_TD, ids_TK, weights_TK = scene.batch()
    x_TD, weights_TK = x_TD.requires_grad_(), weights_TK.requires_grad_()
    library, capacity = WideNcclEp(), 50
    library.ep_bootstrap(group_of(scene), E, 64, capacity, D)
    buffer = EpBuffer(K, 64, capacity, D, N)
    rows_CD, weights_C, counts_N = library.ep_dispatch(buffer, x_TD, ids_TK, weights_TK)
    R = int(counts_N.sum())
    answers_CD = torch.where(torch.arange(capacity)[:, None] < R, rows_CD * weights_C[:, None], 0.0)
    y_TD = library.ep_combine(buffer, answers_CD, num_local_tokens=len(x_TD))
    y_TD.sum().backward()
    inputs = (x_TD.detach(), ids_TK, weights_TK.detach())
    arrived = (rows_CD.detach(), weights_C.detach(), counts_N.tolist())
    return inputs, arrived, (y_TD.detach(), x_TD.grad, weights_TK.grad)


# ---- against the loops --------------------------------------------------------------------------------------------


def loops(found: list[Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Arrived]]:
    """The inputs of all ranks, and what the loops say arrives."""
    x, ids, weights = ([rank[0][part] for rank in found] for part in range(3))
    return x, ids, weights, arrivals(x, ids, weights, N)


def stacked(rows: list[Any], *shape: int) -> Tensor:
    """Rows as a tensor, also if there are none."""
    return torch.stack([torch.as_tensor(row) for row in rows]) if rows else torch.zeros(0, *shape)


class TestDeepEP:
    @pytest.mark.parametrize("act", [with_deep_ep, with_elastic])
    def test_rows_reach_the_ranks_of_their_experts_and_come_back(
        self, engine: Engine, act: Callable[[Scene], Any]
    ) -> None:
        """Rows, local ids, weights and counts are those of the loops, and so are the sums."""
        found = values(on_ranks(engine, act))
        x, _, _, arrived = loops(found)
        for rank, here in zip(found, arrived, strict=True):
            rows_RD, ids_RK, weights_RK, counts = rank[1]
            assert torch.equal(stacked(here.rows, D), rows_RD)
            assert here.ids == ids_RK.tolist()
            assert torch.equal(stacked(here.weights, K), weights_RK)
            assert [len(rows) for rows in by_expert(here, N)] == counts
            assert torch.equal(2 * rows_RD, rank[3])
        answers = [[row + r for row in here.rows] for r, here in enumerate(arrived)]
        for rank, expected in zip(found, summed(answers, arrived, [len(part) for part in x], D), strict=True):
            torch.testing.assert_close(rank[2][0], expected)

    def test_nothing_is_there_before_the_event(self, engine: Engine) -> None:
        """Rows of an asynchronous dispatch are NaN until it is waited for."""
        for *_, early in values(on_ranks(engine, with_deep_ep)):
            assert bool(early.isnan().all())

    def test_the_kernel_takes_bfloat16_of_a_multiple_of_16_columns(self, engine: Engine) -> None:
        """The wide buffer does not mind."""
        assert ["AssertionError: hidden_int4 % 2 == 0"] * W == values(on_ranks(engine, narrow_rows))


def narrow_rows(scene: Scene) -> str:
    """Dispatch rows of D columns through the buffer that is as strict as the kernel."""
    buffer = Buffer(group_of(scene))
    return caught(lambda: buffer.dispatch(torch.zeros(2, D)))


class TestHybridEP:
    @pytest.mark.parametrize(("multiple", "rows"), [(None, None), (4, None), (None, 60), (None, 5)])
    def test_rows_come_expert_by_expert(self, engine: Engine, multiple: int | None, rows: int | None) -> None:
        """Experts are padded by zeros; of a buffer of fixed size the last rows are dropped, or garbage."""
        found = values(on_ranks(engine, with_hybrid_ep, payload=(multiple, rows)))
        x, _, weights, arrived = loops(found)
        kept = [[[0] * K for _ in range(EQUAL)] for _ in range(W)]
        for (_, (rows_BD, weights_B, counts, flag), _), here in zip(found, arrived, strict=True):
            at, wanted, missed = 0, [], False
            for routed in by_expert(here, N):
                padded = -(-len(routed) // (multiple or 1)) * (multiple or 1)
                for place, (row, slot) in enumerate(routed):
                    if rows is not None and at + place >= rows:
                        missed = True
                        continue
                    assert torch.equal(here.rows[row], rows_BD[at + place])
                    assert here.weights[row][slot] == float(weights_B[at + place])
                    source, token = here.sources[row]
                    kept[source][token][slot] += 1
                assert bool((rows_BD[at + len(routed) : at + padded] == 0).all())
                wanted.append(min(padded, max(0, (rows or 9999) - at)))
                at += padded
            assert (wanted, missed) == (counts, flag)
            assert len(rows_BD) == (at if rows is None else rows)
            assert bool(rows_BD[sum(counts) :].isnan().all())
        for rank, (_, _, (y_TD, back_TE)) in enumerate(found):
            copies_TK = torch.tensor(kept[rank])
            torch.testing.assert_close(y_TD, x[rank] * copies_TK.sum(1, keepdim=True))
            torch.testing.assert_close(back_TE.sum(1), (weights[rank] * copies_TK).sum(1))

    def test_other_numbers_of_tokens_are_refused_by_all(self, engine: Engine) -> None:
        """A kernel would read what is not there."""
        words = f"RuntimeError: the ranks have {list(TOKENS)} where the kernel needs one number"
        assert [words] * W == values(on_ranks(engine, uneven_tokens))


def uneven_tokens(scene: Scene) -> str:
    """Dispatch other numbers of tokens on every rank."""
    x_TD, ids_TK, weights_TK = scene.batch()
    map_TE, _ = dense(ids_TK, weights_TK)
    buffer = HybridEPBuffer(group_of(scene), 16, 64, N)
    rows_TD = torch.zeros(len(x_TD), 16, dtype=torch.bfloat16)
    return caught(lambda: buffer.dispatch_with_permute(hidden=rows_TD, routing_map=map_TE))


class TestNcclEP:
    def test_rows_come_expert_by_expert_and_gradients_go_back(self, engine: Engine) -> None:
        """Outputs are the weighted tokens, and gradients those of that sum."""
        found = values(on_ranks(engine, with_nccl_ep))
        _, _, _, arrived = loops(found)
        for ((x_TD, ids_TK, weights_TK), (rows_CD, weights_C, counts), back), here in zip(found, arrived, strict=True):
            experts = by_expert(here, N)
            pairs = [pair for routed in experts for pair in routed]
            assert [len(routed) for routed in experts] == counts
            assert torch.equal(stacked([here.rows[row] for row, _ in pairs], D), rows_CD[: len(pairs)])
            assert [here.weights[row][slot] for row, slot in pairs] == weights_C[: len(pairs)].tolist()
            assert bool(rows_CD[len(pairs) :].isnan().all())
            held_TK = torch.where(ids_TK >= 0, weights_TK, 0.0)
            torch.testing.assert_close(back[0], x_TD * held_TK.sum(1, keepdim=True))
            torch.testing.assert_close(back[1], held_TK.sum(1, keepdim=True).expand_as(x_TD))
            torch.testing.assert_close(back[2], torch.where(ids_TK >= 0, x_TD.sum(1, keepdim=True), 0.0))

    def test_arguments_that_differ_between_ranks_are_refused_by_all(self, engine: Engine) -> None:
        """The bound on tokens is one for the group."""
        assert [True] * W == values(on_ranks(engine, other_bounds))


def other_bounds(scene: Scene) -> bool:
    """Bootstrap with another bound on every rank."""
    words = caught(lambda: WideNcclEp().ep_bootstrap(group_of(scene), E, 64 * (1 + scene.context.rank), 50, D))
    return "the arguments of ranks differ" in words


class TestPresenting:
    def test_what_was_there_is_put_back(self) -> None:
        """A module is found under its name only while it is presented, and can be hidden."""
        before = sys.modules["json"]
        with presented({"json": module("json", loads=1), "deep_ep": module("deep_ep"), "csv": None}):
            import json

            assert isinstance(json, ModuleType)
            assert json.loads == 1  # type: ignore[comparison-overlap]
            with pytest.raises(ImportError):
                import csv  # noqa: F401
        assert sys.modules["json"] is before
        assert "deep_ep" not in sys.modules
