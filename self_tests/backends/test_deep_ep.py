"""The adapter to DeepEP, over a stand-in with its signatures: real checks pass on it, and see through a broken one."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from moe_conformance.backends.deep_ep import DeepEP
from moe_conformance.contract import Config, Session, Unsupported
from moe_conformance.contract.topology import Layout, Topology
from moe_conformance.stand_ins import deep_ep
from self_tests.backends.stand_in_deep_ep import Buffer, DeepEPStandIn
from self_tests.plugin.plugin_runs import cli

CPU = torch.device("cpu")
EP2 = Layout(2, ep=2)
SCRIPTS = 5  # in bfloat16


class StaleBuffer(Buffer):
    """A buffer whose cached dispatch is one row off."""

    def dispatch(self, x: Tensor, handle: Any = None, **given: Any) -> tuple[Any, ...]:  # type: ignore[override]
        """Turn the rows."""
        rows_RD, *rest = super().dispatch(x, handle, **given)
        return (rows_RD if handle is None else rows_RD.roll(1, 0), *rest)


class LooseBuffer(Buffer):
    """A buffer that adds the first of two biases only."""

    def combine(self, x: Tensor, handle: Any, **given: Any) -> tuple[Tensor, Tensor | None, object]:  # type: ignore[override]
        """Drop the second."""
        bias = given.pop("bias", None)
        return super().combine(x, handle, bias=bias[0] if isinstance(bias, tuple) else bias, **given)


class TurnedBuffer(Buffer):
    """A buffer that adds up weights in another order of slots than they were sent in."""

    def combine(self, x: Tensor, handle: Any, **given: Any) -> tuple[Tensor, Tensor | None, object]:  # type: ignore[override]
        """Turn the slots."""
        y_TD, weights_TK, event = super().combine(x, handle, **given)
        return y_TD, None if weights_TK is None else weights_TK.roll(1, 1), event


class Stale(DeepEPStandIn):
    """The adapter over the first."""

    name: ClassVar[str] = "stale"

    def library(self) -> Any:
        """Return what the adapter takes from the module."""
        return SimpleNamespace(Buffer=StaleBuffer)


class Loose(DeepEPStandIn):
    """The adapter over the second."""

    name: ClassVar[str] = "loose"

    def library(self) -> Any:
        """Return what the adapter takes from the module."""
        return SimpleNamespace(Buffer=LooseBuffer)


class Turned(DeepEPStandIn):
    """The adapter over the third."""

    name: ClassVar[str] = "turned"

    def library(self) -> Any:
        """Return what the adapter takes from the module."""
        return SimpleNamespace(Buffer=TurnedBuffer)


def checked(backend: type[DeepEPStandIn], folder: Path, only: str) -> tuple[int, str]:
    """Run checks on a backend of these tests, on two ranks."""
    module = "self_tests.backends.stand_in_deep_ep" if backend is DeepEPStandIn else "self_tests.backends.test_deep_ep"
    target = f"{module}:{backend.__name__}"
    done = cli("run", "--backend", target, "--ranks", "2", "--only", only, "--", "-q", "-k", "bfloat16", cwd=folder)
    return done.status, done.output


class TestWhereItIsNotInstalled:
    @pytest.mark.skipif(find_spec("deep_ep") is not None, reason="DeepEP is installed here")
    def test_a_run_says_so_and_ends_with_2(self, tmp_path: Path) -> None:
        """What is missing is told in a sentence, before anything starts."""
        done = cli("run", "--backend", "moe_conformance.backends.deep_ep:DeepEP", "--ranks", "2", cwd=tmp_path)
        assert 2 == done.status
        assert "deep_ep is not installed: it is built on a machine with GPUs" in " ".join(done.output.split())

    def test_importing_the_adapter_does_not_import_the_library(self) -> None:
        """A driver that only lists backends stays light."""
        code = "import sys, moe_conformance.backends.deep_ep; sys.exit('deep_ep' in sys.modules)"
        assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


class TestChecks:
    def test_real_checks_pass_over_the_stand_in(self, tmp_path: Path) -> None:
        """Handles, biases, gradients, dtypes and argument order: all scripts in bfloat16 pass on gloo ranks."""
        status, output = checked(DeepEPStandIn, tmp_path, "EXCH-08,EXCH-27,EXCH-28,EXCH-31,GRAD-03")
        assert 0 == status, output
        assert f"{2 * SCRIPTS} pass" in output

    def test_a_cached_dispatch_that_moves_rows_is_seen(self, tmp_path: Path) -> None:
        """The check of reused handles fails, and tells the row and the token."""
        status, output = checked(Stale, tmp_path, "EXCH-27")
        assert 1 == status
        assert "instead of rank 0 token 1; call 0 had rank 0 token 1 there" in " ".join(output.split())

    def test_a_lost_bias_is_seen(self, tmp_path: Path) -> None:
        """The check of biases fails."""
        status, output = checked(Loose, tmp_path, "EXCH-31")
        assert 1 == status
        assert "y of call" in output

    def test_gradients_of_other_slots_weights_are_seen(self, tmp_path: Path) -> None:
        """The check of weights that travel fails."""
        status, output = checked(Turned, tmp_path, "GRAD-03")
        assert 1 == status
        assert "the gradient of weights_TK of dispatch (call 1) through combine (call 2)" in " ".join(output.split())


class TestRefusals:
    @pytest.mark.parametrize(
        ("layout", "fields", "reason"),
        [
            (EP2, {"dtype": torch.float32}, "torch.bfloat16 only, not of torch.float32"),
            (EP2, {"hidden": 40}, "a multiple of 16 columns, not of 40"),
            (Layout(2, etp=2), {}, "no shards of an expert: etp = 2"),
            (EP2, {"wire": "float8"}, "does not map wire='float8'"),
        ],
    )
    def test_what_it_cannot_ask_for_is_refused(self, layout: Layout, fields: dict[str, Any], reason: str) -> None:
        """The adapter says what was asked, in its own name."""
        config = Config().changed({"variant": "normal", "dtype": torch.bfloat16, **fields})
        with pytest.raises(Unsupported, match=reason) as refusal:
            session(layout).token_exchange(config)
        assert "adapter" == refusal.value.by

    def test_the_kernels_want_a_gpu(self) -> None:
        """On CPU ranks nothing is run, and the limit says why."""
        (limit,) = DeepEP().limits("normal")
        assert ("device", ("cuda",), "undefined") == (limit.on, limit.allowed, limit.proof)


class TestStandIn:
    def test_it_has_the_groups_that_the_library_has(self) -> None:
        """A group of one rank has no recommended configuration."""
        with pytest.raises(AssertionError, match="Unsupported number of EP ranks: 1"):
            Buffer.get_dispatch_config(1)
        assert deep_ep.topk_idx_t == torch.int64


def session(layout: Layout) -> Session:
    """A session of rank 0 that may build what needs no process group."""
    return DeepEPStandIn().open(Topology(layout, 0, {}), CPU)
