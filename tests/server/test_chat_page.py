"""The page to chat on, in a browser."""

import hashlib
import json
import re
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from pagoda.core.request import Reason
from pagoda.engine.outputs import output_processor
from pagoda.server.pages.files import STATIC
from pagoda.server.prefix_misses import PrefixMiss
from tests.server.chromium import Page, browsing
from tests.server.live import LiveServer
from tests.server.test_requests import slowed

VENDOR = STATIC / "chat" / "vendor"
PHONE, DESKTOP = (390, 844), (1280, 850)


def test_libraries_are_those_that_the_list_names() -> None:
    libraries = json.loads((VENDOR / "libraries.json").read_text())
    licences = (VENDOR / "LICENSES.txt").read_text()
    assert {file.stem for file in VENDOR.glob("*.js")} == set(libraries)
    for name, library in libraries.items():
        assert hashlib.sha256((VENDOR / f"{name}.js").read_bytes()).hexdigest() == library["sha256"], "make vendor"
        assert f"==== {name}@{library['version']}: {library['licence']}" in licences


def test_both_languages_have_the_same_words() -> None:
    text = (STATIC / "chat" / "words.js").read_text()
    english, chinese = (
        re.findall(r"(\w+): [\"(`\[{]|(\w+): \w+ =>", text.partition(f"const {name} =")[2].partition("\n};")[0])
        for name in ("en", "zh")
    )
    assert english == chinese
    assert len(english) > 60


def test_the_reasons_of_the_server_have_chinese_words() -> None:
    text = (STATIC / "chat" / "words.js").read_text().partition("const zh =")[2]
    words = set(re.findall(r'"([^"]+)": ["`]', text))
    kinds = typing.get_args(typing.get_type_hints(PrefixMiss)["kind"])
    assert words == {*(one.value for one in Reason), output_processor.ADMISSION, output_processor.SEEN, *kinds}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        page.show(*DESKTOP)
        yield page


HAS_MODEL = "document.querySelector('.bar select').value"


@contextmanager
def opened(page: Page, server: LiveServer, **kept: Any) -> Iterator[None]:
    """The page, with `kept` in the browser's storage and nothing else; its console must have stayed empty."""
    page.open(server.url)
    page.wait(HAS_MODEL)
    page.run(f"localStorage.clear(); Object.assign(localStorage, {json.dumps(kept)})")
    page.problems.clear()
    page.open(server.url)
    page.wait(HAS_MODEL)
    yield
    assert page.problems == []


def write(page: Page, text: str) -> None:
    """Write into what has the focus, and send it."""
    page.call("Input.insertText", text=text)
    page.press("Enter")


def click(page: Page, label: str, place: str = "body") -> None:
    """Click what has this label, within an element."""
    selector = json.dumps(f"{place} [aria-label='{label}']")
    page.wait(f"document.querySelector({selector}).click() ?? true")


def shown(page: Page) -> list[str]:
    """The texts of all messages."""
    each = "document.querySelectorAll('.message :is(.markdown, .plain)')"
    return page.run(f"[...{each}].map((one) => one.textContent)")


IS_DONE = "!!document.querySelector('.message.assistant:last-child [aria-label=\"Another answer\"]')"
HAS_TEXT = "document.querySelector('.message:last-child .markdown').textContent"
STATS = "document.querySelector('.message:last-child .stats').textContent"


def test_a_conversation_with_what_each_answer_took(page: Page, real_server: LiveServer) -> None:
    with opened(page, real_server):
        write(page, "Why is the sky blue? " * 12)
        page.wait(HAS_TEXT)
        page.press("Escape")
        page.wait(IS_DONE)
        first = page.text(".assistant .markdown")
        write(page, "Say one word.")
        page.wait(f"document.querySelectorAll('.message').length == 4 && {IS_DONE}")
        page.wait(f"/cached/.test({STATS})")
        figures = page.text(".message:nth-child(4) summary")
        assert re.fullmatch(r"first token [\d.]+ m?s · [\d.]+ tokens/s · [1-9]\d? % cached", figures)
        click(page, "Tokens", ".message:last-child")
        page.run("document.querySelector('.tokens').focus()")
        page.press("ArrowRight")
        page.wait("document.querySelectorAll('.likely li').length >= 5")
        address, texts = page.run("location.href"), shown(page)
        page.call("Page.reload")
        page.wait(f"{HAS_MODEL} && document.querySelectorAll('.message').length == 4")
        assert (page.run("location.href"), first) == (address, shown(page)[1])
        assert shown(page)[:3] == texts[:3]


def test_other_answers_and_edits_are_versions(page: Page, fake_server: LiveServer) -> None:
    with opened(page, fake_server, **{"pagoda-chat-defaults": '{"max_tokens": 20}'}):
        write(page, "The first of these questions.")
        page.wait(IS_DONE)
        click(page, "Another answer")
        page.wait(f"document.querySelector('.versions').textContent.includes('2/2') && {IS_DONE}")
        page.press("ArrowUp")
        page.wait("document.activeElement.value == 'The first of these questions.'")
        write(page, " Edited.")
        page.wait(
            f"document.querySelector('.plain').textContent == 'The first of these questions. Edited.' && {IS_DONE}"
        )
        page.wait(f"/Why not more.*it differs from chatcmpl-.*Edited/.test({STATS})")
        page.run("document.querySelector('.chats .link').click()")
        page.wait(f"/准入与分词.*从第 \\d+ 个 token（第 \\d+ 块）起与 chatcmpl-.* 不同.*Edited/.test({STATS})")
        page.run("document.querySelector('.chats .link').click()")
        click(page, "Previous version")
        page.wait("document.querySelectorAll('.versions').length == 2 && !document.body.innerText.includes('Edited')")
        nodes = json.loads(page.run("Object.values(localStorage).find((text) => text.includes('nodes'))"))["nodes"]
        assert [(node["role"], node["parent"]) for node in nodes] == [
            *(("user", -1), ("assistant", 0), ("assistant", 0)),
            *(("user", -1), ("assistant", 3)),
        ]


def test_a_reload_loses_nothing_of_an_answer_and_it_is_continued(page: Page, real_server: LiveServer) -> None:
    with opened(page, real_server, **{"pagoda-chat-defaults": '{"temperature": 0}'}), slowed(real_server, 0.03):
        write(page, "Tell a long story about a lighthouse.")
        page.wait(f"{HAS_TEXT}.length > 20")
        had = page.run("(window.gone = 1, document.querySelector('.message:last-child .markdown').textContent)")
        page.call("Page.reload")
        page.wait(f"!window.gone && {IS_DONE}")
        assert shown(page)[1].startswith(had.rstrip())
        assert page.text(".note") == "The page was closed before the answer was complete."
        real_server.wait_load(0)
        page.run("document.activeElement.blur()")
        click(page, "Continue")
        page.wait(f"document.querySelector('.message:last-child .markdown').textContent.length > {len(had) + 60}")
        assert shown(page)[1].startswith(had.rstrip())
        page.press("Escape")
        page.wait(f"{IS_DONE} && document.querySelector('.note').textContent == 'Stopped.'")
        real_server.wait_load(0)


def test_a_key_is_asked_for_and_kept_for_the_tab(page: Page, keyed_server: LiveServer) -> None:
    page.open(keyed_server.url)
    for key, is_next in (("wrong", "!!document.querySelector('.key .error')"), ("one", HAS_MODEL)):
        page.wait("document.activeElement.name == 'key'")
        write(page, key)
        page.wait(is_next)
    write(page, "Hello.")
    page.wait(IS_DONE)
    assert page.run("Object.values(sessionStorage)") == ["one"]
    assert page.run("JSON.stringify([location.href, document.cookie, localStorage])").count('one"') == 0
    assert all("401" in problem for problem in page.problems)  # the browser's own line of the refusals
    page.problems.clear()


@contextmanager
def answering(
    page: Page, *deltas: dict[str, Any], finish: str = "stop", can: Sequence[str] = ("completion",)
) -> Iterator[None]:
    """Pages opened in the block get this answer from a model that does not run; `window.asked` is what it was asked."""
    model = {"id": "made", "capabilities": list(can)}
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish})
    chunks = [{"id": "chatcmpl-made", "choices": [choice]} for choice in choices]
    script = f"""
    const fetchReally = window.fetch, chunks = {json.dumps(chunks)};
    window.asked = [];
    window.fetch = (path, options) => {{
      if (path.startsWith("requests/")) return Promise.resolve(new Response("{{}}"));
      if (path === "v1/models") return Promise.resolve(new Response({json.dumps(json.dumps({"data": [model]}))}));
      if (path !== "v1/chat/completions") return fetchReally(path, options);
      window.asked.push(JSON.parse(options.body));
      return Promise.resolve(new Response(new ReadableStream({{async start(to) {{
        const send = (text) => to.enqueue(new TextEncoder().encode(`data: ${{text}}\\n\\n`));
        for (const chunk of chunks) {{ send(JSON.stringify(chunk)); await new Promise((go) => setTimeout(go, 30)); }}
        send("[DONE]");
        to.close();
      }}}})));
    }};"""
    name = page.call("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]
    try:
        yield
    finally:
        page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=name)


def test_a_server_without_a_model_that_writes_says_so(page: Page, fake_server: LiveServer) -> None:
    with answering(page, can=("embedding",)):
        page.open(fake_server.url)
        page.wait("document.querySelector('.notice').textContent.includes('No model of this server writes text')")


HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2"><svg onload="window.hit = 3"></svg>

[a link](javascript:window.hit=4) [another](<data:text/html,<script>window.hit=5</script>>) <javascript:window.hit=6>

![an image](http://127.0.0.1:1/image.png) <iframe src="http://127.0.0.1:1/"></iframe>
<style>body { background: url(http://127.0.0.1:1/style) }</style>

[reference]: javascript:window.hit=7
[reference] <a href="javascript:window.hit=8" onclick="window.hit=9">raw</a> [good](https://example.org/a?b=1&c=2)

```html"><img src=x onerror=window.hit=10>
<b onmouseover="window.hit = 11">code</b>
```

| a <img src=x onerror=window.hit=12> | [b](vbscript:x) |
|---|---|
| <form action="http://127.0.0.1:1/"><input type="image" src="http://127.0.0.1:1/"> | ![](javascript:x) |
"""


def test_a_hostile_answer_does_nothing_and_loads_nothing(page: Page, fake_server: LiveServer) -> None:
    pieces = [HOSTILE[at : at + 40] for at in range(0, len(HOSTILE), 40)]
    with answering(page, *({"content": piece} for piece in pieces)), opened(page, fake_server):
        page.call("Network.enable")
        write(page, "<img src=x onerror='window.hit = 13'>")
        page.wait(IS_DONE)
        links = "[...document.querySelectorAll('.message a')]"
        page.run(f"{links}.filter((one) => !one.href.startsWith('http')).forEach((one) => one.click())")
        assert page.run(f"{links}.map((one) => one.getAttribute('href')).filter(Boolean)") == [
            "http://127.0.0.1:1/image.png",
            "https://example.org/a?b=1&c=2",
        ]
        assert page.run(f"{links}.filter((one) => one.href).every((one) => one.rel.includes('noopener'))")
        assert (
            page.run(
                "document.querySelectorAll('.message :is(img, svg:not([aria-hidden]), iframe, style, script, "
                "form, input, [onerror], [onclick], [style])').length"
            )
            == 0
        )
        assert "<script>window.hit = 1</script>" in shown(page)[1]
        loaded = "performance.getEntriesByType('resource').map((one) => one.name)"
        assert all(name.startswith(fake_server.url) for name in page.run(loaded))
        assert page.run("window.hit ?? null") is None


def test_reasoning_and_calls_are_folded_and_results_are_sent(page: Page, fake_server: LiveServer) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "weather"}}])
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"in": '}}
    deltas = (
        {"reasoning": "They ask for "},
        {"reasoning": "the weather."},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
    )
    kept = {"pagoda-chat-defaults": json.dumps({"tools": tools, "system": "Be brief.", "temperature": 0})}
    with answering(page, *deltas, finish="tool_calls"), opened(page, fake_server, **kept):
        write(page, "How is the weather in Oslo?")
        page.wait("document.querySelector('.results textarea').focus() ?? true")
        assert page.text(".thought .markdown") == "They ask for the weather.\n"
        assert json.loads(page.text(".call pre")) == {"in": "Oslo"}
        assert not page.run("document.querySelector('details[open]')")
        page.call("Input.insertText", text="rain")
        page.run("document.querySelector('.results button').click()")
        page.wait(f"window.asked.length == 2 && {IS_DONE}")
        first, second = page.run("window.asked")
        assert first["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "How is the weather in Oslo?"},
        ]
        assert (first["tools"], first["temperature"]) == (json.loads(tools), 0)
        function = {"name": "weather", "arguments": '{"in": "Oslo"}'}
        assert second["messages"][2:] == [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "rain", "tool_call_id": "call-1"},
        ]


_PASTE = """
(async () => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 3000, height: 30 });
  canvas.getContext("2d").fillRect(0, 0, 10, 10);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve)), files = new DataTransfer();
  files.items.add(new File([blob], "a.png", { type: "image/png" }));
  document.activeElement.dispatchEvent(new ClipboardEvent("paste", { clipboardData: files, bubbles: true }));
})()
"""


def test_an_image_is_pasted_made_smaller_and_sent(page: Page, fake_server: LiveServer) -> None:
    with opened(page, fake_server):
        assert not page.run("!!document.querySelector('[aria-label=\"Add an image\"]')")  # this model reads none
    with answering(page, {"content": "Black and white."}, can=("completion", "vision")), opened(page, fake_server):
        assert page.run("!!document.querySelector('[aria-label=\"Add an image\"]')")
        page.run(_PASTE)
        page.wait("document.querySelector('.composer canvas').width == 1024")
        write(page, "What is this?")
        page.wait(IS_DONE)
        (image, text) = page.run("window.asked[0].messages[0].content")
        assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
        assert text == {"type": "text", "text": "What is this?"}
        page.wait("document.querySelector('.message canvas').height == 10")


def test_chats_are_exported_deleted_and_imported(page: Page, fake_server: LiveServer) -> None:
    with answering(page, {"content": "An answer."}), opened(page, fake_server):
        write(page, "A question.")
        page.wait(IS_DONE)
        page.run("URL.createObjectURL = (file) => { window.file = file; return 'about:blank#'; }")
        page.run("HTMLAnchorElement.prototype.click = () => {}")
        click(page, "Export this chat", ".chats")
        file = page.run("window.file.text()")
        assert [node["content"] for node in json.loads(file)["conversations"][0]["nodes"]] == [
            "A question.",
            "An answer.",
        ]
        click(page, "Delete", ".chats")
        page.wait("document.querySelector('.welcome') && !document.querySelector('.chats li')")
        assert page.run("Object.keys(localStorage).length") == 0
        for text, said in ((file, "1 chats added."), ("{}", "This file holds no chats."), (file, "1 chats added.")):
            page.run(f"window.files = new DataTransfer(); files.items.add(new File([{json.dumps(text)}], 'a.json'))")
            page.run("""{ const input = document.querySelector(".chats [type=file]"); input.files = window.files.files;
                          input.dispatchEvent(new Event("change")); }""")
            page.wait(f"document.querySelector('.notice').textContent.includes({json.dumps(said)})")
        assert page.run("document.querySelectorAll('.chats li').length") == 2
        page.run("document.querySelector('.chats .title').click()")
        page.wait("document.querySelectorAll('.message').length == 2")


def test_a_chat_is_renamed(page: Page, fake_server: LiveServer) -> None:
    title = "document.querySelector('.chats button.title').textContent.trim()"
    with answering(page, {"content": "An answer."}), opened(page, fake_server):
        write(page, "A question.")
        page.wait(IS_DONE)
        for text, key, then in (
            ("Other", "Escape", "A question."),
            ("A name", "Enter", "A name"),
            ("", "Enter", "A name"),
        ):
            click(page, "Rename", ".chats")
            page.wait("document.activeElement.matches('input.title')")
            page.run("document.activeElement.select()")
            page.call("Input.insertText", text=text) if text else page.press("Backspace")
            page.press(key)
            page.wait(f"{title} == {json.dumps(then)}")
        page.call("Page.reload")
        page.wait(f"{HAS_MODEL} && {title} == 'A name'")


def test_a_full_storage_is_said_and_the_chat_goes_on(page: Page, fake_server: LiveServer) -> None:
    with answering(page, {"content": "An answer."}), opened(page, fake_server):
        page.run("localStorage.setItem('filler', 'x'.repeat(5 * 2 ** 20 - 100))")
        write(page, "A question. " * 20)
        page.wait(f"{IS_DONE} && document.querySelector('.notice').textContent.includes('storage is full')")
        assert shown(page)[1] == "An answer.\n"
        page.run("localStorage.removeItem('filler')")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_any_screen_and_both_languages(page: Page, fake_server: LiveServer, language: str, dark: bool) -> None:
    wide = f"{'long' * 60}\n\n```\n{'code ' * 60}\n```\n\n|{'a|' * 30}\n|{'-|' * 30}\n|{'wide|' * 30}\n"
    page.show(*PHONE, dark=dark)
    try:
        with answering(page, {"content": wide}), opened(page, fake_server, **{"pagoda-language": language}):
            assert page.run("document.documentElement.lang") == language
            page.run("document.querySelector('.composer textarea').focus()")
            write(page, "word " * 60 + "x" * 90)
            page.run("document.querySelector('.composer .primary').click()")
            page.wait("document.querySelectorAll('.message footer .icon').length > 3")
            assert page.run("document.documentElement.scrollWidth") <= PHONE[0]
            background = page.run("getComputedStyle(document.body).backgroundColor")
            assert (int(re.findall(r"\d+", background)[0]) < 128) is dark
            click(page, {"en": "Chats", "zh": "对话列表"}[language], ".bar")
            page.wait("document.querySelector('.chats').getBoundingClientRect().left == 0")
            page.run("document.querySelector('.chats .link').click()")
            page.wait(f"document.documentElement.lang == {json.dumps({'en': 'zh', 'zh': 'en'}[language])}")
            nameless = "[...document.querySelectorAll('button, input, textarea, select')].filter((one) => "
            nameless += "!one.textContent.trim() && !one.ariaLabel && !one.closest('label')).length"
            assert page.run(nameless) == 0
    finally:
        page.show(*DESKTOP)
