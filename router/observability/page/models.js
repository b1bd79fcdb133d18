// The name of the shown model, or a choice if the router serves several.

import { byId, el, say } from "/page/dom.js";

export class Models {
  /** `chosen` is called when the user chooses another model. */
  constructor(chosen) {
    this.names = "";
    this.select = byId("models");
    this.select.addEventListener("change", chosen);
  }

  /** The path of the shown model's snapshot. */
  get path() {
    return this.select.value ? `/status.json?model=${encodeURIComponent(this.select.value)}` : "/status.json";
  }

  show(snapshot) {
    const several = snapshot.models.length > 1;
    say(byId("model"), several ? "" : snapshot.model);
    byId("models-field").hidden = !several;
    const names = snapshot.models.join("\n");
    if (!several || names === this.names) return;
    this.names = names;
    this.select.replaceChildren(...snapshot.models.map((name) => el("option", { value: name }, name)));
    this.select.value = snapshot.model;
  }
}
