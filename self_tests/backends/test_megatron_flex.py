"""Megatron-Core's flex dispatcher over stand-ins, held against the oracles by itself: no judge takes part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_conformance.backends.megatron_core.flex import PADS, MegatronFlex
from moe_conformance.contract import Config, Unsupported
from moe_conformance.contract.topology import Layout, Topology
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.stand_ins import NOTE
from moe_conformance.workloads import recipes
from self_tests.backends.asking import prepared
from self_tests.backends.dense import assert_equal_to_the_bit, oracle, seen

try:
    MegatronFlex().versions()  # importing the library here would take seconds: only the ranks need it
except Unsupported as missing:
    pytest.skip(str(missing), allow_module_level=True)

NAME = "moe_conformance.backends.megatron_core.flex:MegatronFlex"
EP2, EP2_ETP2 = Layout(2, ep=2), Layout(4, ep=2, etp=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks that have imported Megatron-Core already."""
    with prepared(MegatronFlex) as engine:
        yield engine


@pytest.fixture(scope="module")
def bare() -> Iterator[Engine]:
    """Ranks on which no session is open: those of the other engine keep theirs."""
    with Engine(preload=MegatronFlex.preload, environment=MegatronFlex.environment) as engine:
        yield engine


def run(engine: Engine, variant: str, layout: Layout, name: str) -> Outcome:
    """Run a pinned workload, which every rank must finish; skip what this version lacks."""
    workload = next(w for w in recipes.corpus(variant, layout, "full") if w.name == name)
    outcome = moe_step(engine, NAME, workload)
    if all(rank.status == "refused" and "this version" in str(rank.error) for rank in outcome.ranks):
        pytest.skip(str(outcome.ranks[0].error))
    assert ["ok"] * layout.world == [rank.status for rank in outcome.ranks], [rank.error for rank in outcome.ranks]
    return outcome


def on_ranks(engine: Engine, function: str, given: Any = None) -> list[Any]:
    """What a function of this file returns on the ranks of ep2."""
    ranks = engine.run(Job(f"{__name__}:{function}", given, 2, EP2.groups(), deadline_s=60.0)).ranks
    assert [] == [rank.error for rank in ranks if rank.error]
    return [rank.value for rank in ranks]


def opened(context: RankContext) -> Any:
    """A session on the rank."""
    return MegatronFlex().open(Topology(EP2, context.rank, context.groups), torch.device("cpu"))


def padded(context: RankContext, given: Any) -> Any:
    """To how many tokens of this rank are padded, for a sequence of numbers; None: this version pads nothing."""
    session = opened(context)
    try:
        padding = session.token_padding(Config("hybridep").changed({"padding.tokens": "group_max", **given[0]}))
        return [padding.count(tokens[context.rank]) for tokens in given[1]]
    except Unsupported as refusal:
        return str(refusal)
    finally:
        session.close()


def names_after(context: RankContext, _: None) -> bool:
    """Whether the library has after a session what it had before."""
    from moe_conformance.backends.megatron_core import library

    def kernels() -> list[Any]:
        return [value for name, value in vars(library.token_dispatcher).items() if "ep" in name or name == "torch"]

    before = kernels()
    session = opened(context)
    during = kernels()
    session.close()
    return [id(value) for value in before] == [id(value) for value in kernels()] != [id(value) for value in during]


class TestExchange:
    @pytest.mark.parametrize("layout", [EP2, EP2_ETP2], ids=["ep2", "ep2-etp2"])
    @pytest.mark.parametrize("variant", MegatronFlex.variants)
    def test_it_computes_the_layer(self, engine: Engine, variant: str, layout: Layout) -> None:
        """Output and gradients of the suite's expert equal the dense formulation to the bit."""
        outcome = run(engine, variant, layout, "even")
        assert_equal_to_the_bit(outcome)

    @pytest.mark.parametrize("name", ["rank-without-tokens", "dropped-uneven", "uneven-bfloat16"])
    def test_deepep_takes_other_numbers_of_tokens(self, engine: Engine, name: str) -> None:
        """Empty slots and ranks without tokens too."""
        outcome = run(engine, "deepep", EP2, name)
        assert torch.equal(oracle(outcome.workload).y_TD, seen(outcome)[0])

    @pytest.mark.parametrize("variant", MegatronFlex.variants)
    def test_it_says_that_the_kernel_is_a_stand_in(self, engine: Engine, variant: str) -> None:
        """The report of every variant names the manager, and that no verdict is one of its kernel."""
        resolved = run(engine, variant, EP2, "even").ranks[0].resolved
        assert "Manager" in resolved["manager"]
        assert NOTE in resolved["deep_ep"]
        assert NOTE in resolved["transformer_engine.pytorch.ep"]


class TestPadding:
    def test_it_is_that_of_the_manager(self, bare: Engine) -> None:
        """The largest count of the group, rounded up to 64."""
        found = on_ranks(bare, "padded", ({"padding.alignment": 64}, [(5, 70), (0, 0), (64, 3)]))
        assert found in ([[128, 0, 64]] * 2, ["this version of Megatron-Core pads no token counts"] * 2)

    def test_another_alignment_is_refused(self, bare: Engine) -> None:
        """It cannot be set."""
        assert all("pad" in found for found in on_ranks(bare, "padded", ({"padding.alignment": 16}, [])))

    def test_a_version_that_does_not_pad_is_found_by_its_sources(self) -> None:
        """The driver knows whether uneven counts are a limit, and imports nothing for that."""
        (limits,) = [MegatronFlex().limits("hybridep")]
        folder = MegatronFlex.library.folder()
        assert folder is not None
        text = (folder / "megatron/core/transformer/transformer_config.py").read_text()
        assert any(name in text for name in PADS) is ("uneven_tokens" not in {limit.on for limit in limits})


class TestStandIns:
    def test_they_are_taken_out_again(self, bare: Engine) -> None:
        """A session puts functions into the library, and leaves it as it was."""
        assert [True, True] == on_ranks(bare, "names_after")
