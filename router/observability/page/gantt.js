// The latest requests as rows of phases, on a common time axis or each from its own arrival.

import { byId, el, keyed, say } from "/page/dom.js";
import { count, time } from "/page/format.js";
import { ledgerView } from "/page/ledger.js";
import { KINDS, kindOf, nameOf } from "/page/phases.js";

// Lengths of the axis, in ms.
const SPANS = [1, 2, 4, 8, 12, 20, 40, 60].map((seconds) => seconds * 1000);
// Length of the common time axis, as a multiple of the usual request.
const WIDEST = 7;
// The common time axis keeps moving this long after the last request ends.
const IDLE_MS = 4000;
const FRAME_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : 80;
const ENDS = { stop: "", length: "", cancelled: "stopped", error: "failed" };

export class Gantt {
  constructor() {
    this.rows = [];
    // Ids of the requests that this page sent.
    this.mine = new Set();
    // "clock" or "arrival"; chosen when the first requests are shown.
    this.align = null;
    this.drawn = 0;
    // The router's clock minus the page's clock, in ms.
    this.offset = null;
    this.list = byId("gantt");
    byId("legend").append(...KINDS.map(([kind, name]) => el("li", {}, el("i", { class: `swatch ${kind}` }), name)));
    for (const button of byId("align").children) button.addEventListener("click", () => this.alignBy(button.dataset.align));
    this.list.addEventListener("keydown", (event) => this.step(event));
    this.list.addEventListener("pointerover", (event) => this.hint(event.target.closest("button"), event));
    this.list.addEventListener("pointermove", (event) => placeTip(event.clientX, event.clientY));
    this.list.addEventListener("pointerleave", () => this.hint(null));
    this.list.addEventListener("focusin", (event) => this.hint(event.target.matches(":focus-visible") ? event.target : null));
    this.list.addEventListener("focusout", () => this.hint(null));
    this.list.addEventListener("click", (event) => this.open(event.target.closest("button")));
    requestAnimationFrame((at) => this.frame(at));
  }

  show(snapshot) {
    const offset = snapshot.now - performance.now();
    const drift = this.offset === null ? Infinity : Math.abs(offset - this.offset);
    // Smoothed, so that one late answer does not move the axis.
    this.offset = drift > 1500 ? offset : this.offset + 0.1 * (offset - this.offset);
    this.rows = snapshot.requests;
    for (const row of this.rows) row.segments = segments(row);
    keyed(this.list, this.rows, (row) => `${row.id} ${row.at}`, makeRow, (node, row) => updateRow(node, row, this.mine.has(row.id)));
    if (this.rows.length && !this.list.querySelector('[tabindex="0"]')) this.list.querySelector("button").tabIndex = 0;
    this.list.classList.toggle("none", !this.rows.length);
    if (this.align === null && this.rows.length) this.alignBy(this.isIdle() ? "arrival" : "clock");
    this.draw();
  }

  rowOf(button) {
    return button && this.rows[[...this.list.children].indexOf(button.parentElement)];
  }

  /** Whether all requests ended so long ago that the common time axis would show none of them. */
  isIdle() {
    const now = performance.now() + this.offset;
    return this.rows.every((row) => !row.live && endOf(row) + IDLE_MS < now);
  }

  alignBy(align) {
    this.align = align;
    for (const button of byId("align").children) button.setAttribute("aria-pressed", button.dataset.align === align);
    this.draw();
  }

  frame(at) {
    requestAnimationFrame((next) => this.frame(next));
    if (document.hidden || at - this.drawn < FRAME_MS || !this.moving) return;
    this.drawn = at;
    this.draw();
  }

  draw() {
    const now = performance.now() + this.offset;
    const ends = this.rows.map((row) => (row.live ? now : endOf(row)));
    const lengths = this.rows.map((row, index) => ends[index] - row.at).sort((one, other) => one - other);
    const byClock = this.align === "clock";
    const right = Math.min(now, Math.max(...ends) + IDLE_MS);
    this.moving = right === now;
    const needed = byClock ? WIDEST * (lengths[lengths.length >> 1] ?? 1000) : lengths.at(-1) ?? 1000;
    const span = SPANS.find((one) => one >= needed) ?? SPANS.at(-1);
    this.axis(span, byClock, this.moving);
    this.rows.forEach((row, index) => {
      const bars = this.list.children[index].querySelector(".bars");
      const ago = right - ends[index];
      place(bars, row.segments, byClock ? span - (right - row.at) : 0, span, now - row.at);
      bars.dataset.ago = byClock && ago >= span ? `${Math.round(ago / 1000)} s earlier` : "";
    });
  }

  axis(span, byClock, moving) {
    const key = `${span} ${byClock} ${moving}`;
    if (this.axisKey === key) return;
    this.axisKey = key;
    const ticks = [0, 1, 2, 3, 4].map((index) => {
      const at = (span * index) / 4 / 1000;
      if (!byClock) return `${at} s`;
      return index === 4 ? (moving ? "now" : "idle") : `−${span / 1000 - at} s`;
    });
    byId("axis").replaceChildren(...ticks.map((text) => el("span", { text })));
    [...byId("axis").children].forEach((tick, index) => (tick.style.left = `${index * 25}%`));
  }

  step(event) {
    const here = document.activeElement;
    const items = [...this.list.querySelectorAll("button")];
    const index = items.indexOf(here);
    if (index < 0) return;
    const to = { ArrowDown: index + 1, ArrowUp: index - 1, Home: 0, End: items.length - 1 }[event.key];
    if (to !== undefined && items[to]) {
      event.preventDefault();
      for (const item of items) item.tabIndex = -1;
      items[to].tabIndex = 0;
      items[to].focus();
    }
  }

  hint(node, event) {
    const row = this.rowOf(node);
    const tip = byId("tip");
    tip.hidden = !row;
    if (!row) return;
    tip.replaceChildren(
      el("b", { text: row.tenant ? `${row.tenant}: ${row.id}` : row.id }),
      el("span", { class: "quiet", text: `${row.path ?? "no path yet"}${row.why ? ": " + row.why : ""}` }),
      ...row.phases.filter(([, ms]) => ms > 0).map(([phase, ms]) =>
        el("span", { class: "line" }, el("i", { class: `swatch ${kindOf(phase)}` }), nameOf(phase), el("span", { class: "number", text: time(ms) })),
      ),
      el("span", { class: "quiet", text: `prompt ${count(row.prompt_tokens)}, cached ${count(row.cached_tokens)}, answer ${count(row.tokens)}` }),
    );
    const box = node.getBoundingClientRect();
    if (event) placeTip(event.clientX, event.clientY);
    else placeTip(box.left + box.width / 3, box.bottom);
  }

  open(node) {
    const row = this.rowOf(node);
    if (!row) return;
    const dialog = byId("detail");
    const close = el("button", { type: "button", class: "close", "aria-label": "Close", text: "×", onclick: () => dialog.close() });
    const sizes = `prompt ${count(row.prompt_tokens)} tokens, ${count(row.cached_tokens)} of them cached; answer ${count(row.tokens)} of at most ${count(row.max_tokens)}; ${row.state.replace("_", " ")}`;
    dialog.replaceChildren(
      el("h2", { id: "detail-title" }, el("code", { text: row.id }), close),
      el("p", { class: "quiet", text: sizes }),
      ledgerView(row),
    );
    dialog.onclick = (event) => event.target === dialog && dialog.close();
    dialog.showModal();
    this.hint(null);
  }
}

function makeRow() {
  const cells = ["who", "workers", "bars", "number ttft", "number total", "number tokens"].map((name) => el("span", { class: name }));
  return el("li", {}, el("button", { type: "button", tabindex: "-1" }, ...cells));
}

function updateRow(node, row, mine) {
  const button = node.firstChild;
  const [who, workers, bars, ttft, total, tokens] = button.children;
  const length = row.phases.reduce((sum, [, ms]) => sum + ms, 0);
  button.className = `${row.live ? "live" : ""} ${row.state === "error" ? "failed" : ""} ${mine ? "mine" : ""}`;
  button.setAttribute("aria-label", label(row, length));
  say(who, mine ? "yours" : shortName(row.id));
  say(workers, [row.prefill, row.decode].filter(Boolean).join(" → ") || "–");
  say(ttft, row.tokens ? time(firstToken(row)) : "–");
  say(total, ENDS[row.state] || (row.live ? row.state.replace("_", " ") : time(length)));
  say(tokens, row.live ? `${count(row.tokens)} of ${count(row.max_tokens)}` : count(row.tokens));
  keyed(bars, row.segments, (one) => one.key, (one) => el("span", { class: `bar ${one.kind}` }), () => {});
}

/** `from`: position of the arrival on an axis of `span` ms. A growing segment ends at `age`. */
function place(bars, all, from, span, age) {
  all.forEach((one, index) => {
    const end = one.grows ? Math.max(age, one.end) : one.end;
    const { style } = bars.children[index];
    style.left = `${((from + one.start) / span) * 100}%`;
    style.width = `${((end - one.start) / span) * 100}%`;
  });
}

/**
 * Returns {key, kind, start, end, grows}, in ms after the arrival. Adjacent phases of the same kind
 * share a bar.
 */
function segments(row) {
  const found = [];
  let at = 0;
  for (const [phase, ms] of row.phases) {
    const kind = kindOf(phase);
    if (found.length && found.at(-1).kind === kind) found.at(-1).end = at + ms;
    else if (ms > 0 || row.live) found.push({ key: `${found.length} ${kind}`, kind, start: at, end: at + ms, grows: false });
    at += ms;
  }
  if (found.length) found.at(-1).grows = row.live;
  if (row.handoff_at) found.unshift({ key: "beside", kind: "handoff beside", start: Math.max(0, row.handoff_at[0]), end: row.handoff_at[1], grows: false });
  return found;
}

const endOf = (row) => row.at + row.phases.reduce((sum, [, ms]) => sum + ms, 0);

function firstToken(row) {
  return 1000 * (row.ledger.ttft_seconds || Object.values(row.ledger.phases).reduce((sum, one) => sum + one, 0));
}

function label(row, length) {
  const state = row.live ? row.state.replace("_", " ") : { error: "failed", cancelled: "stopped" }[row.state] ?? "finished";
  return `${row.id}: ${state}, ${row.path ?? "no path yet"}, ${row.tokens} tokens in ${time(length)}`;
}

/** Shortens a long id. Eight characters are enough to tell the rows apart. */
function shortName(id) {
  return id.length > 10 ? `${id.slice(0, 8)}…` : id;
}

function placeTip(x, y) {
  const tip = byId("tip");
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 10) : y + 18}px`;
}
