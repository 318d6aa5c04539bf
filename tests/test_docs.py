"""The documentation keeps its promises: links lead somewhere, the index is complete, the first example runs."""

import functools
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import pagoda
from pagoda.base.vllm_options import ALIASES, IGNORED, REFUSED
from tests.cached_models import cached_model

ROOT = Path(__file__).parent.parent
OTHER_PROGRAMS_FLAGS = {
    "--block",
    "--head",
    "--address",
    "--node-ip-address",
    "--generate",
    "--num-cpus",
    "--no-deps",
    "--only-binary",
    "--only",
    "--list",
    "--task",
    "--weight-format",
}
"""Flags of ray, pip, optimum-cli, benchmarks/gpu.py."""
OTHER_PROGRAMS_FLAGS |= {"--build", "--cpus", "--env", "--extra-index-url", "--filename", "--from-literal", "--memory"}
OTHER_PROGRAMS_FLAGS |= {"--publish", "--rm", "--shm-size", "--stop-timeout", "--tag", "--volume"}
"""Flags of docker and kubectl, too."""
OTHER_PROGRAMS_FLAGS |= {"--" + option.replace("_", "-") for option in (*ALIASES, *IGNORED, *REFUSED)}

FOLDERS = ("docs", "benchmarks", "examples")
PAGES = sorted([*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_links_to_headings_lead_to_headings() -> None:
    missing: list[str] = []
    found = 0
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
            text = (page.parent / target).read_text() if target else page.read_text()
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            found += 1
            if anchor not in slugs:
                missing.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert missing == []
    assert found > 20


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_excerpts_equal_the_files() -> None:
    """A Python block that begins with a file's name holds lines of that file."""
    found = 0
    for page in PAGES:
        for indent, path, block in re.findall(
            r"^( *)```python\n *# (pagoda/\S+\.py)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            lines = [line.removeprefix(indent) for line in block.splitlines()]
            assert "\n".join(lines) in (ROOT / path).read_text(), f"{page.name}: {path}"
            found += 1
    assert found


def test_the_reference_equals_the_code() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "reference" / "generate.py"))["pages"]()
    assert len(made) == 10
    for name, text in made.items():
        assert (ROOT / "docs" / "reference" / name).read_text() == text, f"{name} is not current: run `make docs`"


def test_the_reference_leaves_nothing_out() -> None:
    """Names that a user meets, found in another way than the generator finds them."""
    pages = {path.name: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    help_of_serve = re.sub(r"-\n\s+", "-", _help("serve"))  # a flag in a sentence may be broken at a hyphen
    flags = set(re.findall(r"--[a-z][\w-]+", help_of_serve)) - {"--help"}
    assert len(flags) > 40
    assert {flag for flag in flags if f"`{flag}`" not in pages["settings.md"]} == set()
    commands = set(re.findall(r"^  ([a-z][\w-]+) ", _help(), re.MULTILINE))
    assert {"generate", "serve", "plan"} <= commands
    assert {name for name in commands if f"pagoda {name}" not in pages["cli.md"]} == set()
    assert {name for name in pagoda.__all__ if f"## {name}\n" not in pages["python-api.md"]} == set()
    metrics = set(re.findall(r'"vllm:(\w+)"', (ROOT / "pagoda" / "metrics" / "prometheus.py").read_text()))
    assert {name for name in metrics if f"`vllm:{name}" not in pages["metrics.md"]} == set()


def test_monitoring_names_metrics_that_exist() -> None:
    named = re.findall(r"\b(vllm:\w+|http_\w+_total)\b", (ROOT / "docs" / "howto" / "monitoring.md").read_text())
    known = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} - {"vllm:num_requests"}  # a pattern of grep
    assert len(plain) > 10
    assert {name for name in plain if f"`{name}`" not in known} == set()


def test_the_chinese_readme_has_the_same_commands_and_figures() -> None:
    """Both have the same commands, code, links and numbers; only the sentences differ."""
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    assert _code(english) == _code(chinese)
    assert len(_code(english)) > 10
    assert _targets(english) - {"README.zh-CN.md"} == _targets(chinese) - {"README.md"}
    assert _numbers(english) == _numbers(chinese)
    assert len(_numbers(english)) > 20


def _code(page: str) -> list[str]:
    """Return the lines of all code blocks without comments, then the text in backquotes, sorted."""
    blocks = re.findall(r"^```.*?^```", page, re.DOTALL | re.MULTILINE)
    lines = [line.partition("  #")[0].rstrip() for block in blocks for line in block.splitlines()]
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return [*lines, *sorted(set(re.findall(r"`([^`]+)`", text)))]


def _targets(page: str) -> set[str]:
    return set(re.findall(r"\]\(([^)]+)\)", page))


def _numbers(page: str) -> list[str]:
    """Every number of the page, code included, sorted: sentences may have another order."""
    return sorted(re.findall(r"\d[\d,.]*\d|\d", page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_exist(page: Path) -> None:
    """A path is one below pagoda/ or the checkout, or the end of one (`kv/manager.py`, `policy.py`)."""
    known = _source_files()
    named = re.findall(r"`([\w/]+\.(?:py|cpp|h))\b", page.read_text())
    placeholders = {"abi.h", *(path for path in named if "NAME" in path)}  # abi.h is generated when kernels are built
    assert [path for path in named if path not in placeholders and not any(f.endswith(f"/{path}") for f in known)] == []


@functools.cache
def _source_files() -> list[str]:
    folders = ("pagoda", "tests", "benchmarks", "examples", "docs")
    found = (path for name in folders for end in ("py", "cpp", "h") for path in (ROOT / name).rglob(f"*.{end}"))
    return [f"/{path.relative_to(ROOT)}" for path in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_that_pages_name_exist(page: Path) -> None:
    if page.parent.name == "peers":
        pytest.skip("other engines' flags")
    reference = (ROOT / "docs" / "reference" / "settings.md").read_text()
    reference += (ROOT / "docs" / "reference" / "cli.md").read_text() + _help()
    known = set(re.findall(r"--[a-z][\w-]+", reference)) | OTHER_PROGRAMS_FLAGS | {"--no-"}
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page.read_text())) - known
    assert {flag for flag in named if f'"{flag}"' not in scripts} == set()


@functools.cache
def _help(*command: str) -> str:
    line = [sys.executable, "-m", "pagoda", *command, "--help"]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=120).stdout


def test_the_readme_s_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cached_model("smollm2-135m")
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(examples) == 1
    exec(compile(examples[0], "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.startswith("The capital of France is ->  Paris")
