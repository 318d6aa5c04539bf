"""Script of every child process: import a module and call its `main`, without the current folder on the import path.

`python -P run_module.py FOLDER MODULE ARGUMENTS`. `-P` keeps the folder of the script off the path as well, so modules
come from Python's own folders, PYTHONPATH and what is installed. Only pagoda itself, and the package of MODULE in
FOLDER, come from where the parent has them: that may be a checkout that only its current folder made importable.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def import_package(name: str, folder: str) -> None:
    """Import the package `name` from `folder`, without searching that for anything else, now or later."""
    spec = PathFinder.find_spec(name, [folder])
    assert spec is not None, f"no package {name} in {folder}"
    sys.modules[name] = importlib.util.module_from_spec(spec)
    if spec.loader is not None:  # it has an __init__.py
        spec.loader.exec_module(sys.modules[name])


def main() -> None:
    folder, module = sys.argv[1:3]
    del sys.argv[1:3]
    import_package("pagoda", str(Path(__file__).parents[2]))
    package = module.partition(".")[0]
    if package != "pagoda":
        import_package(package, folder)
    from pagoda.process.allocator import collecting_nothing

    with collecting_nothing():
        run = importlib.import_module(module).main
    run()


if __name__ == "__main__":
    main()
