"""What is asked for: sections, what an adapter maps of them, and values that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from moe_conformance.contract import (
    Capacity,
    Config,
    Padding,
    ReceiveBuffer,
    RoutingOptions,
    SharedExperts,
    Unsupported,
)


class TestSections:
    def test_options_have_dotted_names(self) -> None:
        """Every option is there once, by its section's name and its own, in the order of the fields."""
        options = Config(capacity=Capacity(factor=1.5)).options()
        assert ["variant", "experts", "top_k", "hidden", "ffn", "dtype"] == list(options)[:6]
        assert (1.5, 2, "no") == (options["capacity.factor"], options["top_k"], options["padding.tokens"])
        sections = {name.partition(".")[0] for name in options if "." in name}
        routers = {"routing", "losses", "balance", "replay"}
        layers = {"activation", "shared", "capacity", "padding", "receive_buffer", "overlap", "training"}
        assert {*layers, *routers} == sections

    def test_equal_options_are_one_config(self) -> None:
        """Configs are values: equal, with one hash, and frozen with their sections."""
        one = Config(routing=RoutingOptions(scale=2.5))
        assert {one} == {one, Config().changed({"routing.scale": 2.5})}
        with pytest.raises(FrozenInstanceError):
            one.routing.scale = 1.0  # type: ignore[misc]

    def test_changed_options_leave_the_others_as_they_are(self) -> None:
        """An option, options of one section, and a whole section; in any order of the names."""
        changed = Config(top_k=3, padding=Padding(packed=True)).changed(
            {"padding.tokens": "bound", "shared": SharedExperts(ffn=(8,)), "padding.bound": 4, "experts": 4}
        )
        padding = Padding(tokens="bound", bound=4, packed=True)
        assert Config(experts=4, top_k=3, padding=padding, shared=SharedExperts(ffn=(8,))) == changed

    @pytest.mark.parametrize("name", ["topk", "capacity.top_k", "capacity.", "top_k.", "only", "score"])
    def test_an_unknown_name_is_refused(self, name: str) -> None:
        """What is changed and what is mapped are options and sections, and nothing else."""
        with pytest.raises(ValueError, match=f"Config has no option '{name}'"):
            Config().changed({name: 1})
        with pytest.raises(ValueError, match=f"Config has no option '{name}'"):
            Config().only("top_k", name)

    def test_a_section_and_an_option_of_it_are_refused(self) -> None:
        """One would take the place of the other."""
        with pytest.raises(ValueError, match=r"capacity and capacity\.factor are both given"):
            Config().changed({"capacity.factor": 1.0, "capacity": Capacity()})


class TestOnly:
    @pytest.mark.parametrize("mapped", ["routing", "routing.scale"])
    def test_what_is_mapped_passes(self, mapped: str) -> None:
        """`only` returns the config where every changed option is mapped, alone or with its section."""
        config = Config(experts=4, routing=RoutingOptions(scale=2.5))
        assert config is config.only("experts", mapped)

    def test_what_is_not_mapped_is_refused_by_name_and_value(self) -> None:
        """A changed option that an adapter does not map is refused, never ignored."""
        config = Config(experts=4, routing=RoutingOptions(scale=2.5, balance_bias=True), capacity=Capacity(factor=1.0))
        sentence = "this adapter does not map routing.scale=2.5, routing.balance_bias=True"
        with pytest.raises(Unsupported) as caught:
            config.only("experts", "capacity")
        assert ("adapter", sentence) == (caught.value.by, str(caught.value))

    def test_a_variant_that_is_not_mapped_is_told_where_to_map_it(self) -> None:
        """Every surface of a backend with named variants refuses everything until it maps the name."""
        sentence = (
            "this adapter does not map variant='alltoall'; it is a name of Backend.variants: map it too, "
            "config.only('variant', ...), in every surface"
        )
        with pytest.raises(Unsupported) as caught:
            Config(variant="alltoall").only("experts", "top_k")
        assert sentence == str(caught.value)

    def test_the_others_of_a_section_are_refused(self) -> None:
        """One option of a section maps that option alone."""
        with pytest.raises(Unsupported, match=r"does not map capacity\.padded=True$"):
            Config(capacity=Capacity(factor=1.0, padded=True)).only("capacity.factor")


WRONG: dict[str, Callable[[], Any]] = {
    "weights_applied = 'inputs'; allowed: one of 'native', 'input', 'output'": lambda: Config(weights_applied="inputs"),  # type: ignore[arg-type]
    "wire = 'fp8'; allowed: one of 'plain', 'float8'": lambda: Config(wire="fp8"),  # type: ignore[arg-type]
    "experts = -1; allowed: 0 or more": lambda: Config(experts=-1),
    "top_k = 0; allowed: 1 or more": lambda: Config(top_k=0),
    "top_k = 1.5; allowed: int": lambda: Config(top_k=1.5),  # type: ignore[arg-type]
    "top_k = True; allowed: int": lambda: Config(top_k=True),
    "hidden = 0; allowed: 1 or more": lambda: Config(hidden=0),
    "ffn = 0; allowed: 1 or more": lambda: Config(ffn=0),
    "dtype = 'float32'; allowed: dtype": lambda: Config(dtype="float32"),  # type: ignore[arg-type]
    "token_copies = 1; allowed: bool": lambda: Config(token_copies=1),  # type: ignore[arg-type]
    "extra = {}; allowed: tuple[tuple[str, Any], ...]": lambda: Config(extra={}),  # type: ignore[arg-type]
    "shared = None; allowed: SharedExperts": lambda: Config(shared=None),
    "routing.score = 'softmx'; allowed: one of 'softmax', 'softmax_topk', 'sigmoid', 'sqrtsoftplus'": (
        lambda: RoutingOptions(score="softmx")  # type: ignore[arg-type]
    ),
    "routing.scale = nan; allowed: float": lambda: RoutingOptions(scale=float("nan")),
    "routing.groups = (4,); allowed: tuple[int, int] | None": lambda: RoutingOptions(groups=(4,)),  # type: ignore[arg-type]
    "routing.forced = (('rondom', None),); allowed: tuple[tuple[Literal['random', ": (
        lambda: RoutingOptions(forced=(("rondom", None),))  # type: ignore[arg-type]
    ),
    "shared.ffn = (8, 0); allowed: 1 or more": lambda: SharedExperts(ffn=(8, 0)),
    "capacity.factor = -0.5; allowed: 0 or more": lambda: Capacity(factor=-0.5),
    "capacity.factor = inf; allowed: float | None": lambda: Capacity(factor=float("inf")),
    "capacity.minimum = -1; allowed: 0 or more": lambda: Capacity(minimum=-1),
    "capacity.drop_policy = 'probs'; allowed: one of 'weights', 'position'": lambda: Capacity(drop_policy="probs"),  # type: ignore[arg-type]
    "padding.tokens = 'max'; allowed: one of 'no', 'group_max', 'bound'": lambda: Padding(tokens="max"),  # type: ignore[arg-type]
    "padding.alignment = 0; allowed: 1 or more": lambda: Padding(alignment=0),
    "padding.bound = -1; allowed: 0 or more": lambda: Padding(bound=-1),
    "padding.row_multiple = 0; allowed: 1 or more": lambda: Padding(row_multiple=0),
    "receive_buffer.factor = 0.0; allowed: more than 0": lambda: ReceiveBuffer(factor=0.0),
    "receive_buffer.factor = inf; allowed: float | None": lambda: ReceiveBuffer(factor=float("inf")),
    "receive_buffer.rows = -1; allowed: 0 or more": lambda: ReceiveBuffer(rows=-1),
    "receive_buffer.overflow = 'raise'; allowed: one of 'refuse', 'drop'": lambda: ReceiveBuffer(overflow="raise"),  # type: ignore[arg-type]
}


class TestValues:
    @pytest.mark.parametrize("sentence", WRONG)
    def test_a_value_that_is_not_allowed_is_refused(self, sentence: str) -> None:
        """On construction, with the name of the option, the value, and what is allowed."""
        with pytest.raises(ValueError, match=r"; allowed: ") as caught:
            WRONG[sentence]()
        assert str(caught.value).startswith(sentence)

    def test_a_changed_value_is_checked_too(self) -> None:
        """A section is built anew."""
        with pytest.raises(ValueError, match=r"capacity\.factor = 'two'"):
            Config().changed({"capacity.factor": "two"})

    def test_numbers_at_the_bounds_are_allowed(self) -> None:
        """Nothing fits a capacity of 0, nor a receive buffer of 0 rows; and 0 experts are for the backend to refuse."""
        config = Config(
            experts=0,
            top_k=1,
            capacity=Capacity(factor=0.0),
            padding=Padding(bound=0),
            receive_buffer=ReceiveBuffer(rows=0),
        )
        assert (0, 0.0, 0, 0) == (
            config.experts,
            config.capacity.factor,
            config.padding.bound,
            config.receive_buffer.rows,
        )
