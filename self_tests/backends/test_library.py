"""Which version of a library would be imported: the installed one, or that of a checkout in front of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_conformance.backends.library import Library, commit_of
from moe_conformance.contract import Unsupported
from moe_conformance.plugin.options import Unusable
from moe_conformance.plugin.run import open_backend

LIBRARY = Library(
    "some-library", "some_library.core", ">=1.4,<2", "pip install some-library", lambda root: (root / "V").read_text()
)


def made(folder: Path, version: str, *, installed: bool) -> Path:
    """Write the library into a folder, with the metadata of an installed one or the file of a checkout."""
    package = folder / "some_library" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    if installed:
        metadata = folder / f"some_library-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: some-library\nVersion: {version}\n")
    else:
        (folder / "V").write_text(version)
    return folder


def committed(folder: Path) -> str:
    """Commit all files of a folder, and return the first digits of the commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "All"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return head.stdout[:12]


class TestVersion:
    def test_an_installed_library_has_the_version_of_its_metadata(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing of the library is imported for it."""
        monkeypatch.syspath_prepend(made(tmp_path, "1.4.2", installed=True))
        assert "1.4.2" == LIBRARY.version()
        assert "some_library" not in sys.modules

    def test_a_checkout_in_front_has_its_own_version_and_commit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The metadata of the library that is installed behind it are not its own; changed files are reported."""
        monkeypatch.syspath_prepend(made(tmp_path / "installed", "1.4.2", installed=True))
        checkout = made(tmp_path / "checkout", "1.5.0rc0\n", installed=False)
        monkeypatch.syspath_prepend(checkout)
        assert "1.5.0rc0+unknown" == LIBRARY.version()
        commit = committed(checkout)
        assert f"1.5.0rc0+{commit}" == LIBRARY.version()
        (checkout / "some_library" / "core" / "__init__.py").write_text("changed = True\n")
        assert f"{commit}.modified" == commit_of(checkout)

    @pytest.mark.parametrize(
        ("version", "sentence"),
        [
            ("1.3", "some-library 1.3+unknown is not among the versions that this adapter supports (>=1.4,<2)"),
            ("2.0", "some-library 2.0+unknown is not among the versions"),
            ("of today", "declares no version"),
        ],
    )
    def test_a_version_that_is_not_supported_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, sentence: str
    ) -> None:
        """The sentence has the version that was found and those that are supported."""
        monkeypatch.syspath_prepend(made(tmp_path, version, installed=False))
        with pytest.raises(Unsupported) as raised:
            LIBRARY.version()
        assert sentence in str(raised.value)

    def test_a_library_that_is_not_here_is_refused_with_its_command(self) -> None:
        """The sentence ends with what installs it."""
        with pytest.raises(Unsupported) as raised:
            LIBRARY.version()
        assert "some-library is not installed: pip install some-library" == str(raised.value)


class WithLibrary:
    """A backend of the library above; it opens nothing."""

    name = "with-library"
    variants = ("default",)
    library = LIBRARY

    def versions(self) -> dict[str, str]:
        """That of the library."""
        return {"some-library": self.library.version()}

    def limits(self, variant: str) -> tuple[()]:
        """None."""
        return ()

    def open(self, topology: object, device: object) -> None:
        """Not called here."""


class TestCheckout:
    TARGET = "self_tests.backends.test_library:WithLibrary"

    def test_it_precedes_the_installed_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The backend reports the version of the checkout."""
        monkeypatch.setattr(sys, "path", [str(made(tmp_path / "installed", "1.4.2", installed=True)), *sys.path])
        assert {"some-library": "1.4.2"} == open_backend(self.TARGET)[1]
        checkout = made(tmp_path / "checkout", "1.9", installed=False)
        assert {"some-library": "1.9+unknown"} == open_backend(self.TARGET, str(checkout))[1]
        assert str(checkout) == sys.path[0]

    @pytest.mark.parametrize(
        ("folder", "sentence"), [("absent", "is no folder"), ("empty", "there is no some_library.core in")]
    )
    def test_a_wrong_folder_cannot_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, sentence: str
    ) -> None:
        """Else the installed library would be judged in place of the one that was named."""
        (tmp_path / "empty").mkdir()
        monkeypatch.setattr(sys, "path", [str(made(tmp_path / "installed", "1.4.2", installed=True)), *sys.path])
        with pytest.raises(Unusable) as raised:
            open_backend(self.TARGET, str(tmp_path / folder))
        assert sentence in str(raised.value)
