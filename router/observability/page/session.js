// The token, where the router wants one: asked for once, kept for this tab only, and sent with each request.

import { byId } from "/page/dom.js";

const KEY = "kvrelay-token";

export class NoToken extends Error {}

/** fetch with the token. A router that wants another one makes the page ask for it; NoToken until it is there. */
export async function ask(path, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.status !== 401) return response;
  const body = await response.json().catch(() => null);
  if (token === sessionStorage.getItem(KEY)) {
    sessionStorage.removeItem(KEY);
    show(token ? body?.error?.message ?? "the router does not take this token" : "");
  }
  throw new NoToken("the router wants a token");
}

function show(why) {
  byId("token-why").textContent = why;
  byId("token").value = "";
  if (!byId("token-dialog").open) byId("token-dialog").showModal();
}

/** `then` is called when a token has been given. */
export function whenGiven(then) {
  byId("token-form").addEventListener("submit", () => {
    sessionStorage.setItem(KEY, byId("token").value.trim());
    then();
  });
}
