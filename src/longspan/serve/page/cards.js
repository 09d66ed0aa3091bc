// What the live view shows, card by card: {node, update(now, before, oldest)}. The snapshots are the last,
// the one before and the oldest of a minute; `update` is false when the server has nothing of the card.

import { Lines, StackedBar } from "./charts.js";
import { el } from "./dom.js";
import { grown, quantiles, rate } from "./exposition.js";

const SHARES = [0.5, 0.9, 0.99];
const LATENCIES = [
  ["First token", "vllm:time_to_first_token_seconds"],
  ["Between tokens", "vllm:inter_token_latency_seconds"],
  ["In the queue", "vllm:request_queue_time_seconds"],
  ["Whole request", "vllm:e2e_request_latency_seconds"],
];
const HOLDERS = [
  ["Pages, running", "page-running", { kind: "page", owner: "running" }],
  ["Pages, cached", "page-cached", { kind: "page", owner: "cached" }],
  ["States, running", "state-running", { kind: "state", owner: "running" }],
  ["States, cached", "state-cached", { kind: "state", owner: "cached" }],
];

export const makeCards = () => [throughput(), requests(), memory(), prefixCache(), latency(), steps()];

const card = (title, ...children) => el("section", { class: "card" }, el("h2", {}, title), children);

function throughput() {
  const rows = [
    ["Prompt", "vllm:prompt_tokens_total", "page-running"],
    ["Generation", "vllm:generation_tokens_total", "state-running"],
  ].map(([name, metric, kind]) => {
    const [lines, value, most] = [new Lines([kind]), el("strong"), el("span", { class: "hint" })];
    const head = el("div", { class: "row" }, el("span", {}, name), most, value);
    return { name, metric, lines, value, most, node: el("div", {}, head, lines.node) };
  });
  const node = card(
    "Tokens per second",
    rows.map((row) => row.node),
  );
  const update = (now, before) => {
    for (const { name, metric, lines, value, most } of rows) {
      const speed = rate(now, before, metric) ?? 0;
      value.textContent = number(speed);
      lines.add(now.time, [speed], `${name}: ${number(speed)} tokens per second`);
      most.textContent = `most ${number(lines.most)}`;
    }
    return now.value(rows[0].metric) !== null;
  };
  return { node, update };
}

function requests() {
  const figures = new Figures([
    ["Running", (now) => now.value("vllm:num_requests_running"), number, "page-running"],
    ["Waiting", (now) => now.value("vllm:num_requests_waiting"), number, "state-running"],
    ["Swapped out", (now) => now.value("longspan:num_requests_swapped"), number],
    ["Preempted", (now) => now.value("vllm:num_preemptions_total"), number],
  ]);
  const lines = new Lines(["page-running", "state-running"]);
  const node = card("Requests", figures.node, lines.node);
  const update = (now, before, oldest) => {
    const [running, waiting] = [
      now.value("vllm:num_requests_running") ?? 0,
      now.value("vllm:num_requests_waiting") ?? 0,
    ];
    lines.add(now.time, [running, waiting], `${running} running, ${waiting} waiting`);
    return figures.update(now, before, oldest);
  };
  return { node, update };
}

/** The arena by kind and owner, and the host pool; a share alone where the server says no more (vLLM's). */
function memory() {
  const arena = titledBar("Arena", HOLDERS);
  const pool = titledBar("Host pool", [["Swapped out", "state-running"]]);
  const share = new Figures([
    ["Held by running requests", (now) => now.value("vllm:kv_cache_usage_perc"), percent],
  ]);
  const node = card("Memory", arena.node, pool.node, share.node);
  const update = (now) => {
    const held = HOLDERS.map(([, , labels]) => now.value("longspan:arena_bytes", labels) ?? 0);
    const known = arena.update(now.value("longspan:arena_total_bytes"), held);
    pool.update(now.value("longspan:swap_total_bytes"), [now.value("longspan:swap_bytes") ?? 0]);
    share.node.hidden = known || !share.update(now);
    return known || !share.node.hidden;
  };
  return { node, update };
}

/** A bar below its name and its size. Without a size there is nothing to show; then `update` returns false. */
function titledBar(name, parts) {
  const bar = new StackedBar(parts);
  const total = el("span", { class: "hint" });
  const node = el("div", {}, el("div", { class: "row" }, el("span", {}, name), total), bar.node);
  const update = (size, held) => {
    node.hidden = !size;
    if (size) bar.update(size, held, bytes);
    total.textContent = bytes(size ?? 0);
    return !node.hidden;
  };
  return { node, update };
}

function prefixCache() {
  const hits = (now, before) => {
    const asked = grown(now, before, "vllm:prefix_cache_queries_total");
    return asked ? grown(now, before, "vllm:prefix_cache_hits_total") / asked : null;
  };
  const ever = (now) => {
    const asked = now.value("vllm:prefix_cache_queries_total");
    return asked ? now.value("vllm:prefix_cache_hits_total") / asked : null;
  };
  const figures = new Figures([
    ["Hits, last minute", (now, before, oldest) => hits(now, oldest), percent],
    ["Hits since the start", ever, percent],
    ["Checkpoints", (now) => now.value("longspan:checkpoints"), number],
    ["Evictions", (now) => now.value("longspan:evictions_total"), number],
  ]);
  return { node: card("Prefix cache", figures.node), update: (...when) => figures.update(...when) };
}

function latency() {
  const caption = el("caption");
  const body = el("tbody");
  const head = el(
    "tr",
    {},
    el("td"),
    SHARES.map((share) => el("th", { scope: "col" }, `p${share * 100}`)),
  );
  const node = card("Latency", el("table", {}, caption, el("thead", {}, head), body));
  const update = (now, before, oldest) => {
    const recent = oldest && quantiles(now, oldest, LATENCIES[0][1], SHARES);
    caption.textContent = recent ? "Last minute" : "Since the start";
    const rows = LATENCIES.map(([name, metric]) => [
      name,
      quantiles(now, recent ? oldest : null, metric, SHARES),
    ]);
    const row = ([name, values]) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, name),
        values.map((value) => el("td", {}, seconds(value))),
      );
    body.replaceChildren(...rows.filter(([, values]) => values).map(row));
    return body.childElementCount > 0;
  };
  return { node, update };
}

function steps() {
  const outside = (now, before, oldest) => {
    const whole = grown(now, oldest, "longspan:step_seconds_total");
    return whole ? 1 - grown(now, oldest, "longspan:model_seconds_total") / whole : null;
  };
  const figures = new Figures([
    ["Per second", (now, before) => rate(now, before, "longspan:steps_total"), number],
    ["Outside the model", outside, percent],
    ["Swaps", (now) => now.value("longspan:swaps_total"), number],
  ]);
  return { node: card("Steps of the engine", figures.node), update: (...when) => figures.update(...when) };
}

/** Named numbers, with the class of their line if they have one. Those the server lacks are left out. */
class Figures {
  constructor(figures) {
    this.figures = figures.map(([name, read, format, kind]) => {
      const value = el("dd");
      const title = el("dt", {}, kind ? el("i", { class: kind }) : [], name);
      return { read, format, value, node: el("div", {}, title, value) };
    });
    this.node = el(
      "dl",
      { class: "figures" },
      this.figures.map((figure) => figure.node),
    );
  }

  update(...when) {
    let any = false;
    for (const { read, format, value, node } of this.figures) {
      const found = read(...when);
      node.hidden = found === null;
      if (found !== null) value.textContent = format(found);
      any ||= found !== null;
    }
    return any;
  }
}

const FORMAT = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

const number = (value) => (value < 100 ? FORMAT : WHOLE).format(value);
const percent = (share) => `${FORMAT.format(share * 100)} %`;

function seconds(value) {
  if (value < 1e-3) return `${WHOLE.format(value * 1e6)} µs`;
  return value < 1 ? `${number(value * 1e3)} ms` : `${number(value)} s`;
}

function bytes(value) {
  const power = Math.min(Math.floor(Math.log2(Math.max(value, 1)) / 10), 4);
  return `${FORMAT.format(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
