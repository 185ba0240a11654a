"""Environments on top of another: what most of them need alike (torch and this checkout) is installed once.

An environment that says `on_top_of = base` in tox.ini sees the packages of `base` behind its own. `base` is made when
the first of them runs, and again by tox, which knows what is there, when a file that says what is in it has changed.
tox loads this file by its name: https://tox.wiki/en/latest/plugins.html.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from filelock import FileLock
from tox.config.sets import EnvConfigSet
from tox.plugin import impl
from tox.session.state import State
from tox.tox_env.api import ToxEnv
from tox.tox_env.errors import Fail
from tox.tox_env.python.api import Python


@impl
def tox_add_env_config(env_conf: EnvConfigSet, state: State) -> None:
    """Add the key `on_top_of`."""
    env_conf.add_config("on_top_of", of_type=str, default="", desc="environment whose packages are seen behind its own")


@impl
def tox_before_run_commands(tox_env: ToxEnv) -> None:
    """Make the environment below, and have this one see it.

    Raises:
        Fail: the environment below cannot be made; tox has said why.
    """
    below = tox_env.conf["on_top_of"] if isinstance(tox_env, Python) else ""
    if not below:
        return
    root: Path = tox_env.core["tox_root"]
    work: Path = tox_env.core["work_dir"]
    made = work / below / "made-for.txt"
    work.mkdir(parents=True, exist_ok=True)
    with FileLock(work / f"{below}.lock"):  # jobs may run side by side
        asked = "".join((root / name).read_text("utf-8") for name in ("tox.ini", "pyproject.toml", "constraints.txt"))
        # tox installs an editable checkout anew each time, and what runs beside this would miss it meanwhile.
        if not made.is_file() or made.read_text("utf-8") != asked:
            tox = [sys.executable, "-m", "tox", "run", "--workdir", str(work), "-e", below, "--notest"]
            if subprocess.run(tox, cwd=root, check=False).returncode:
                raise Fail(f"{tox_env.conf.name} is on top of {below}, which could not be made")
            made.write_text(asked, "utf-8")
    # Unlike a line with a path, `addsitedir` follows the .pth files there too: one of them is the editable install.
    own: Path = tox_env.conf["env_site_packages_dir"]
    packages = work / below / own.relative_to(tox_env.conf["env_dir"])
    (own / f"{below}.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n", "utf-8")
