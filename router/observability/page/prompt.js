// The form for a prompt: the tokens as they arrive, the time between tokens, and the ledger.

import { byId, el, say } from "/page/dom.js";
import { rate, time } from "/page/format.js";
import { ledgerView } from "/page/ledger.js";
import { ask } from "/page/session.js";

const MAX_BARS = 256;

export class Prompt {
  /** `served` is called with the id of each answered request. */
  constructor(served) {
    this.served = served;
    this.controller = null;
    byId("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask-form").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.controller?.abort());
  }

  show(snapshot) {
    this.model = snapshot.model;
    byId("mode-field").hidden = !snapshot.chat;
    byId("max-tokens").max = snapshot.max_model_len;
    this.open = snapshot.state === "ready";
    this.buttons();
  }

  gone() {
    this.open = false;
    this.buttons();
  }

  buttons() {
    byId("send").disabled = !this.open || this.controller !== null;
    byId("stop").disabled = this.controller === null;
  }

  async send() {
    if (this.controller || !this.open) return;
    this.controller = new AbortController();
    this.buttons();
    this.begin();
    try {
      await this.stream(this.controller.signal);
      this.summary();
    } catch (error) {
      this.note(this.controller.signal.aborted ? "stopped" : error.message);
      this.summary();
    } finally {
      // Drops the rest of an answer that failed.
      this.controller.abort();
      this.controller = null;
      this.buttons();
    }
  }

  begin() {
    this.sent = performance.now();
    // [ms since the request was sent, tokens]
    this.arrivals = [];
    this.longest = 0;
    byId("answer").replaceChildren(el("span", { class: "cursor", "aria-hidden": "true" }));
    byId("gap-bars").replaceChildren();
    say(byId("gap-text"), "waiting for the first token");
    byId("answer-ledger").replaceChildren(el("p", { class: "quiet", text: "The ledger appears after the last token." }));
  }

  async stream(signal) {
    const chat = byId("mode").value === "chat" && !byId("mode-field").hidden;
    const text = byId("prompt").value;
    const body = {
      model: this.model,
      max_tokens: byId("max-tokens").valueAsNumber,
      temperature: byId("temperature").valueAsNumber,
      stream: true,
      return_token_ids: true,
      ...(chat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
    };
    const response = await ask(chat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw new Error(await refusal(response));
    let whole = false;
    for await (const data of events(response.body)) {
      if (data === "[DONE]") whole = true;
      else this.take(JSON.parse(data));
    }
    if (!whole) throw new Error("the stream ended early");
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices[0];
    const tokens = choice?.token_ids?.length ?? 0;
    const text = choice?.text ?? choice?.delta?.content ?? "";
    if (tokens || text) this.token(text, tokens);
    if (chunk.kvrelay) {
      this.served(chunk.kvrelay.request_id);
      byId("answer-ledger").replaceChildren(ledgerView(chunk.kvrelay));
    }
  }

  token(text, tokens) {
    const at = performance.now() - this.sent;
    const gap = at - (this.arrivals.at(-1)?.[0] ?? 0);
    const number = this.tokens() + 1;
    const answer = byId("answer");
    const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 8;
    answer.insertBefore(el("span", { class: "token", title: `token ${number}: ${time(gap)} after the previous token`, text }), answer.lastChild);
    if (atEnd) answer.scrollTop = answer.scrollHeight;
    if (this.arrivals.length) this.bar(gap, number);
    if (tokens) this.arrivals.push([at, tokens]);
    say(byId("gap-text"), this.pace());
  }

  bar(gap, number) {
    const bars = byId("gap-bars");
    const bar = el("span", { title: number === 2 ? `gap to token 2: ${time(gap)}` : `token ${number}: ${time(gap)}` });
    bar.dataset.gap = gap;
    bars.append(bar);
    if (bars.children.length > MAX_BARS) bars.firstChild.remove();
    const grown = gap > this.longest;
    this.longest = Math.max(this.longest, gap);
    for (const one of grown ? bars.children : [bar]) one.style.height = `${Math.max(4, (one.dataset.gap / this.longest) * 100)}%`;
  }

  tokens() {
    return this.arrivals.reduce((sum, [, tokens]) => sum + tokens, 0);
  }

  pace() {
    const [first, ...rest] = this.arrivals;
    if (!first) return "no token arrived";
    const text = `at this page: first token after ${time(first[0])}`;
    if (!rest.length) return text;
    const seconds = (rest.at(-1)[0] - first[0]) / 1000;
    return `${text}, gap to token 2: ${time(rest[0][0] - first[0])}, then ${rate((this.tokens() - first[1]) / seconds)} tokens/s; tallest bar ${time(this.longest)}`;
  }

  summary() {
    byId("answer").querySelector(".cursor")?.remove();
    const text = this.pace();
    say(byId("gap-text"), text);
    byId("gap-bars").setAttribute("aria-label", `Time between tokens: ${text}`);
  }

  note(text) {
    byId("answer").append(el("span", { class: "note", text }));
    byId("answer-ledger").replaceChildren(el("p", { class: "quiet", text: "The answer did not finish. Its row and its ledger are in the list of requests." }));
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the router answered with status ${response.status}`;
}

/** The data of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}
