"""Runs scripts in forks of one process that has imported their library, which takes longer than any of them.

`python run_scripts.py MODULE,MODULE FOLDER SCRIPT...` writes what each prints to FOLDER, and prints their exit statuses
as JSON. Two run at a time. A script that ends by an exception other than SystemExit has the status 70.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import NoReturn

AT_ONCE = 2
RAISED = 70


def run_in_fork(script: Path, folder: Path) -> NoReturn:
    """Run a script as `python SCRIPT` does, with its output in the folder, and end this process."""
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{script.stem}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    try:
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = RAISED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_all(scripts: list[Path], folder: Path) -> dict[str, int]:
    """Return the exit status of each script, by its name; negative where a signal ended it."""
    running: dict[int, str] = {}
    ended: dict[str, int] = {}
    for script in [*scripts, None]:
        while running and (script is None or len(running) == AT_ONCE):
            child, status = os.wait()
            ended[running.pop(child)] = os.waitstatus_to_exitcode(status)
        if script is not None:
            child = os.fork()
            if child == 0:
                run_in_fork(script, folder)
            running[child] = script.stem
    return ended


if __name__ == "__main__":
    modules, folder, *scripts = sys.argv[1:]
    for module in modules.split(","):
        with contextlib.suppress(ImportError):  # not in every version: the script that needs it says so
            importlib.import_module(module)
    print(json.dumps(run_all([Path(script) for script in scripts], Path(folder))))
