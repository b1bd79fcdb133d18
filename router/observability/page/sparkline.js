// A small line chart of the last minutes. A series is a list of numbers, or null for a gap.

import { svg } from "/page/dom.js";

const WIDTH = 150;
const HEIGHT = 32;

export class Sparkline {
  constructor(kind) {
    this.area = svg("path", { class: "area" });
    this.second = svg("path", { class: "second" });
    this.line = svg("path", { class: "line" });
    this.element = svg(
      "svg",
      { class: `sparkline ${kind}`, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area, this.second, this.line,
    );
  }

  /** `second` is drawn as a thin line on the same scale. The scale reaches at least to `top`. */
  draw(series, { second = [], top = 0, length = Math.max(30, series.length), steps = false } = {}) {
    const most = Math.max(top, ...series, ...second) || 1;
    const x = (index, all) => WIDTH - ((all.length - 1 - index) * WIDTH) / (length - 1);
    const y = (value) => HEIGHT - 1.5 - (value / most) * (HEIGHT - 4);
    this.line.setAttribute("d", trace(series, x, y, steps));
    this.second.setAttribute("d", trace(second, x, y, steps));
    this.area.setAttribute("d", runs(series).map((run) => outline(series, run, x, y, steps)).join(""));
  }
}

/** Returns [first, last] of each run without null. */
function runs(series) {
  const found = [];
  series.forEach((value, index) => {
    if (value === null) return;
    if (found.length && found.at(-1)[1] === index - 1) found.at(-1)[1] = index;
    else found.push([index, index]);
  });
  return found;
}

function trace(series, x, y, steps) {
  return runs(series).map((run) => points(series, run, x, y, steps, "M")).join("");
}

function points(series, [first, last], x, y, steps, pen) {
  let path = "";
  for (let index = first; index <= last; index += 1) {
    const at = x(index, series).toFixed(1);
    if (steps && index > first) path += `L${at} ${y(series[index - 1]).toFixed(1)}`;
    path += `${index === first ? pen : "L"}${at} ${y(series[index]).toFixed(1)}`;
  }
  return path;
}

function outline(series, run, x, y, steps) {
  const [left, right] = run.map((index) => x(index, series).toFixed(1));
  return `M${left} ${HEIGHT}${points(series, run, x, y, steps, "L")}L${right} ${HEIGHT}Z`;
}
