// The token, if the router requires one. The page asks for it once, stores it for this tab only,
// and sends it with each request.

import { byId } from "/page/dom.js";

const KEY = "kvrelay-token";

export class NoToken extends Error {}

/** Fetches with the token. If the router rejects it, asks for another token and throws NoToken. */
export async function ask(path, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.status !== 401) return response;
  const body = await response.json().catch(() => null);
  if (token === sessionStorage.getItem(KEY)) {
    sessionStorage.removeItem(KEY);
    show(token ? body?.error?.message ?? "the router rejects this token" : "");
  }
  throw new NoToken("the router requires a token");
}

function show(why) {
  byId("token-why").textContent = why;
  byId("token").value = "";
  if (!byId("token-dialog").open) byId("token-dialog").showModal();
}

/** Calls `then` when the user gives a token. */
export function whenGiven(then) {
  byId("token-form").addEventListener("submit", () => {
    sessionStorage.setItem(KEY, byId("token").value.trim());
    then();
  });
}
