// The dashboard: keeps what the server's stream says, and draws it.

import { headers, setKey } from "../common/key.js";
import { follow } from "./stream.js";
import { colourOf, drawBlocks, drawLines, drawSteps } from "./draw.js";
import { VirtualList } from "./list.js";

const POINTS = 240;  // two minutes, two per second
const WINDOW = 6;  // frames over which rates and times are taken
const STRIP_S = 4;
const OLD_S = 3;  // the server says something twice per second
const byId = (id) => document.getElementById(id);
const count = new Intl.NumberFormat("en").format;
const rate = (value) => (value === null ? "–" : count(Math.round(value)));
const time = (value) => {
  if (value === null) return "–";
  return value < 1 ? `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(1)} s`;
};
const age = (value) => {
  if (value < 100) return `${value.toFixed(1)} s`;
  return value < 6000 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
};

const requests = new Map();
let frames = [], steps = [], series = {}, bounds = {}, seesAll = false, last = null, lastMs = 0, lost = "";

const list = new VirtualList(byId("list"), byId("space"), fillRow, showDetail);

function fillRow(row, item) {
  if (!row.children.length) {
    for (const name of ["dot", "", "", "why", "", "", "rare", "rare", ""]) {
      row.append(Object.assign(document.createElement("span"), { className: name }));
    }
  }
  const numbers = [item.prompt, item.output, item.cached, item.blocks].map(count);
  const name = item.adapter ? `${item.id} (${item.adapter})` : item.id;
  const texts = ["", name, item.state, item.why, ...numbers, age(last.now - item.arrived)];
  row.dataset.state = item.state;
  texts.forEach((text, index) => {
    if (row.children[index].textContent !== text) row.children[index].textContent = text;
  });
  row.children[1].title = name;
  row.children[3].title = item.why;
  row.children[7].title = item.state === "preempted" ? "in host memory" : "";
  row.children[0].style.background = item.blocks ? colourOf(item.id) : "";
}

function onFirst(first) {
  bounds = first.bounds;
  seesAll = first.sees_all;
  byId("model").textContent = byId("model").title = first.model;
  byId("model").hidden = first.models.length > 1;
  byId("models").hidden = first.models.length < 2;
  byId("models").replaceChildren(...first.models.map((name) => new Option(name, name, false, name === first.model)));
  byId("ask").hidden = true;
  requests.clear();
  frames = [];
  steps = [];
  series = { output: [], prompt: [], ttft_p50: [], ttft_p95: [], itl_p50: [], itl_p95: [] };
}

function onFrame(frame) {
  for (const [id, state, prompt, computed, output, cached, blocks, arrived, why, adapter] of frame.requests) {
    requests.set(id, { id, state, prompt, computed, output, cached, blocks, arrived, why, adapter });
  }
  for (const id of frame.gone) requests.delete(id);
  steps = [...steps, ...frame.steps].slice(-1024);
  frames = [...frames, frame].slice(-WINDOW);
  last = frame;
  lastMs = performance.now();
  lost = "";
  addPoints(frames[0], frame);
  draw();
  refreshDetail();
}

// Each counter starts at 0 again with a new process: less than before is nothing known.
function addPoints(old, now) {
  const seconds = now.now - old.now;
  const push = (name, value) => {
    series[name].push(value);
    if (series[name].length > POINTS) series[name].shift();
  };
  for (const name of ["output", "prompt"]) {
    const more = now[`${name}_tokens`] - old[`${name}_tokens`];
    push(name, seconds > 0 && more >= 0 ? more / seconds : null);
  }
  for (const name of ["ttft", "itl"]) {
    const counts = now[name].map((value, index) => value - old[name][index]);
    push(`${name}_p50`, quantile(counts, bounds[name], 0.5));
    push(`${name}_p95`, quantile(counts, bounds[name], 0.95));
  }
}

// The value below which a share of the values lies, as Prometheus takes it from buckets; null without values.
function quantile(counts, limits, share) {
  const all = counts.reduce((sum, value) => sum + value, 0);
  if (all <= 0) return null;
  let left = share * all;
  for (let at = 0; at < limits.length; at += 1) {
    if (left <= counts[at]) {
      const low = at ? limits[at - 1] : 0;
      return low + (limits[at] - low) * (left / counts[at]);
    }
    left -= counts[at];
  }
  return limits.at(-1);
}

function draw() {
  if (!last || document.hidden) return;
  const frame = last, newest = (name) => series[name].at(-1) ?? null;
  showState();
  byId("now-output").textContent = rate(newest("output"));
  byId("now-prompt").textContent = rate(newest("prompt"));
  for (const name of ["ttft", "itl"]) {
    byId(`now-${name}`).textContent = `${time(newest(`${name}_p50`))} · p95 ${time(newest(`${name}_p95`))}`;
    const [p50, p95] = [series[`${name}_p50`], series[`${name}_p95`]];
    drawLines(byId(name), [{ name: "prompt", values: p95 }, { name: "output", values: p50 }], POINTS, time);
  }
  drawLines(byId("output"), [{ name: "output", values: series.output }], POINTS, rate);
  drawLines(byId("prompt"), [{ name: "prompt", values: series.prompt }], POINTS, rate);
  drawSteps(byId("steps"), steps, STRIP_S);
  drawBlocks(byId("blocks"), frame.cells, frame.owners);
  byId("host").hidden = !frame.host_cells.length;
  drawBlocks(byId("host-blocks"), frame.host_cells, frame.owners);
  byId("now-host").textContent = `${count(frame.free_host_blocks)} blocks are free for the KV of preempted requests`;
  const step = steps.at(-1), before = steps.at(-2);
  byId("now-steps").textContent = step
    ? `last: ${step[3]} prompt and ${step[4]} output tokens` + (step[6] ? `, ${step[6]} drafted ones` : "") +
      ` in ${time(step[2] - step[1])}` +
      (before ? `, ${time(Math.max(0, step[1] - before[2]))} after the one before` : "")
    : "none since this page was opened";
  const used = frame.blocks - frame.free_blocks;
  const hits = frame.prefix_queries ? frame.prefix_hits / frame.prefix_queries : 0;
  byId("now-blocks").textContent = `${count(used)} of ${count(frame.blocks)} blocks in use; ` +
    `${Math.round(hits * 100)} % of prompt tokens were cached; ${count(frame.preemptions)} preemptions`;
  const { running, waiting } = frame.others;
  const others = running + waiting ? `; ${running + waiting} other requests (${running} run, ${waiting} wait)` : "";
  byId("now-requests").textContent = `${count(requests.size)}${seesAll ? "" : " of yours"}${others}` +
    (frame.in_line ? `; ${count(frame.in_line)} wait for admission` : "");
  const wanted = byId("filter").value.trim().toLowerCase(), all = [...requests.values()];
  list.set(wanted ? all.filter((item) => item.id.toLowerCase().includes(wanted) || item.state.includes(wanted) ||
    item.why.toLowerCase().includes(wanted)) : all);
}

// What the engine does, and how old that is, if it is not new.
function showState() {
  if (!last || !byId("ask").hidden) return;
  const silent = (performance.now() - lastMs) / 1e3, isOld = lost || silent > OLD_S;
  const restarts = last.restarts ? `, ${last.restarts} restarts` : "";
  const seconds = isOld ? silent : last.as_of_s, ago = isOld || seconds > OLD_S ? `, as of ${age(seconds)} ago` : "";
  showEngine(isOld ? "gone" : last.engine, (isOld ? lost || "the server says nothing" : last.engine + restarts) + ago);
}

function showEngine(state, text) {
  const shown = byId("engine");
  shown.dataset.state = state;
  if (shown.textContent !== text) shown.textContent = text;
}

let detail = null;  // the request that is shown, and whether its answer is awaited or was the last one

function showDetail(item) {
  detail = { id: item.id, isAsked: false, hasEnded: false };
  byId("detail-id").textContent = item.id;
  for (const id of ["detail-why", "detail-miss", "detail-facts", "detail-timeline"]) byId(id).replaceChildren();
  if (!byId("detail").open) byId("detail").showModal();
  refreshDetail();
}

// Called with each frame, too: what is shown is as new as the list, until the request has ended.
async function refreshDetail() {
  const shown = detail;
  if (!shown || shown.isAsked || shown.hasEnded || !byId("detail").open) return;
  shown.isAsked = true;
  const path = shown.id.split("/").map(encodeURIComponent).join("/");
  const [response, found] = await fetch(`requests/${path}`, { headers: headers() })
    .then(async (answer) => [answer, await answer.json()]).catch(() => [null, null]);
  shown.isAsked = false;
  if (!response || detail !== shown) return;  // without an answer, the next frame asks again
  shown.hasEnded = response.status === 404 || found.state === "ended";
  byId("detail-why").textContent = response.ok ? found.reason : found.error.message;
  byId("detail-miss").hidden = !found.prefix_miss;
  if (!response.ok) return;
  if (found.prefix_miss) byId("detail-miss").textContent = `Prefix cache: ${found.prefix_miss.what}`;
  const facts = { state: found.state, "prompt tokens": found.prompt_tokens, "of them cached": found.cached_tokens,
    "output tokens": found.output_tokens, "computed tokens": found.computed_tokens };
  facts[found.state === "preempted" ? "blocks in host memory" : "blocks"] = found.blocks;
  if (found.adapter) facts.adapter = found.adapter;
  if (found.draft_tokens) facts["drafted tokens, and right ones"] = `${found.draft_tokens}, ${found.accepted_draft_tokens}`;
  byId("detail-facts").replaceChildren(...Object.entries(facts).flatMap(([name, value]) =>
    [element("dt", name), element("dd", typeof value === "number" ? count(value) : value)]));
  byId("detail-timeline").replaceChildren(...found.timeline.map((entry) => {
    const line = document.createElement("li");
    line.append(element("time", time(entry.at_ms / 1e3)), element("span", entry.what));
    return line;
  }));
}

const element = (kind, text) => Object.assign(document.createElement(kind), { textContent: text });

byId("filter").addEventListener("input", draw);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || ["INPUT", "TEXTAREA"].includes(document.activeElement.tagName)) return;
  event.preventDefault();
  byId("filter").focus();
});
document.addEventListener("visibilitychange", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", draw);
setInterval(showState, 1000);

// The address names the model, so that a reload and a link lead to it.
const again = follow(() => `dashboard/stream${location.hash && `?model=${location.hash.slice(1)}`}`, {
  first: onFirst,
  frame: onFrame,
  lost: (reason) => {
    lost = reason;
    showEngine("gone", reason);
    showState();
  },
  key: (isWrong) => new Promise((resolve) => {
    showEngine("starting", "needs a key");
    byId("wrong").textContent = isWrong ? "The server does not know this key." : "";
    byId("ask").hidden = false;
    byId("key").focus();
    byId("ask").onsubmit = (event) => {
      event.preventDefault();
      setKey(byId("key").value.trim());
      byId("key").value = "";
      resolve();
    };
  }),
});

byId("models").addEventListener("change", (event) => { location.hash = encodeURIComponent(event.target.value); });
addEventListener("hashchange", again);
