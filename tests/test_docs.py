"""The documentation keeps its promises: links lead somewhere, the index is complete, the first example runs."""

import re
from pathlib import Path

import pytest

from tests.cached_models import cached_model

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_excerpts_are_what_the_files_say() -> None:
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


def test_the_readme_s_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cached_model("smollm2-135m")
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    exec(compile(example[1], "README.md", "exec"), {"__name__": "readme"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("The capital of France is ->  Paris")
