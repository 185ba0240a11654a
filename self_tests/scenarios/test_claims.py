"""What a backend claims: values that the annotations allow, one for all surfaces of a run, and nothing in resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch

from moe_conformance.contract import Claims, Malformed
from moe_conformance.scenarios.reported import claims_of, claims_of_all, shown_of, without_noise


class Surface:
    """Something built that claims and shows what it is told to."""

    def __init__(self, claims: Any, **resolved: str) -> None:
        """Take both."""
        self.claims, self.resolved = claims, resolved


class Silent:
    """One that claims nothing."""

    resolved: Mapping[str, str] = {"surface": "silent"}


class Faulty(Silent):
    """One whose claims raise."""

    @property
    def claims(self) -> Claims:
        """Look at something that is not there."""
        return Claims(multiple=self.multiple)  # type: ignore[attr-defined]  # the fault


class TestValues:
    @pytest.mark.parametrize(
        ("field", "value", "allowed"),
        [
            ("wire", "token", "allowed: 'pairs', 'tokens', 'all', 'copies'"),
            ("wire", None, "allowed: 'pairs'"),
            ("multiple", "4", "allowed: an integer of at least 1"),
            ("multiple", 0, "allowed: an integer of at least 1"),
            ("multiple", True, "allowed: an integer of at least 1"),
            ("alignment", 0, "allowed: an integer of at least 1, None"),
            ("capacity_over", "ep", "allowed: 'tp', None"),
            ("dtype", "torch.float32", "allowed: a torch.dtype, None"),
        ],
    )
    def test_an_unknown_value_is_refused(self, field: str, value: Any, allowed: str) -> None:
        """The message has the field, the value and what is allowed."""
        with pytest.raises(Malformed, match=rf"Claims\.{field} is {value!r}; {allowed}"):
            Claims(**{field: value})

    def test_a_misspelt_field_is_refused(self) -> None:
        """As of every dataclass."""
        with pytest.raises(TypeError, match="wires"):
            Claims(wires="all")  # type: ignore[call-arg]  # the fault

    def test_every_field_has_a_default(self) -> None:
        """Nothing that differs is claimed by it."""
        assert {} == Claims().changed
        assert {"multiple": 4, "dtype": torch.float32} == Claims(multiple=4, dtype=torch.float32).changed

    def test_every_field_is_checked(self) -> None:
        """No value of a type that none of them has is let through."""
        for field in fields(Claims):
            with pytest.raises(Malformed, match=field.name):
                Claims(**{field.name: ()})  # type: ignore[arg-type]  # the fault


class TestSurfaces:
    def test_a_surface_without_claims_is_the_default(self) -> None:
        """The property is optional."""
        assert Claims() == claims_of(Silent())

    def test_a_property_that_fails_is_not_an_absent_one(self) -> None:
        """An AttributeError inside it is the backend's fault."""
        with pytest.raises(AttributeError, match="multiple"):
            claims_of(Faulty())

    def test_claims_are_of_their_type(self) -> None:
        """A dictionary could hold anything."""
        with pytest.raises(Malformed, match=r"Surface\.claims is of type dict; expected Claims"):
            claims_of(Surface({"wire": "all"}))

    def test_surfaces_claim_together(self) -> None:
        """What one of them says of a field, and what another of others."""
        found = claims_of_all([Surface(Claims(wire="all")), Silent(), Surface(Claims(wire="all", multiple=4))])
        assert Claims(wire="all", multiple=4) == found

    def test_two_values_of_one_field_are_refused(self) -> None:
        """Unless one of them is the default."""
        with pytest.raises(Malformed, match="two surfaces claim wire = 'all' and 'tokens'; expected one value"):
            claims_of_all([Surface(Claims(wire="all")), Surface(Claims(wire="tokens"))])


class TestShown:
    @pytest.mark.parametrize("claims", [Claims(), Claims(wire="all")])
    def test_a_claim_in_resolved_is_refused(self, claims: Claims) -> None:
        """No check reads it there, and who wrote it believes that one does."""
        with pytest.raises(
            Malformed, match=r"Surface.resolved\['wire'\] is 'tokens', and Surface claims '(pairs|all)'"
        ):
            claims_of(Surface(claims, wire="tokens"))

    def test_what_is_claimed_may_be_shown(self) -> None:
        """The same value is no contradiction."""
        claims = Claims(multiple=4, dtype=torch.float32)
        assert claims == claims_of(Surface(claims, multiple="4", dtype="torch.float32", path="fused"))

    def test_reports_show_claims(self) -> None:
        """Beside what the surfaces show of themselves."""
        shown = shown_of([Surface(Claims(), path="fused"), Silent()], Claims(dtype=torch.float32))
        assert {"path": "fused", "surface": "silent", "dtype": "torch.float32"} == shown


class TestNoise:
    def test_noise_is_switched_off(self) -> None:
        """By the method that `nn.Module` has; a surface that claims none is left as it is."""
        noisy = torch.nn.Identity()
        without_noise(noisy)
        assert noisy.training
        noisy.claims = Claims(noise="training")  # type: ignore[assignment]  # nn.Module takes modules and tensors
        without_noise(noisy)
        assert not noisy.training

    def test_what_cannot_be_switched_off_is_malformed(self) -> None:
        """The suite has no other way to a router without noise."""
        with pytest.raises(Malformed, match=r"Surface claims noise = 'training' and has no method train\(mode\)"):
            without_noise(Surface(Claims(noise="training")))
