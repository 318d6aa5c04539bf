"""Time from the server's address to the first token on its page, in Chromium with a cold cache.

    python -m benchmarks.page_first_token URL [--runs 10]

Times are since the navigation began, medians and ranges: the page knows the model and can be written in; the first text
of the answer is in the document. A message is sent as soon as it can be, another one in each run.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.server.chromium import browsing

_WATCH = """
localStorage.clear();
window.times = {};
const see = new MutationObserver(() => {
  if (!times.ready && document.querySelector(".bar select")?.value) {
    times.ready = performance.now();
    document.querySelector(".composer textarea").focus();
    document.execCommand("insertText", false, "MESSAGE");
  }
  if (times.ready && !times.sent && !document.querySelector(".composer .primary").disabled) {
    times.sent = performance.now();
    document.querySelector(".composer .primary").click();
  }
  if (times.sent && document.querySelector(".assistant .markdown")?.textContent) {
    times.token ??= performance.now();
  }
});
document.addEventListener("readystatechange", () =>
  see.observe(document, { subtree: true, childList: true, characterData: true, attributes: true }), { once: true });
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    runs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, browsing(Path(folder)) as page:
        page.show(1280, 850)
        page.call("Network.enable")
        page.call("Network.setCacheDisabled", cacheDisabled=True)
        for number in range(args.runs + 1):  # the first one starts the browser's own processes
            message = f"Question {number}: why is the sky blue?"
            script = page.call("Page.addScriptToEvaluateOnNewDocument", source=_WATCH.replace("MESSAGE", message))
            page.open(args.url)
            page.wait("window.times.token && performance.timing.loadEventEnd", 60)
            runs.append(
                page.run(
                    "({...window.times, bytes: performance.getEntriesByType('resource')"
                    ".reduce((sum, one) => sum + one.transferSize, 0)})"
                )
            )
            page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])
            page.press("Escape")
            page.open("about:blank")
            page.wait("location.href == 'about:blank'")
    for name in ("ready", "sent", "token", "bytes"):
        values = sorted(run[name] for run in runs[1:])
        print(f"{name}: median {statistics.median(values):.0f}, {values[0]:.0f} to {values[-1]:.0f}")


if __name__ == "__main__":
    main()
