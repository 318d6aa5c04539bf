"""The page to chat on, in a browser."""

import hashlib
import json
from collections.abc import Iterator

import pytest

from pagoda.server.pages.files import STATIC
from tests.server.chromium import Page, browsing
from tests.server.live import LiveServer

VENDOR = STATIC / "chat" / "vendor"


def test_libraries_are_those_that_the_list_names() -> None:
    libraries = json.loads((VENDOR / "libraries.json").read_text())
    licences = (VENDOR / "LICENSES.txt").read_text()
    assert {file.stem for file in VENDOR.glob("*.js")} == set(libraries)
    for name, library in libraries.items():
        assert hashlib.sha256((VENDOR / f"{name}.js").read_bytes()).hexdigest() == library["sha256"], "make vendor"
        assert f"==== {name}@{library['version']}: {library['licence']}" in licences


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


def opened(page: Page, url: str) -> None:
    """Open the page, and wait until it knows the model."""
    page.problems.clear()
    page.open(url)
    page.wait("document.querySelector('.bar select').value")


def say(page: Page, text: str) -> None:
    page.call("Input.insertText", text=text)
    page.wait(f"document.activeElement.value == {json.dumps(text)}")
    page.press("Enter")


IS_DONE = "document.querySelector('.message:last-child .stats') && !document.querySelector('[aria-busy=true]')"


def test_it_streams_an_answer(page: Page, real_server: LiveServer) -> None:
    opened(page, real_server.url)
    page.run("document.querySelector('.welcome button').click()")
    page.wait(IS_DONE)
    assert page.text(".assistant .markdown")
    assert page.problems == []
