// Polls the state of the router once per second and shows it. Shows when the router is unreachable.

import { byId, say } from "/page/dom.js";
import { clock } from "/page/format.js";
import { Figures } from "/page/figures.js";
import { Gantt } from "/page/gantt.js";
import { Models } from "/page/models.js";
import { Pools } from "/page/pools.js";
import { Prompt } from "/page/prompt.js";
import { NoToken, ask, whenGiven } from "/page/session.js";

const POLL_MS = 1000;
const TIMEOUT_MS = 8000;

const gantt = new Gantt();
const prompt = new Prompt((id) => gantt.mine.add(id));
const figures = new Figures();
const models = new Models(poll);
const parts = [figures, new Pools(), gantt, prompt];
// Unix seconds.
let heard = null;
let timer = 0;

async function poll() {
  clearTimeout(timer);
  // Polling resumes when the page becomes visible.
  if (document.hidden) return;
  const begun = performance.now();
  const path = models.path;
  try {
    const response = await ask(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    const body = await response.json();
    // The user has chosen another model meanwhile, which has a poll of its own.
    if (path !== models.path) return;
    if (response.ok) show(body);
    // The URL names a model that this router does not serve.
    else if (response.status === 404 && models.chosen) return models.choose("");
    else state("busy", response.status === 429 ? "too many viewers" : "refused", body.error.message);
  } catch (error) {
    prompt.gone();
    // Polling resumes when the user gives a token.
    if (error instanceof NoToken) return state("busy", "no token", "enter a token to see the cluster");
    const since = heard === null ? "" : `; last answer at ${clock(heard)}`;
    state("gone", "router unreachable", `retrying${since}`);
  }
  timer = setTimeout(poll, Math.max(0, POLL_MS - (performance.now() - begun)));
}

function show(snapshot) {
  heard = Date.now() / 1000;
  models.show(snapshot);
  document.title = `kvrelay: ${snapshot.model}`;
  document.body.classList.toggle("own", !snapshot.cluster);
  for (const part of parts) if (snapshot.cluster || part !== figures) part.show(snapshot);
  state(...stateOf(snapshot));
}

function stateOf(snapshot) {
  if (snapshot.state === "draining") return ["draining", "draining", "running streams finish, new requests are rejected"];
  if (snapshot.state === "starting") {
    const pools = snapshot.pools.map((pool) => `${pool.ready} of ${pool.desired} ${pool.name}`);
    return ["starting", "starting", `${pools.join(", ")} workers are ready`];
  }
  if (snapshot.registry !== "ok") return ["away", "registry unreachable", `the pools are as last seen. ${snapshot.registry}`];
  return ["ready", "ready", snapshot.cluster ? "" : "only your own requests are shown; a token of role monitor shows the whole cluster"];
}

function state(name, word, text) {
  document.body.dataset.state = name;
  say(byId("state-word"), word);
  say(byId("state-text"), text);
  byId("state-text").title = text;
}

document.addEventListener("visibilitychange", poll);
whenGiven(poll);
poll();
