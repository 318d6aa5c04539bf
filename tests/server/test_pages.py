"""The files of all pages; the dashboard, and what a browser makes of it."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pagoda.server.pages.files import PAGE_PATHS, STATIC
from pagoda.server.pages.rules import HEADERS
from tests.server.chromium import Page, browsing
from tests.server.live import FAKE_ENGINE, LiveServer, serving
from tests.server.test_chat_page import HAS_MODEL, IS_DONE, STATS, write
from tests.server.test_page_rules import ask
from tests.server.test_requests import slowed, streaming
from tests.server.test_several_models import TABLES


def test_files_open_without_a_key_load_only_from_here_and_hold_no_data(keyed_server: LiveServer) -> None:
    assert {"/dashboard", "/dashboard/main.js", "/dashboard/dashboard.css"} <= PAGE_PATHS
    for path in PAGE_PATHS:
        status, text, headers = ask(keyed_server, path)
        file = STATIC / (path[1:] if "." in path else f"{path[1:]}.html")
        assert (status, text) == (200, file.read_text())
        assert {name: headers[name] for name in HEADERS} == HEADERS
        assert ask(keyed_server, path, If_None_Match=headers["etag"])[0] == 304
        if "/vendor/" in path:
            continue  # of others: test_chat_page.py
        assert not re.search(r"(src|href|from|import)\W+https?:", text), path
        assert not re.search(r" style=| on\w+=\"|<script>|innerHTML", text), path  # what the policy forbids
    for path in ("/requests", "/requests/x", "/dashboard/stream", "/dashboard/nothing.js", "/dashboard/../main.js"):
        assert ask(keyed_server, path)[0] == 401


def test_the_root_is_the_page_to_chat_on_for_browsers_only(keyed_server: LiveServer) -> None:
    status, text, headers = ask(keyed_server, "/", Accept="text/html,application/xhtml+xml")
    assert (status, text) == (200, (STATIC / "chat.html").read_text())
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert ask(keyed_server, "/", Accept="text/html", If_None_Match=headers["etag"])[0] == 304
    assert ask(keyed_server, "/", Accept="application/json")[0] == 404
    status, _, headers = ask(keyed_server, "/dashboard/", Accept="text/html,application/xhtml+xml")
    assert (status, headers["location"]) == (307, "../dashboard")
    assert ask(keyed_server, "/")[0] == 404
    assert isinstance(headers, http.client.HTTPMessage)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


NUM_ROWS = "[...document.querySelectorAll('.row')].filter(row => !row.hidden).length"
IS_UP = "document.querySelector('#engine').dataset.state == 'up'"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_it_shows_what_runs_on_any_screen(page: Page, fake_server: LiveServer, width: int, dark: bool) -> None:
    page.problems.clear()
    page.show(width, 850, dark=dark)
    with slowed(fake_server), ExitStack() as streams:
        for number in range(3):
            streams.enter_context(streaming(fake_server, f"seen-{number}"))
        page.open(f"{fake_server.url}/dashboard")
        page.wait(f"{NUM_ROWS} == 3 && {IS_UP}")
        height = page.run("document.body.scrollHeight")
        page.wait("!document.querySelector('#now-steps').textContent.startsWith('none')")
        assert "running" in page.text(".row")
        assert re.match(r"\d+ of 512 blocks in use", page.text("#now-blocks"))
        assert page.run("document.body.scrollHeight") == height  # nothing moves as figures come
        assert page.run("document.documentElement.scrollWidth") <= width
        background = page.run("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", background)[0]) < 128) is dark
        assert page.problems == []
        drawn = "(id) => new Set(document.querySelector(id).getContext('2d').getImageData(0, 0, 300, 60).data).size > 4"
        page.wait(f"['#output', '#steps', '#blocks'].every({drawn})")


def test_it_is_used_from_the_keyboard(page: Page, fake_server: LiveServer) -> None:
    page.problems.clear()
    page.show(1280, 850)
    with slowed(fake_server), streaming(fake_server, "first"), streaming(fake_server, "second"):
        page.open(f"{fake_server.url}/dashboard")
        page.wait(f"{NUM_ROWS} == 2")
        page.press("/", "/")
        for letter in "sec":
            page.press(letter, letter)
        page.wait(f"{NUM_ROWS} == 1")
        page.press("Tab")
        assert page.run("document.activeElement.id") == "list"
        page.press("ArrowDown")
        page.press("Enter")
        page.wait("document.querySelector('#detail').open && document.querySelectorAll('#detail li').length")
        assert page.text("#detail-id") == "cmpl-second"
        assert "first token" in page.text("#detail-timeline")
        assert page.run("document.querySelector('#detail-miss').hidden")
        shown = json.dumps(page.run("document.querySelector('#detail-facts').innerText"))
        page.wait(f"document.querySelector('#detail-facts').innerText != {shown}")  # it is no snapshot
        page.press("Escape")
        page.wait("!document.querySelector('#detail').open")
    assert page.problems == []


def test_it_says_why_a_request_waits_and_where_its_prompt_differs(page: Page, tmp_path: Path) -> None:
    page.problems.clear()
    page.show(1280, 850)
    pools = ("--num-blocks", "512", "--num-host-blocks", "64", "--max-model-len", "8000")
    first, other = (
        {"prompt": f"The time in this very place is now {time}. " + "Answer. " * 200, "max_tokens": 1900}
        for time in ("12:04", "12:05")
    )
    with serving(tmp_path, *FAKE_ENGINE[:2], *pools, stepped=True) as server:
        waits = threading.Thread(
            target=server.post, args=("/v1/completions", {"prompt": [9] * 7900, "max_tokens": 1, "request_id": "third"})
        )
        with slowed(server), streaming(server, "first", **first), streaming(server, "second", **other):
            waits.start()
            page.open(f"{server.url}/dashboard")
            page.wait(f"{IS_UP} && document.querySelector('#list').innerText.includes('waits for ')")
            assert re.search(r"waits for \d+ blocks: it takes 494, \d+ are free; held by cmpl-", page.text("#list"))
            assert page.text("#now-host") == "64 blocks are free for the KV of preempted requests"
            page.run("[...document.querySelectorAll('.row')].find(row => row.innerText.includes('second')).click()")
            page.wait("!document.querySelector('#detail-miss').hidden")
            differs = "Prefix cache: it differs from cmpl-first from token 13 on (block 0): '5' here, '4' there"
            assert page.text("#detail-miss") == differs
        waits.join(30)
    assert page.problems == []


_MANY = """
const frame = (at) => ({now: at, as_of_s: 0, engine: "up", restarts: 0, prompt_tokens: 10 * at, output_tokens: 20 * at,
  ttft: [0, at], itl: [0, at], running: 64, waiting: 9936, swapped: 0, in_line: 0, blocks: 4096, free_blocks: 0,
  free_host_blocks: 0, preemptions: 0, prefix_queries: 0, prefix_hits: 0, steps: [], gone: [], cells: [0, 4096],
  host_cells: [], owners: [], others: {running: 0, waiting: 0},
  requests: Array.from({length: at == 1 ? 10000 : 64}, (_, i) => [`many-${i}`, "running", 9, 9, at, 0, 1, 0, ""])});
const fetchReally = window.fetch;
window.fetch = (path, ...rest) => path != "dashboard/stream" ? fetchReally(path, ...rest) : new Response(
  new ReadableStream({async start(to) {
    const send = (what) => to.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(what)}\\n\\n`));
    send({model: "m", models: ["m"], bounds: {ttft: [1], itl: [1]}, sees_all: true});
    for (let at = 1; at < 1000; at++) { send(frame(at)); await new Promise((go) => setTimeout(go, 50)); }
  }}));
"""


def test_ten_thousand_requests_are_few_elements(page: Page, fake_server: LiveServer) -> None:
    page.problems.clear()
    page.show(1280, 850)
    script = page.call("Page.addScriptToEvaluateOnNewDocument", source=_MANY)["identifier"]
    try:
        page.open(f"{fake_server.url}/dashboard")
        page.wait("document.querySelector('#now-requests').textContent.startsWith('10,000')")
        page.run("document.querySelector('#list').focus()")
        page.press("End")
        page.wait("document.querySelector('#list').innerText.includes('many-9999')")
        assert page.run("document.querySelectorAll('.row').length") < 60
        page.press("Home")
        page.wait("document.querySelector('[aria-selected=true]').innerText.includes('many-0')")
    finally:
        page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
    assert page.problems == []


_SILENT = """
window.fetch = () => window.cut ? Promise.reject(new TypeError("gone")) : Promise.resolve(new Response(
  new ReadableStream({start(to) {
    const frame = {now: 1, as_of_s: 0, engine: "up", restarts: 0, prompt_tokens: 0, output_tokens: 0, ttft: [0],
      itl: [0], running: 0, waiting: 0, swapped: 0, in_line: 0, blocks: 9, free_blocks: 9, free_host_blocks: 0,
      preemptions: 0, prefix_queries: 0, prefix_hits: 0, steps: [], gone: [], cells: [0, 9], host_cells: [],
      owners: [], requests: [], others: {running: 0, waiting: 0}};
    const first = {model: "m", models: ["m"], bounds: {ttft: [1], itl: [1]}, sees_all: true};
    const text = [first, frame].map((one) => `data: ${JSON.stringify(one)}\\n\\n`).join("");
    to.enqueue(new TextEncoder().encode(text));
    window.cutOff = () => { window.cut = true; to.error(new TypeError("gone")); };
  }})));
"""


def test_it_says_how_old_its_picture_is_when_nothing_comes(page: Page, fake_server: LiveServer) -> None:
    page.problems.clear()
    script = page.call("Page.addScriptToEvaluateOnNewDocument", source=_SILENT)["identifier"]
    state = "document.querySelector('#engine').textContent"
    try:
        page.open(f"{fake_server.url}/dashboard")
        page.wait(f"/^the server says nothing, as of [\\d.]+ s ago$/.test({state})")
        page.run("cutOff()")
        page.wait(f"/^the server cannot be reached, as of [\\d.]+ s ago$/.test({state})")
        page.run("dispatchEvent(new Event('resize'))")
        assert not page.run(IS_UP)
    finally:
        page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
    assert page.problems == []


def test_with_the_admin_key_of_several_models_each_is_shown_and_the_chat_says_why(page: Page, tmp_path: Path) -> None:
    page.problems.clear()
    page.show(1280, 850)
    (tmp_path / "models.toml").write_text(TABLES)
    flags = ("--models", str(tmp_path / "models.toml"), "--api-key", "one", "--admin-api-key", "root")
    with serving(tmp_path, *FAKE_ENGINE[:2], "--num-blocks", "512", *flags) as server:
        page.open(server.url)
        page.wait("document.activeElement.name == 'key'")
        write(page, "root")
        page.wait(HAS_MODEL)
        page.run("localStorage.setItem('pagoda-chat-defaults', '{\"max_tokens\": 20}')")
        for text in ("The first question about the weather.", "The other question about the weather."):
            page.run("document.querySelector('.new').click()")
            write(page, text)
            page.wait(IS_DONE)
        page.wait(f"/Why not more.*it differs from admin.chatcmpl-.*first/.test({STATS})")
        page.problems.clear()  # of the key that was missing
        page.open(f"{server.url}/dashboard")
        page.wait(f"{IS_UP} && !document.querySelector('#models').hidden")
        assert page.run("[...document.querySelector('#models').options].map((one) => one.value)") == ["chat", "embed"]
        page.run("""{ const models = document.querySelector('#models');
                      models.value = 'embed'; models.dispatchEvent(new Event('change')); }""")
        chosen = f"{IS_UP} && document.querySelector('#model').textContent == 'embed'"
        page.wait(chosen)
        page.call("Page.reload")
        page.wait(f"{chosen} && document.querySelector('#models').value == 'embed'")
        page.open("about:blank")  # else it goes on to ask a server that has ended
    assert [one for one in page.problems if "Failed to load" not in one] == []


def test_it_goes_on_after_the_engine_was_killed(page: Page, real_server: LiveServer) -> None:
    page.problems.clear()
    with slowed(real_server), streaming(real_server, "survives"):
        page.open(f"{real_server.url}/dashboard")
        page.wait(f"{IS_UP} && {NUM_ROWS} == 1")
        restarts = real_server.load()["engine_restarts"]
        real_server.kill_engine()
        page.wait(f"!({IS_UP})")
        real_server.steps.hold_next_engine_after(1)
        page.wait(f"{IS_UP} && document.querySelector('.row').innerText.includes('running')", timeout_s=60)
        assert f"{restarts + 1} restarts" in page.text("#engine")
        assert "cmpl-survives" in page.text(".row")
    assert page.problems == []


def test_a_key_is_asked_for_and_kept_for_the_tab(page: Page, keyed_server: LiveServer) -> None:
    page.problems.clear()
    page.open(f"{keyed_server.url}/dashboard")
    page.wait("location.pathname == '/dashboard' && !document.querySelector('#ask').hidden")
    for key, shown in (("wrong", "document.querySelector('#wrong').textContent"), ("one", IS_UP)):
        for letter in key:
            page.press(letter, letter)
        page.press("Enter")
        page.wait(shown)
    assert page.run("document.querySelector('#ask').hidden")
    assert page.run("[location.href, document.cookie, localStorage.length]") == [f"{keyed_server.url}/dashboard", "", 0]
    assert page.run("Object.values(sessionStorage)") == ["one"]
    assert all("401" in one for one in page.problems), page.problems  # the browser's own line of the refusals


def test_pictures_of_the_page_are_small() -> None:
    pictures = list((Path(__file__).parents[2] / "docs" / "howto" / "pictures").glob("*.png"))
    assert len(pictures) == 4
    for picture in pictures:
        assert picture.stat().st_size < 150_000
