// A line of the last two minutes, and a bar cut into its parts.

import { el, svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 44;
const SPAN = 120; // seconds

/** Lines of several series over time, from zero to the largest value in sight. */
export class Lines {
  constructor(classes) {
    this.points = []; // [time, values]
    this.paths = classes.map((name) =>
      svg("path", { class: `line ${name}`, "vector-effect": "non-scaling-stroke" }),
    );
    this.areas = classes.map((name) => svg("path", { class: `area ${name}` }));
    const box = {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      class: "lines",
    };
    this.node = svg("svg", box, this.areas, this.paths);
  }

  /** `label`: what the picture says, in words. */
  add(time, values, label) {
    this.points = [...this.points.filter(([t]) => t > time - SPAN), [time, values]];
    const most = Math.max(...this.points.flatMap(([, all]) => all), 1e-9);
    const x = (t) => (WIDTH - ((time - t) / SPAN) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - 2 - (value / most) * (HEIGHT - 6)).toFixed(1);
    this.paths.forEach((path, series) => {
      const line = this.points.map(([t, all]) => `${x(t)} ${y(all[series])}`).join("L");
      path.setAttribute("d", `M${line}`);
      this.areas[series].setAttribute("d", `M${x(this.points[0][0])} ${HEIGHT}L${line}L${WIDTH} ${HEIGHT}Z`);
    });
    this.node.setAttribute("aria-label", label);
  }

  get most() {
    return Math.max(...this.points.flatMap(([, values]) => values), 0);
  }
}

/** A bar of parts with a legend; `parts` are [name, class]. What they leave of the whole is free. */
export class StackedBar {
  constructor(parts) {
    const all = [...parts, ["Free", "free"]];
    this.segments = all.map(([, kind]) => el("span", { class: kind }));
    this.values = all.map(() => el("dd"));
    const entries = all.map(([name, kind], i) =>
      el("div", {}, el("dt", {}, el("i", { class: kind }), name), this.values[i]),
    );
    this.bar = el("div", { class: "bar", "aria-hidden": "true" }, this.segments);
    this.node = el("div", {}, this.bar, el("dl", { class: "legend" }, entries));
  }

  update(whole, sizes, format) {
    const free = Math.max(0, whole - sizes.reduce((a, b) => a + b));
    [...sizes, free].forEach((size, i) => {
      this.segments[i].style.flexGrow = size;
      this.values[i].textContent = format(size);
    });
  }
}
