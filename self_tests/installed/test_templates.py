"""The adapters that `moe-conformance new` writes pass, and docs/adopting.md quotes the first of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_conformance.report import result

ROOT = Path(__file__).parents[2]
# The template: the option for it, and how many requirements pass on two ranks at least.
JUDGED = {"exchange": ((), 40), "layer": (("--layer",), 5), "router": (("--router",), 10)}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a folder."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [sys.executable, "-m", "moe_conformance.cli", *arguments],
        cwd=folder,
        env={**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


class TestAdopting:
    def test_it_quotes_the_adapter(self) -> None:
        """Its first block of Python is the template of an exchange, from its imports on."""
        template = ROOT / "moe_conformance" / "templates" / "exchange" / "my_adapter.py"
        text = template.read_text().partition("from __future__ import annotations\n\n")[2]
        first = (ROOT / "docs" / "adopting.md").read_text().split("```python\n")[1]
        assert text == first.partition("```")[0]


class TestNew:
    @pytest.mark.parametrize("kind", JUDGED)
    def test_what_it_writes_passes(self, tmp_path: Path, kind: str) -> None:
        """A run of it on two ranks ends with exit code 0, under the name of its file."""
        option, least = JUDGED[kind]
        written = run(tmp_path, "new", "our_moe.py", *option)
        assert 0 == written.returncode, written.stdout
        library = "my_library.py" if kind == "exchange" else f"my_{kind}_library.py"
        assert {"our_moe.py", library} == {path.name for path in tmp_path.iterdir()}
        assert "moe-conformance run --backend our_moe:Backend --ranks 4" in written.stdout
        done = run(tmp_path, "run", "--backend", "our_moe:Backend", "--ranks", "2", "--report", "report")
        assert 0 == done.returncode, done.stdout
        passed = [each for each in result.read(tmp_path / "report").requirements if each["verdict"] == "pass"]
        assert least <= len(passed), done.stdout

    def test_it_overwrites_nothing(self, tmp_path: Path) -> None:
        """Neither the adapter nor the library; a name that is no module is refused."""
        (tmp_path / "my_library.py").write_text("mine")
        for name, words in {"a.py": "my_library.py exists", "a-b.py": "cannot be imported", "a": "such as"}.items():
            refused = run(tmp_path, "new", name)
            assert (2, True) == (refused.returncode, words in refused.stdout), refused.stdout
        assert ["my_library.py"] == [path.name for path in tmp_path.iterdir()]
        assert "mine" == (tmp_path / "my_library.py").read_text()


class TestDoctor:
    def test_it_says_what_a_backend_offers(self, tmp_path: Path) -> None:
        """Where, which options are mapped, why not elsewhere, and what the session lacks; nothing is judged."""
        run(tmp_path, "new", "our_moe.py")
        told = run(tmp_path, "doctor", "--backend", "our_moe:Backend")
        assert 0 == told.returncode, told.stdout
        lines = [line.strip() for line in told.stdout.splitlines()]
        assert "exchange: single, ep2, ep4, ep2-edp2, tp2-ep2-edp2" in lines
        assert "not on ep2-etp2: not adapted: experts lie whole on one rank each, as many on every rank" in lines
        assert "maps: top_k = 1, experts = 6, bfloat16" in lines
        assert "limit on wrong_use: only False (one rank raises, the others wait)" in lines
        assert any(line.startswith("one run of each: exchange with the probe") for line in lines)
        (lacking,) = [line for line in lines if line.startswith("not in the session: ")]
        assert {"router", "layer", "scatter_add"} <= set(lacking.partition(": ")[2].split(", "))

    def test_what_is_built_and_fails_when_it_is_called_is_reported(self, tmp_path: Path) -> None:
        """An adapter whose library has changed the signature of a call builds its surface as before."""
        run(tmp_path, "new", "our_moe.py")
        (tmp_path / "changed.py").write_text(CHANGED)
        told = run(tmp_path, "doctor", "--backend", "changed:Changed", "--ranks", "1")
        assert 1 == told.returncode, told.stdout
        assert "exchange: single" in told.stdout
        assert "one run of each: none could be made" in told.stdout
        assert "rank 0 raised in forward:0: TypeError: unexpected argument" in told.stdout, told.stdout

    def test_a_gate_that_does_not_take_the_default_is_found(self, tmp_path: Path) -> None:
        """A router that always normalises is offered, and what it takes is told."""
        (tmp_path / "normal.py").write_text(BROKEN.replace("broken", "normal") + NORMALISES)
        told = run(tmp_path, "doctor", "--backend", "normal:Normal", "--ranks", "1")
        assert "router: single (with routing.normalise, not without)" in told.stdout, told.stdout

    def test_what_offers_nothing_or_breaks_is_told(self, tmp_path: Path) -> None:
        """An exception that is no refusal is shown as it is; so is a mistaken name, with the right one."""
        (tmp_path / "broken.py").write_text(BROKEN)
        told = run(tmp_path, "doctor", "--backend", "broken:Backend", "--ranks", "1")
        assert 1 == told.returncode
        assert "exchange: nowhere; failed: TypeError: no such argument" in told.stdout
        assert "it offers no surface on any layout" in told.stdout
        dotted = run(tmp_path, "doctor", "--backend", "broken.Backend")
        assert (2, True) == (dotted.returncode, "did you mean broken:Backend?" in dotted.stdout)


CHANGED = """
from our_moe import Backend, MyExchange, MySession


class Exchange(MyExchange):
    def dispatch(self, x, routing):
        raise TypeError("unexpected argument")


class Session(MySession):
    def exchange(self, config):
        super().exchange(config)
        return Exchange(config, self.topology)


class Changed(Backend):
    def open(self, topology, device):
        return Session(topology)
"""
BROKEN = """
from moe_conformance.contract import Session


class Broken(Session):
    def exchange(self, config):
        raise TypeError("no such argument")


class Backend:
    name, variants = "broken", ("default",)

    def versions(self):
        return {}

    def limits(self, variant):
        return ()

    def open(self, topology, device):
        return Broken()
"""

NORMALISES = """
from moe_conformance.contract import Unsupported


class Routers(Session):
    def router(self, config):
        if not config.routing.normalise:
            raise Unsupported("the weights are always normalised")
        return self


class Normal(Backend):
    def open(self, topology, device):
        return Routers()
"""
