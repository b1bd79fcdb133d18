// The name of the shown model. With several models: a choice, kept in the URL, and a line for each.

import { byId, el, keyed, say } from "/page/dom.js";

export class Models {
  /** `changed` is called when the user chooses another model. */
  constructor(changed) {
    this.names = "";
    this.changed = changed;
    this.chosen = new URL(location.href).searchParams.get("model") ?? "";
    this.select = byId("models");
    this.select.addEventListener("change", () => this.choose(this.select.value));
  }

  /** The path of the shown model's snapshot. */
  get path() {
    return this.chosen ? `/status.json?model=${encodeURIComponent(this.chosen)}` : "/status.json";
  }

  choose(name) {
    this.chosen = name;
    const url = new URL(location.href);
    if (name) url.searchParams.set("model", name);
    else url.searchParams.delete("model");
    history.replaceState(null, "", url);
    this.changed();
  }

  show(snapshot) {
    const several = snapshot.models.length > 1;
    say(byId("model"), several ? "" : snapshot.model);
    byId("models-field").hidden = !several;
    byId("overview").hidden = !several;
    keyed(byId("overview"), snapshot.overview, (one) => one.name, (one) => this.line(one), (node, one) => updateLine(node, one, one.name === snapshot.model));
    const names = snapshot.models.join("\n");
    if (several && names !== this.names) {
      this.names = names;
      this.select.replaceChildren(...snapshot.models.map((name) => el("option", { value: name }, name)));
    }
    this.select.value = snapshot.model;
  }

  line(one) {
    const button = el("button", { type: "button", onclick: () => this.choose(one.name) },
      el("i", { class: "dot" }), el("b", { text: one.name }), el("span", { class: "quiet" }));
    return el("li", {}, button);
  }
}

function updateLine(node, one, shown) {
  const [dot, , text] = node.firstChild.children;
  node.firstChild.setAttribute("aria-pressed", shown);
  dot.className = `dot ${one.state}`;
  const size = one.pools.reduce((sum, pool) => sum + pool.size, 0);
  const state = one.state === "ready" && !size ? "asleep" : one.state;
  say(text, [state, ...(size ? one.pools.map((pool) => `${pool.name} ${pool.ready} of ${pool.size}`) : [])].join(", "));
}
