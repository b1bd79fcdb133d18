"use strict";
// The data and the building blocks of every plot. Data from a target is always set as text, never
// as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
// The names of the latencies, by key.
const NAMES = DATA.names ?? {};
const KINDS = {
  send: "client, network", queue: "queue", first: "until first token", prefill: "prefill", handoff: "hand-off", decode: "decode",
  failed: "failed attempt",
};
// As on the status page. Other phases are waits.
const PHASE_KIND = {
  "client and network": "send", fetch: "handoff", prefill: "prefill", return: "prefill", emit: "decode", failed_attempt: "failed",
};
// Mean width of a character in a plot, in px.
const CHARACTER = 6.6;
const colour = (name) => `var(--${name})`;
const runColour = (index) => colour(`run${index}`);

// Elements and numbers

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((one) => one !== null && one !== undefined));
  return node;
}

function shape(tag, attributes, parent, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2)} ms`;
}
// The largest value, or 0. A long list exceeds the argument limit of Math.max.
const most = (values) => values.reduce((high, value) => Math.max(high, value), 0);
const number = (value) => (Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3)));
const percent = (share) => `${(100 * share).toFixed(share > 0.9995 || share === 0 ? 0 : 1)} %`;
const seconds = (value) => `${+value.toFixed(value < 10 ? 2 : 1)} s`;

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(+at.toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
    for (const one of [1, 2, 5]) if (one * power >= low && one * power <= high) found.push(one * power);
  return found.length > 8 ? found.filter((_, index) => index % 2 === 0) : found;
}

function scale(low, high, from, to, logarithmic = false) {
  const f = logarithmic ? Math.log : (value) => value;
  const [a, b] = [f(low), f(high)];
  const map = (value) => from + ((f(logarithmic ? Math.max(value, low) : value) - a) / (b - a || 1)) * (to - from);
  map.inverse = (place) => {
    const value = a + ((place - from) / (to - from)) * (b - a);
    return logarithmic ? Math.exp(value) : value;
  };
  return map;
}

// Hover text: rows of [colour or null, text]; the first row is bold

const tip = document.getElementById("tip");

function showTip(event, rows) {
  tip.replaceChildren(
    ...rows.map(([paint, text], index) => {
      const row = element("div");
      if (paint) row.append(element("i", { style: `background:${paint}` }));
      row.append(index === 0 ? element("b", {}, text) : text);
      return row;
    }),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
  tip.style.left = `${Math.max(6, left)}px`;
  tip.style.top = `${Math.max(6, Math.min(event.clientY + 14, innerHeight - height - 6))}px`;
}
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });

// Frames

function chart(height, label, draw) {
  const holder = element("div", { class: "chart" });
  let drawn = 0;
  const redraw = (width) => {
    if (!width || width === drawn) return;
    drawn = width;
    const tall = typeof height === "function" ? height(width) : height;
    const svg = shape("svg", { width, height: tall, viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": label });
    draw(svg, width, tall);
    holder.replaceChildren(svg);
  };
  // Draws in the next frame, because drawing changes the height of the observed element.
  new ResizeObserver(([entry]) => requestAnimationFrame(() => redraw(Math.round(entry.contentRect.width)))).observe(holder);
  return holder;
}

function card(title, sub, ...children) {
  return element("section", { class: "card" }, title && element("h3", {}, title), sub && element("p", { class: "sub" }, sub), ...children);
}

/** A sentence that begins with a capital letter. */
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const logScale = (unit, logarithmic) => (logarithmic ? `${unit}, log scale` : unit);

function legend(items) {
  const all = items.map(([paint, text, kind]) =>
    element("span", {}, element("i", { class: kind || "", style: `background:${paint}` }), text));
  return element("div", { class: "legend" }, ...all);
}

/** On a phone, a `stacked` table has a paragraph for each row instead of a line. */
function table(head, rows, textColumns = [], stacked = head.length > 4) {
  const cells = (tag, row) => row.map((one, index) => {
    const [text, style] = Array.isArray(one) ? one : [one, textColumns.includes(index) ? "text" : ""];
    return element(tag, { ...(style && { class: style }), "data-column": head[index] }, text);
  });
  return element("div", { class: "scroll" }, element("table", { class: stacked ? "stacked" : "" },
    element("thead", {}, element("tr", {}, ...cells("th", head))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row))))));
}

function xAxis(svg, x, values, y, format, unit, left, right) {
  shape("line", { x1: left, x2: right, y1: y, y2: y, class: "axis" }, svg);
  let end = -Infinity;
  for (const value of values) {
    const place = x(value);
    const text = format(value);
    const half = text.length * CHARACTER / 2;
    if (place - half < end + 6 || place > right + 1) continue;
    shape("text", { x: place, y: y + 15, "text-anchor": "middle" }, svg, text);
    end = place + half;
  }
  shape("text", { x: right, y: y + 28, "text-anchor": "end" }, svg, unit);
}

function yGrid(svg, y, values, left, right, format) {
  for (const value of values) {
    shape("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid-line" }, svg);
    shape("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, svg, format(value));
  }
}

const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
const stepped = (points) => points.flatMap((point, index) => (index ? [[point[0], points[index - 1][1]], point] : [point]));
