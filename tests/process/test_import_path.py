"""Nothing in the current folder is imported, neither by the command nor by any process that it starts."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pagoda
from pagoda.process.child_process import end_child, module_command, start_child

SOURCES = sorted(Path(pagoda.__path__[0]).rglob("*.py"))
CHILDREN = ("pagoda.assembly.engine_process", "pagoda.assembly.rank_process", "pagoda.server.api_process")
CHILD = """
import pagoda, zmq, sys

def main():
    print(pagoda.__path__[0], sys.argv[1:])
"""
COLLECTING_CHILD = """
import gc
while_imported = gc.isenabled()

def main():
    print(while_imported, gc.isenabled(), gc.get_freeze_count() > 10_000)
"""
STARTERS = {"start_child", "module_command", "safe_python"}
"""What starts a Python process, with a safe path."""


def _imported_names() -> set[str]:
    """Return the outermost packages of all modules that pagoda imports, but for those that Python has loaded before."""
    found: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found.add(node.module.partition(".")[0])
    loaded = subprocess.check_output(
        [sys.executable, "-P", "-c", "import runpy, sys, pagoda; print(*sys.modules)"], text=True
    )
    return found - set(loaded.split())


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module of the name of each one that pagoda imports, which leaves a file `executed-NAME`."""
    folder = tmp_path_factory.mktemp("hostile")
    names = _imported_names()
    assert {"zmq", "json", "torch", "numpy", "msgspec", "typer"} <= names
    for name in names:
        mark = str(folder / f"executed-{name}")
        (folder / f"{name}.py").write_text(f"open({mark!r}, 'w')\nraise SystemExit(9)")
    return folder


@pytest.fixture(autouse=True)
def nothing_executed(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(hostile)
    yield
    assert not list(hostile.glob("executed-*"))


def test_a_hostile_module_would_be_executed(hostile: Path) -> None:
    """The test of the test."""
    assert subprocess.run([sys.executable, "-c", "import zmq"]).returncode == 9
    (hostile / "executed-zmq").unlink()


@pytest.mark.parametrize("module", CHILDREN)
def test_a_child_process_imports_nothing_from_the_current_folder(module: str, hostile: Path) -> None:
    child = start_child(module, [str(hostile / "none")], b"")
    assert end_child(child, grace_s=60) == 0


@pytest.mark.parametrize("command", [[sys.executable, "-m", "pagoda"], module_command("pagoda.__main__")])
def test_the_command_imports_nothing_from_the_current_folder(command: list[str]) -> None:
    done = subprocess.run([*command, "plan", "smollm2-135m", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_child_has_the_package_that_its_parent_has_and_nothing_else_of_its_folder(tmp_path: Path) -> None:
    """A checkout that is not installed, but is the current folder."""
    (tmp_path / "pagoda").symlink_to(pagoda.__path__[0])
    (tmp_path / "zmq.py").write_text("raise SystemExit(9)")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "child.py").write_text(CHILD)
    code = "from pagoda.process.child_process import *; end_child(start_child('mine.child', ['a'], b''), 60)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / 'pagoda'} ['a']\n", done.stderr


def test_a_child_collects_no_garbage_while_it_imports_and_does_afterwards(tmp_path: Path) -> None:
    """Which would take a tenth of its start."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "child.py").write_text(COLLECTING_CHILD)
    code = "from pagoda.process.child_process import *; end_child(start_child('mine.child', [], b''), 60)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "False True True\n", done.stderr


def test_all_python_processes_start_with_a_safe_path() -> None:
    """Each place that starts one is known here, and none makes up a command of its own."""
    starting: set[str] = set()
    for path in SOURCES:
        name = str(path.relative_to(Path(pagoda.__path__[0]).parent).with_suffix("")).replace(os.sep, ".")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in STARTERS:
                starting.add(name)
            if isinstance(node, ast.List | ast.Tuple) and "sys.executable" in map(ast.unparse, node.elts):
                assert name == "pagoda.process.child_process", f"{name} makes up a command of Python"
    assert starting == {
        "pagoda.process.child_process",
        "pagoda.engine.clients.engine_link",  # CHILDREN
        "pagoda.executors.multi_process",
        "pagoda.server.api_group",
        "pagoda.server.dialects.ollama.names",  # the command
        "pagoda.loading.fetch_wheel",  # pip
        "pagoda.cli.bench.startup",  # the command
    }
