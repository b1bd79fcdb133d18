// The strip of key figures, each with its history of the last minutes.

import { byId, el, say } from "/page/dom.js";
import { count, duration, percent, rate, share, time } from "/page/format.js";
import { Sparkline } from "/page/sparkline.js";

const ms = (seconds) => (seconds === null ? null : seconds * 1000);
// Without requests in the measuring window, there is nothing to measure.
const percentiles = (p50, p95) =>
  p50 === null
    ? { value: "–", unit: "", below: "no recent request" }
    : { value: duration(ms(p50))[0], unit: duration(ms(p50))[1], below: `p50; p95 ${time(ms(p95))}` };
const last = (series) => series.at(-1) ?? null;

// [name, colour, function from a snapshot to value, unit, text below, series, and drawing options]
const FIGURES = [
  ["output", "decode", ({ history }) => ({
    value: rate(last(history.generated_per_s) ?? 0), unit: "tokens/s",
    below: `${count(Math.max(0, ...history.generated_per_s))} peak`, series: history.generated_per_s, top: 10,
  })],
  ["prompts", "prefill", ({ history, totals }) => ({
    value: rate(last(history.prompt_per_s) ?? 0), unit: "tokens/s",
    below: `${percent(totals.prompt_tokens ? totals.cached_tokens / totals.prompt_tokens : null)} from prefix caches`,
    series: history.prompt_per_s, top: 10,
  })],
  ["time to first token", "prefill", ({ ttft: [p50, p95], history }) => ({
    ...percentiles(p50, p95), series: history.ttft_p50, second: history.ttft_p95, top: 0.01,
  })],
  ["inter-token latency", "decode", ({ itl: [p50, p95], history }) => ({
    ...percentiles(p50, p95), series: history.itl_p50, second: history.itl_p95, top: 0.005,
  })],
  ["in flight", "plain", ({ running, waiting, history }) => ({
    value: count(running), unit: "requests", below: `${count(waiting)} waiting`,
    series: history.running, second: history.waiting, top: 4,
  })],
  ["KV held", "decode", ({ history }) => ({
    value: share(last(history.decode_kv)).replace(" %", ""), unit: last(history.decode_kv) === null ? "" : "%", below: "of the decode pool",
    series: history.decode_kv, top: 1,
  })],
];

export class Figures {
  constructor() {
    this.parts = FIGURES.map(([name, kind, figure]) => {
      const value = el("b", { text: "–" });
      const unit = el("span", { class: "unit" });
      const below = el("p", { class: "quiet", text: " " });
      const line = new Sparkline(kind);
      byId("figures").append(el("article", { class: "figure" }, el("h2", { text: name }), el("p", { class: "value" }, value, unit), below, line.element));
      return { figure, value, unit, below, line };
    });
  }

  show(snapshot) {
    for (const { figure, value, unit, below, line } of this.parts) {
      const now = figure(snapshot);
      say(value, now.value);
      say(unit, now.unit);
      say(below, now.below);
      line.draw(now.series, { second: now.second, top: now.top });
    }
  }
}
