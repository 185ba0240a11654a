"""What judges differentiate is a copy of what the workload holds."""

from __future__ import annotations

from pathlib import Path

import torch

import moe_conformance

ROOT = Path(moe_conformance.__file__).parent
JUDGES = sorted({*ROOT.glob("judging/**/*.py"), *ROOT.glob("chapters/*/judge/*.py")})


class TestLeaves:
    def test_double_is_no_copy(self) -> None:
        """A tensor in float64 is returned as it is, so that gradients of several variants would add up in it."""
        x = torch.zeros(1, dtype=torch.float64)
        assert x.double() is x
        assert x.to(torch.float64, copy=True) is not x

    def test_no_judge_differentiates_what_it_was_given(self) -> None:
        """None asks for gradients of what `double` returns."""
        assert len(JUDGES) > 50
        assert [] == [path.name for path in JUDGES if ".double().requires_grad_()" in path.read_text()]
