// Prometheus' text exposition: parsing, rates, quantiles.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? +(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** All metrics at one moment; `time` in seconds. */
export class Snapshot {
  constructor(text, time) {
    this.time = time;
    this.samples = new Map(); // name -> [{labels, value}]
    for (const line of text.split("\n")) {
      const match = line.match(SAMPLE);
      if (!match) continue;
      const [, name, labels = "", value] = match;
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples
        .get(name)
        .push({ labels: parseLabels(labels), value: Number(value.replace("Inf", "Infinity")) });
    }
  }

  /** Sum of the samples that have these labels; null if the server has no such metric. */
  value(name, labels = {}) {
    const wanted = Object.entries(labels);
    const found = (this.samples.get(name) ?? []).filter((s) =>
      wanted.every(([key, value]) => s.labels[key] === value),
    );
    return found.length ? found.reduce((sum, sample) => sum + sample.value, 0) : null;
  }

  /** [upper bound, observations up to it], in order. */
  buckets(name) {
    const sums = new Map();
    for (const { labels, value } of this.samples.get(`${name}_bucket`) ?? []) {
      const bound = Number(labels.le.replace("Inf", "Infinity"));
      sums.set(bound, (sums.get(bound) ?? 0) + value);
    }
    return [...sums].sort(([a], [b]) => a - b);
  }
}

function parseLabels(text) {
  const labels = {};
  for (const [, name, value] of text.matchAll(LABEL))
    labels[name] = value.replace(/\\[n"\\]/g, (found) => ESCAPED[found]);
  return labels;
}

/** Growth of a counter per second from `before` to `now`; null without both. */
export function rate(now, before, name) {
  const growth = grown(now, before, name);
  return growth === null ? null : growth / (now.time - before.time);
}

export function grown(now, before, name) {
  const [end, begin] = [now.value(name), before?.value(name) ?? null];
  return end === null || begin === null ? null : end - begin;
}

/**
 * Quantiles of what a histogram observed from `before` (null: the start) to `now`; null if that is nothing.
 * Within a bucket they are interpolated; beyond the last bound they are that bound.
 */
export function quantiles(now, before, name, shares) {
  const earlier = new Map(before?.buckets(name));
  const buckets = now.buckets(name).map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  return shares.map((share) => {
    const rank = share * total;
    const i = buckets.findIndex(([, count]) => count >= rank);
    const [low, below] = i > 0 ? buckets[i - 1] : [0, 0];
    const [high, count] = buckets[i];
    return high === Infinity ? low : low + (high - low) * ((rank - below) / (count - below || 1));
  });
}
