// The latest requests as rows of phases, on a common time axis or each from its own arrival.

import { byId, el, keyed, say } from "/page/dom.js";
import { count, ownName, time } from "/page/format.js";
import { ledgerView } from "/page/ledger.js";
import { KINDS, kindOf, nameOf } from "/page/phases.js";

// Lengths of the axis: one of these times a power of ten. A quarter of each has few digits.
const LENGTHS = [1, 1.2, 2, 4, 6, 8, 10];
// The shortest axis, in ms.
const SHORTEST = 20;
// Limits of the common time axis, in ms.
const CLOCK_SHORTEST = 1000;
const CLOCK_LONGEST = 60000;
// Length of the common time axis, as a multiple of the usual request.
const WIDEST = 7;
// Share of the requests in view that the axis from arrival may cut, and how many times as long as
// all others they are.
const CUT_SHARE = 0.1;
const CUT_FROM = 4;
// The common time axis keeps moving this long after the last request ends, but for at most half of
// its length: a part of the last requests stays on it.
const IDLE_MS = 4000;
// Attempts of a request that are listed.
const MAX_ATTEMPTS = 4;
const FRAME_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : 80;
const ENDS = { stop: "", length: "", cancelled: "stopped", error: "failed" };

export class Gantt {
  constructor() {
    this.rows = [];
    // Ids of the requests that this page sent.
    this.mine = new Set();
    // "clock" or "arrival". Only a click changes it.
    this.align = "arrival";
    this.drawn = 0;
    // The router's clock minus the page's clock, in ms.
    this.offset = null;
    this.list = byId("gantt");
    this.cutMark = el("li", { hidden: true }, el("b", { text: "»" }), "longer than the axis");
    byId("legend").append(...KINDS.map(([kind, name]) => el("li", {}, el("i", { class: `swatch ${kind}` }), name)), this.cutMark);
    for (const button of byId("align").children) button.addEventListener("click", () => this.alignBy(button.dataset.align));
    this.list.addEventListener("keydown", (event) => this.step(event));
    this.list.addEventListener("pointerover", (event) => this.hint(event.target.closest("button"), event));
    this.list.addEventListener("pointermove", (event) => placeTip(event.clientX, event.clientY));
    this.list.addEventListener("pointerleave", () => this.hint(null));
    this.list.addEventListener("scroll", () => this.draw(), { passive: true });
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
    keyed(this.list, this.rows, (row) => `${row.id} ${row.at}`, makeRow, (node, row) => updateRow(node, row, this.mine.has(row.id), snapshot.worker_prefix));
    this.follow();
    if (this.rows.length && !this.list.querySelector('[tabindex="0"]')) this.list.querySelector("button").tabIndex = 0;
    this.list.classList.toggle("none", !this.rows.length);
    this.draw();
  }

  rowOf(button) {
    return button && this.rows[[...this.list.children].indexOf(button.parentElement)];
  }

  /** The indices of the rows that are in view. */
  inView() {
    const { scrollTop, clientHeight } = this.list;
    const first = this.list.firstElementChild?.offsetTop ?? 0;
    return [...this.list.children].flatMap((node, index) => {
      const top = node.offsetTop - first;
      return top + node.offsetHeight > scrollTop && top < scrollTop + clientHeight ? [index] : [];
    });
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
    const byClock = this.align === "clock";
    const span = byClock ? this.clockSpan(ends) : this.arrivalSpan(ends);
    const last = this.rows.length ? Math.max(...ends) : now;
    const right = Math.min(now, last + Math.min(IDLE_MS, span / 2));
    this.moving = right === now;
    this.axis(span, byClock, now - right);
    let cuts = 0;
    this.rows.forEach((row, index) => {
      const bars = this.list.children[index].querySelector(".bars");
      const ago = right - ends[index];
      place(bars, row.segments, byClock ? span - (right - row.at) : 0, span, now - row.at);
      const cut = !byClock && ends[index] - row.at > span * 1.001;
      cuts += cut;
      bars.classList.toggle("cut", cut);
      bars.dataset.ago = byClock && ago >= span ? `${clockLength(ago)} earlier` : "";
    });
    this.cutMark.hidden = !cuts;
  }

  /** The length of the common time axis: several requests of the usual length fit on it. */
  clockSpan(ends) {
    const lengths = this.rows.map((row, index) => ends[index] - row.at).sort((one, other) => one - other);
    const needed = WIDEST * (lengths[lengths.length >> 1] ?? 1000);
    return niceSpan(Math.min(CLOCK_LONGEST, Math.max(CLOCK_SHORTEST, needed)));
  }

  /**
   * The length of the axis from arrival: the requests in view fit on it, but for a few that would
   * make the bars of all others too short to read.
   */
  arrivalSpan(ends) {
    const lengths = this.inView().map((index) => ends[index] - this.rows[index].at).sort((one, other) => other - one);
    const [longest = 1000] = lengths;
    const others = lengths[Math.floor(CUT_SHARE * lengths.length)] ?? longest;
    return niceSpan(Math.max(SHORTEST, longest > CUT_FROM * others ? others : longest));
  }

  /** `ago`: how long ago the right end of the common time axis was, in ms. */
  axis(span, byClock, ago) {
    const end = ago ? `${clockLength(ago)} ago` : "now";
    const key = `${span} ${byClock} ${end}`;
    if (this.axisKey === key) return;
    this.axisKey = key;
    const ticks = [0, 1, 2, 3, 4].map((index) => {
      const at = (span * index) / 4;
      if (!byClock) return axisTime(at, span);
      return index === 4 ? end : `−${axisTime(span - at, span)}`;
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
    const body = el("div", {}, ...detail(row));
    dialog.replaceChildren(el("h2", { id: "detail-title" }, el("code", { text: row.id }), close), body);
    dialog.onclick = (event) => event.target === dialog && dialog.close();
    dialog.showModal();
    this.shown = { row, body };
    this.hint(null);
  }

  /** Shows the progress of the request in the open dialog. An ended request stays as it is. */
  follow() {
    if (!byId("detail").open || !this.shown?.row.live) return;
    const { row: { id, at }, body } = this.shown;
    const row = this.rows.find((one) => one.id === id && one.at === at);
    if (!row) return;
    this.shown.row = row;
    body.replaceChildren(...detail(row));
  }
}

function detail(row) {
  const sizes = `prompt ${count(row.prompt_tokens)} tokens, ${count(row.cached_tokens)} of them cached; answer ${count(row.tokens)} of at most ${count(row.max_tokens)}; ${row.state.replace("_", " ")}`;
  return [el("p", { class: "quiet", text: sizes }), ledgerView(row)];
}

function makeRow() {
  const cells = ["who", "workers", "bars", "number ttft", "number total", "number tokens"].map((name) => el("span", { class: name }));
  return el("li", {}, el("button", { type: "button", tabindex: "-1" }, ...cells));
}

function updateRow(node, row, mine, prefix) {
  const button = node.firstChild;
  const [who, workers, bars, ttft, total, tokens] = button.children;
  const length = row.live ? row.phases.reduce((sum, [, ms]) => sum + ms, 0) : 1000 * row.ledger.e2e_seconds;
  button.className = `${row.live ? "live" : ""} ${row.state === "error" ? "failed" : ""} ${mine ? "mine" : ""}`;
  button.setAttribute("aria-label", label(row, length));
  say(who, mine ? "yours" : shortName(row.id));
  const attempts = attemptsOf(row);
  button.classList.toggle("retried", attempts.length > 1);
  keyed(workers, attempts, (one) => `${one.number} ${one.failed} ${one.workers} ${one.lost}`, (one) => attemptNode(one, prefix), () => {});
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

/**
 * The attempts of a row as {number, workers, lost, failed}, with the live one. `lost`: the workers
 * that the outcome of a failed attempt names.
 */
function attemptsOf(row) {
  const ended = row.ledger.attempts.map((one) => ({ ...one, workers: [one.prefill_worker, one.decode_worker].filter(Boolean) }));
  const running = [row.prefill, row.decode].filter(Boolean);
  if (row.live && ended.at(-1)?.outcome !== "finished") ended.push({ workers: running, outcome: "", phases: {} });
  const found = ended.map(({ workers, outcome, phases }, index) => {
    const failed = failedAttempt(row, { outcome, phases }, index < ended.length - 1);
    const named = outcome.split(/[^\w.-]+/);
    const lost = failed ? workers.filter((name) => named.includes(name)) : [];
    return { number: index, workers, failed, lost: failed && !lost.length ? workers : lost };
  });
  return found.length ? found.slice(-MAX_ATTEMPTS) : [{ number: 0, workers: [], failed: false, lost: [] }];
}

function failedAttempt(row, { outcome, phases }, followed) {
  if (outcome === "finished" || "preempted" in phases) return false;
  return followed || row.state === "error";
}

function attemptNode({ workers, failed, lost }, prefix) {
  const shown = (name) => (lost.includes(name) ? el("span", { class: "lost", text: ownName(name, prefix) }) : ownName(name, prefix));
  const parts = workers.flatMap((name, index) => [index ? " → " : "", shown(name)]);
  const mark = failed ? [el("i", { class: "swatch failed", title: "failed attempt" }), " "] : [];
  return el("span", { class: failed ? "attempt failed" : "attempt" }, ...mark, ...(parts.length ? parts : ["–"]));
}

const endOf = (row) => row.at + row.phases.reduce((sum, [, ms]) => sum + ms, 0);

function firstToken(row) {
  return 1000 * (row.ledger.ttft_seconds || Object.values(row.ledger.phases).reduce((sum, one) => sum + one, 0));
}

function label(row, length) {
  const state = row.live ? row.state.replace("_", " ") : { error: "failed", cancelled: "stopped" }[row.state] ?? "finished";
  const lost = attemptsOf(row).flatMap((one) => one.lost);
  const after = lost.length ? `, after a failure on ${lost.join(", ")}` : "";
  return `${row.id}: ${state}, ${row.path ?? "no path yet"}, ${row.tokens} tokens in ${time(length)}${after}`;
}

/** Shortens a long id. Eight characters are enough to tell the rows apart. */
function shortName(id) {
  return id.length > 10 ? `${id.slice(0, 8)}…` : id;
}

function niceSpan(needed) {
  const power = 10 ** Math.floor(Math.log10(needed));
  return LENGTHS.map((one) => one * power).find((one) => one >= needed * 0.999);
}

/** A time on an axis of `span` ms, in the unit of the axis. */
function axisTime(ms, span) {
  return span < 1000 ? `${+ms.toFixed(2)} ms` : `${+(ms / 1000).toFixed(3)} s`;
}

function clockLength(ms) {
  const seconds = Math.max(1, Math.round(ms / 1000));
  if (seconds < 120) return `${seconds} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function placeTip(x, y) {
  const tip = byId("tip");
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 10) : y + 18}px`;
}
