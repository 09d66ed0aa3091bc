// The live view of the engine: /metrics once a second while it is in sight. It shows what the server has.

import { metricsText } from "./api.js";
import { makeCards } from "./cards.js";
import { $ } from "./dom.js";
import { Snapshot, grown } from "./exposition.js";

const PERIOD = 1000; // milliseconds
const WINDOW = 60; // seconds, of rates and quantiles that need many observations

let history = []; // snapshots of the last WINDOW seconds, oldest first
let timer = null;

const cards = makeCards();

export function startEngine() {
  $("cards").append(...cards.map((card) => card.node));
  document.addEventListener("view", resume);
  document.addEventListener("visibilitychange", resume);
}

const inSight = () => document.body.dataset.view === "engine" && document.visibilityState === "visible";

function resume() {
  if (inSight()) timer ??= setTimeout(poll, 0);
}

async function poll() {
  const begun = performance.now();
  try {
    take(new Snapshot(await metricsText(AbortSignal.timeout(10 * PERIOD)), begun / 1000));
    $("engine-state").textContent = "Live, every second";
  } catch (error) {
    $("engine-state").textContent = error.message;
  }
  timer = null;
  if (inSight()) timer = setTimeout(poll, Math.max(0, begun + PERIOD - performance.now()));
  else $("engine-state").textContent = "Paused";
}

function take(now) {
  const restarted = (grown(now, history.at(-1), "vllm:generation_tokens_total") ?? 0) < 0;
  history = restarted ? [] : history.filter((snapshot) => snapshot.time > now.time - WINDOW);
  const [before, oldest] = [history.at(-1) ?? null, history[0] ?? null];
  history.push(now);
  for (const card of cards) card.node.hidden = card.update(now, before, oldest) === false;
}
