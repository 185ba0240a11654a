"""Whether a method takes what a script passes: what it does not take is not adapted."""

from __future__ import annotations

from moe_conformance.scenarios.calling import takes


class Combining:
    """Combines without biases."""

    def combine(self, rows_RD: object, handle: object) -> object:
        """Return the rows."""
        return rows_RD, handle


class TestTakes:
    def test_names_of_its_own_are_taken_by_position(self) -> None:
        """An adapter is free to name its parameters."""
        assert takes(Combining().combine, ("rows_RD", "handle"))
        assert takes(Combining().combine, ("rows", "known"))

    def test_an_argument_too_many_is_not_taken(self) -> None:
        """A combine that adds no biases has no parameter for them."""
        assert not takes(Combining().combine, ("rows_RD", "handle", "biases"))

    def test_an_argument_too_few_is_taken(self) -> None:
        """What the method asks for beyond them raises when it is called: a failure, and not a part left out."""
        assert takes(Combining().combine, ("rows_RD",))
        assert takes(Combining().combine, ())
