// The ledger of a request: its workers, the phases up to the first token, and the later times.

import { el } from "/page/dom.js";
import { bytes, count, time } from "/page/format.js";
import { kindOf, meaningOf, nameOf } from "/page/phases.js";

/**
 * Shows a ledger. The argument has path, why and ledger, like the last chunk of an answer and the
 * rows of a snapshot.
 */
export function ledgerView({ path, why, prefill, decode, ledger }) {
  const last = ledger.attempts.at(-1);
  const phases = Object.entries(ledger.phases).filter(([, seconds]) => seconds > 0);
  return el(
    "div", { class: "ledger" },
    route(path, prefill ?? last?.prefill_worker, decode ?? last?.decode_worker, ledger.handoff),
    el("p", { class: "why", text: why || "no worker was chosen" }),
    phases.length ? bar(phases) : null,
    phases.length ? table(phases, ledger) : null,
    facts(ledger),
    ledger.handoff ? handoff(ledger.handoff) : null,
    ledger.attempts.length > 1 ? attempts(ledger.attempts) : null,
  );
}

function route(path, prefill, decode, handoff) {
  return el(
    "p", { class: "route" },
    prefill ? el("span", { class: "chip prefill", text: prefill }) : null,
    prefill ? el("span", { class: "arrow", text: handoff ? bytes(handoff.bytes) : "" }) : null,
    decode ? el("span", { class: "chip decode", text: decode }) : null,
    el("span", { class: "quiet path", text: path ?? "" }),
  );
}

function bar(phases) {
  const view = el("div", { class: "stack", "aria-hidden": "true" });
  for (const [phase, seconds] of phases) {
    const part = el("span", { class: `fill ${kindOf(phase)}`, title: `${nameOf(phase)} ${time(seconds * 1000)}` });
    // With a sum below 1, the parts would not fill the bar.
    part.style.flexGrow = seconds * 1e6;
    view.append(part);
  }
  return view;
}

function table(phases, ledger) {
  const rows = phases.map(([phase, seconds]) =>
    el(
      "tr", {},
      el("th", { scope: "row" }, el("i", { class: `swatch ${kindOf(phase)}` }), nameOf(phase)),
      el("td", { class: "quiet meaning", text: meaningOf(phase) }),
      el("td", { class: "number", text: time(seconds * 1000) }),
    ),
  );
  const sum = phases.reduce((all, [, seconds]) => all + seconds, 0);
  rows.push(
    el(
      "tr", { class: "sum" },
      el("th", { scope: "row", text: ledger.ttft_seconds ? "first token" : "so far" }),
      el("td", { class: "quiet meaning", text: ledger.ttft_seconds ? "TTFT at the router, the sum" : "no token arrived" }),
      el("td", { class: "number", text: time(sum * 1000) }),
    ),
  );
  return el("table", {}, el("tbody", {}, ...rows));
}

function facts(ledger) {
  // Token 2 may come with the first one.
  const shown = (seconds) => (seconds || ledger.decode_seconds ? time(seconds * 1000) : "–");
  const pairs = [
    ["gap to token 2", ledger.second_token_gap_seconds],
    ["first to last", ledger.decode_seconds],
    ["end to end", ledger.e2e_seconds],
  ];
  return el(
    "dl", { class: "facts" },
    ...pairs.map(([name, seconds]) => el("div", {}, el("dt", { text: name }), el("dd", { text: shown(seconds) }))),
  );
}

function handoff(one) {
  const parts = [
    `${count(one.blocks)} blocks × ${bytes(one.block_bytes)} = ${bytes(one.bytes)} over ${one.transport} in ${time(one.seconds * 1000)}`,
    `${time(one.exposed_seconds * 1000)} of it after the end of prefill`,
  ];
  if (one.cached_blocks) parts.push(`${count(one.cached_blocks)} blocks were already cached`);
  return el("p", { class: "handoff-facts" }, el("i", { class: "swatch handoff" }), `hand-off: ${parts.join("; ")}`);
}

function attempts(all) {
  const items = all.map((one, index) => {
    const failed = index < all.length - 1 && one.outcome !== "finished" && !("preempted" in (one.phases ?? {}));
    const phases = Object.entries(one.phases ?? {}).filter(([, seconds]) => seconds > 0);
    const sum = phases.reduce((total, [, seconds]) => total + seconds, 0);
    const workers = [one.prefill_worker, one.decode_worker].filter(Boolean).join(" → ");
    const parts = phases.map(([phase, seconds]) => `${nameOf(phase)} ${time(seconds * 1000)}`);
    return el(
      "li", {},
      failed ? el("i", { class: "swatch failed" }) : null,
      `${workers}${sum ? `, ${time(sum * 1000)}` : ""}: ${one.outcome}`,
      parts.length ? el("div", { class: "quiet", text: parts.join(", ") }) : null,
    );
  });
  return el("ol", { class: "attempts", "aria-label": "attempts" }, ...items);
}
