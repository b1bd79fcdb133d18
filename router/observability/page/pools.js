// The pools with their workers, their actual and desired sizes, and the scaling decisions.

import { byId, el, keyed, say } from "/page/dom.js";
import { bytes, clock, count, ownName, rate, share } from "/page/format.js";
import { Sparkline } from "/page/sparkline.js";

const COLUMNS = [["worker", ""], ["KV held", "kv"], ["running", "number"], ["waiting", "number"], ["tok/s", "number"]];

export class Pools {
  constructor() {
    this.lines = {};
  }

  show(snapshot) {
    keyed(byId("pool-list"), snapshot.pools, (pool) => pool.name, poolNode, (node, pool) => updatePool(node, pool, snapshot.worker_prefix));
    if (!snapshot.cluster) return;
    keyed(byId("sizes"), snapshot.pools, (pool) => pool.name, (pool) => this.sizeNode(pool), (node, pool) => {
      const [, , have] = node.children;
      say(have, `${pool.ready} ready, ${pool.desired} desired`);
      node.classList.toggle("short", pool.ready !== pool.desired);
      this.lines[pool.name].draw(snapshot.history[`${pool.name}_workers`], { top: pool.desired + 0.5, steps: true });
    });
    const decisions = byId("decisions");
    keyed(decisions, snapshot.decisions, (one) => `${one.unix_time} ${one.pool}`, decisionNode, () => {});
    decisions.classList.toggle("none", !snapshot.decisions.length);
    keyed(byId("delayed"), snapshot.delayed, (one) => one.pool, () => el("li", { class: "quiet" }), (node, one) => say(node, `delayed: ${one.pool} ${one.before} → ${one.after}: ${one.reason}`));
    const { waiting, router } = snapshot;
    say(byId("queue"), waiting ? `router queue: ${count(waiting)} requests, ${count(router.waiting_tokens)} tokens; ${count(router.waiting_for_prefill)} wait for a prefill worker` : "router queue empty");
    const { finished, failed, handoff_bytes } = snapshot.totals;
    say(byId("totals"), `${count(finished)} answered, ${count(failed)} failed, ${bytes(handoff_bytes)} handed off`);
  }

  sizeNode(pool) {
    this.lines[pool.name] = new Sparkline(pool.name);
    return el("div", { class: "size" }, el("span", { class: "name" }, el("i", { class: `swatch ${pool.name}` }), pool.name), this.lines[pool.name].element, el("span", { class: "quiet have" }));
  }
}

function poolNode(pool) {
  const head = el("tr", {}, ...COLUMNS.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)));
  head.querySelector(".kv").prepend(el("i", { class: "swatch" }), " ");
  head.querySelector(".kv").append(" ", el("i", { class: "swatch cached" }), " cached");
  return el(
    "div", { class: `pool ${pool.name}` },
    el("h3", {}, el("i", { class: `swatch ${pool.name}` }), pool.name, el("span", { class: "pips" }), el("span", { class: "quiet" })),
    el("table", {}, el("thead", {}, head), el("tbody")),
    el("p", { class: "quiet more" }),
  );
}

function updatePool(node, pool, prefix) {
  const [title, table, more] = node.children;
  const [, pips, text] = title.children;
  say(text, `${pool.ready} of ${pool.desired} ready`);
  const places = Math.min(16, Math.max(pool.desired, pool.size));
  keyed(pips, [...Array(places).keys()], (index) => index, () => el("i"), (pip, index) => {
    pip.className = index < pool.ready ? "up" : index < pool.size ? "coming" : "";
  });
  keyed(table.tBodies[0], pool.workers, (worker) => worker.id, workerNode, (row, worker) => updateWorker(row, worker, prefix));
  const hidden = pool.size - pool.workers.length;
  say(more, pool.size ? (hidden && pool.workers.length ? `and ${hidden} more` : "") : "no worker yet");
}

function workerNode() {
  const held = el("i", { class: "held" });
  const cached = el("i", { class: "cached" });
  return el(
    "tr", {},
    el("th", { scope: "row" }, el("span", { class: "id" }), el("small", { class: "quiet" })),
    el("td", { class: "kv" }, el("span", { class: "meter" }, held, cached), el("span", { class: "number" }), el("small", { class: "tiers quiet" })),
    ...[1, 2, 3].map(() => el("td", { class: "number" })),
  );
}

function updateWorker(node, worker, prefix) {
  const [name, kv, running, waiting, speed] = node.children;
  const total = worker.blocks_total || 1;
  say(name.firstChild, ownName(worker.id, prefix));
  const word = worker.state === "ready" && worker.unfit ? "unfit" : worker.state;
  say(name.lastChild, word === "ready" ? "" : word);
  name.lastChild.className = word === "ready" ? "" : `badge ${word}`;
  const more = worker.integrity || worker.unfit || `epoch ${worker.epoch}, ${worker.state}; ${bytes(worker.rss_bytes)} resident, ${count(worker.preemptions)} preemptions`;
  name.title = `${worker.id}: ${more}`;
  node.classList.toggle("broken", Boolean(worker.integrity));
  const [held, cached] = kv.firstChild.children;
  held.style.width = `${(100 * worker.blocks_held) / total}%`;
  cached.style.width = `${(100 * worker.blocks_cached) / total}%`;
  const [, number, tiers] = kv.children;
  say(tiers, worker.tiers.map((tier) => `${tier.errors ? "⚠ " : ""}${tier.kind} ${bytes(tier.used_bytes)}`).join(", "));
  tiers.title = worker.tiers.map(tierText).join("\n");
  kv.firstChild.title = `${count(worker.blocks_held)} of ${count(total)} blocks held, ${count(worker.blocks_cached)} cached; ${bytes(worker.kv_bytes)}`;
  say(number, share(worker.blocks_held / total));
  say(running, count(worker.running));
  say(waiting, count(worker.waiting));
  say(speed, rate(worker.tokens_per_s));
}

function tierText(tier) {
  const errors = tier.errors ? `; ${count(tier.errors)} errors, the last: ${tier.error}` : "";
  return `${tier.kind}: ${count(tier.blocks)} blocks, ${bytes(tier.used_bytes)} of ${bytes(tier.size_bytes)}; ${count(tier.hits)} came back, ${count(tier.misses)} missed${errors}`;
}

function decisionNode(one) {
  const direction = one.after > one.before ? "up" : "down";
  return el(
    "li", {},
    el("time", { datetime: new Date(one.unix_time * 1000).toISOString(), text: clock(one.unix_time) }),
    el("span", { class: "change" }, el("i", { class: `swatch ${one.pool}` }), `${one.pool} ${one.before} → ${one.after}`, el("span", { class: "unseen", text: direction })),
    el("span", { class: "quiet", text: one.reason }),
  );
}
