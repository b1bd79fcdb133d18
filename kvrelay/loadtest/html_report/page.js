// The contents of the page, from top to bottom.

// The parts of the time to first token

const PART_NAMES = {
  send: "client, network", queue: "queues and reservations", prefill: "prefill, return", handoff: "fetch", decode: "emit", failed: "failed attempt",
};

function parts(run) {
  const told = Object.entries(run.parts).filter(([, found]) => Object.keys(found).length);
  if (!told.length) return null;
  const total = (found) => Object.values(found).reduce((sum, one) => sum + one, 0);
  const widest = Math.max(...told.map(([, found]) => total(found)));
  const bars = told.map(([name, found]) => {
    const track = element("div", { class: "track", style: `width:${(100 * total(found)) / widest}%` });
    for (const [phase, value] of Object.entries(found)) {
      const kind = PHASE_KIND[phase] ?? "queue";
      const part = element("div", { style: `width:${(100 * value) / total(found)}%;background:${colour(kind)}` });
      part.addEventListener("pointermove", (event) => showTip(event, [[colour(kind), `${phase.replaceAll("_", " ")} ${ms(value * 1000)}`], [null, `${percent(value / total(found))} of ${ms(total(found) * 1000)}`]]));
      part.addEventListener("pointerleave", hideTip);
      track.append(part);
    }
    return element("div", { class: "bar" }, element("div", { class: "name" }, name), element("div", { class: "rail" }, track), element("div", { class: "end" }, ms(total(found) * 1000)));
  });
  const names = Object.keys(told[0][1]);
  const shown = new Set(names.map((name) => PHASE_KIND[name] ?? "queue"));
  const kinds = Object.keys(PART_NAMES).filter((kind) => shown.has(kind));
  const grid = table(["phase", ...told.map(([name]) => name)], names.map((name) => [name.replaceAll("_", " "), ...told.map(([, found]) => ms((found[name] ?? 0) * 1000))]));
  return card("Time to first token by phase", "Means from the ledgers, over all requests and over the tenth with the longest TTFT.", legend(kinds.map((kind) => [colour(kind), PART_NAMES[kind]])), ...bars, element("div", { style: "height:12px" }), grid);
}

function paths(run) {
  const most = Math.max(...run.paths.map((one) => one[2]), 1);
  const rows = run.paths.map(([where, why, count]) => element("div", { style: "margin-top:10px" },
    element("div", { class: "bar", style: "margin:0" }, element("div", { class: "name" }, where),
      element("div", { class: "rail" }, element("div", { class: "track", style: "height:14px" }, element("div", { style: `width:${(100 * count) / most}%;background:${colour("plain")}` }))),
      element("div", { class: "end" }, `${count.toLocaleString("en")}`)),
    why ? element("p", { class: "sub", style: "margin:2px 0 0;font-size:12.5px" }, why) : null));
  const errors = run.errors.length
    ? table(["status", "requests", "first message"], run.errors.map((one) => [one.code, String(one.count), one.first]), [2])
    : element("p", { class: "sub", style: "margin:12px 0 0" }, "No errors.");
  return card("Paths and errors", "Number of requests by path and reason. n stands for a number or a time.", ...rows, element("div", { style: "height:10px" }), errors);
}

// Headline numbers

function tile(label, values, note) {
  const body = values.length === 1
    ? element("div", { class: "value" }, values[0][0], element("small", {}, values[0][1]))
    : element("div", { class: "pair" }, values[0].join(" ").trim(), element("span", {}, "→"), values[1].join(" ").trim());
  return element("div", { class: "card tile" }, element("div", { class: "label" }, label), body, element("div", { class: "note" }, note));
}

function split(text) {
  const at = text.lastIndexOf(" ");
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

function tiles() {
  const each = (pick) => RUNS.map(pick);
  const note = (pick) => RUNS.map(pick).join(" → ");
  const latency = (name) => [NAMES[name], each((run) => split(ms(run.latencies[name] && run.latencies[name].median * 1000))), `median; p99 ${note((run) => ms(run.latencies[name] && run.latencies[name].p99 * 1000))}`];
  const all = [
    ["Requests answered", each((run) => [run.answered.toLocaleString("en"), ""]), `of ${note((run) => run.requests.toLocaleString("en"))} in ${note((run) => seconds(run.duration))}`],
    ["Request throughput", each((run) => [number(run.rates.requests), "/s"]), RUNS[0].good_share === null ? "answered" : `goodput ${note((run) => `${number(run.rates["goodput requests"] ?? 0)}/s`)}`],
    ["Output tokens", each((run) => [number(run.rates["output tokens"]), "/s"]), `prompt tokens ${note((run) => `${number(run.rates["prompt tokens"])}/s`)}`],
    latency("TTFT"), latency("second token gap"), latency("ITL"),
  ];
  if (RUNS.every((run) => run.good_share !== null))
    all.push(["Within every objective", each((run) => split(percent(run.good_share))), Object.entries(RUNS[0].slos).map(([name, value]) => `${name} ${number(value)} ms`).join(", ")]);
  if (RUNS.every((run) => run.reuse && (run.reuse.unlimited > 0 || run.reuse.reported > 0)))
    all.push(["Prompt tokens from cache", each((run) => split(percent(run.reuse.reported))), `unlimited cache: ${note((run) => percent(run.reuse.unlimited))}`]);
  return element("div", { class: "tiles" }, ...all.map((one) => tile(...one)));
}

function latencyTable() {
  const columns = ["mean", "median", "std", "p90", "p95", "p99", "max"];
  const rows = [];
  for (const name of Object.keys(NAMES)) {
    const found = RUNS.map((run) => run.latencies[name]);
    RUNS.forEach((run, index) => {
      if (found[index]) rows.push([RUNS.length > 1 ? `${NAMES[name]} · ${run.name}` : NAMES[name], ...columns.map((one) => ms(found[index][one] * 1000))]);
    });
    if (RUNS.length === 2 && found.every(Boolean))
      rows.push(["change", ...columns.map((one) => {
        const share = found[1][one] / found[0][one] - 1;
        return Number.isFinite(share) ? [`${share >= 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(1)} %`, Math.abs(share) < 0.02 || one === "std" ? "" : share < 0 ? "better" : "worse"] : "–";
      })]);
  }
  return card("Latency, all numbers", null, table(["", ...columns], rows));
}

function reuse(run) {
  const found = run.reuse;
  if (!found || !(found.unlimited > 0 || found.reported > 0)) return null;
  const rows = [
    ["reported", "the target, request by request", "run0"], ["counters", "the target's own counters", "run0"],
    ["unlimited", `an unlimited cache, blocks of ${found.block_tokens}`, "plain"], ["computed", "an unlimited cache, counting only blocks that were computed when the request was sent", "plain"],
  ].filter(([key]) => found[key] !== undefined).map(([key, text, paint]) => element("div", { style: "margin-top:10px" },
    element("p", { class: "sub", style: "margin:0 0 2px;font-size:12.5px" }, text),
    element("div", { class: "bar plain" },
      element("div", { class: "rail" }, element("div", { class: "track", style: "height:14px" }, element("div", { style: `width:${100 * found[key]}%;background:${colour(paint)}` }))),
      element("div", { class: "end" }, percent(found[key])))));
  return card("Prefix reuse", "Share of the prompt tokens that came from a prefix cache, and the share that could have.", ...rows);
}

// The page

function heading(title, sub) {
  return [element("h2", {}, title), sub ? element("p", { class: "sub" }, sub) : element("div", { style: "height:8px" })];
}

function settings(run) {
  const rows = Object.entries(run.options).map(([name, value]) => [name.replaceAll("_", " "), String(value)]);
  return element("details", { class: "card" }, element("summary", {}, `All settings${RUNS.length > 1 ? ` of ${run.name}` : ""}`), table(["", ""], rows, [1]));
}

function header() {
  const first = RUNS[0];
  const what = DATA.pareto ? paretoText() : DATA.sweep
    ? DATA.sweep.best
      ? `Goodput ${number(DATA.sweep.best)} requests/s: the highest tested rate at which ${percent(DATA.sweep.attainment)} of the requests met every objective.`
      : `No tested rate let ${percent(DATA.sweep.attainment)} of the requests meet every objective.`
    : RUNS.length > 1 ? `${RUNS[1].name} compared with ${RUNS[0].name}` : first ? `${first.options.model ?? "A model"} at ${first.options.target ?? "a target"}` : "";
  const shown = ["target", "model", "rate", "concurrency", "trace", "time_scale", "length_scale", "prompt_tokens", "output_tokens", "seed"];
  const chips = RUNS.length === 1 && first ? shown.filter((key) => first.options[key] !== undefined && first.options[key] !== null).map((key) =>
    element("span", { class: "chip" }, `${key.replaceAll("_", " ")} `, element("b", {}, String(first.options[key])))) : [];
  document.title = `${DATA.title} · kvrelay`;
  document.getElementById("top").append(element("h1", {}, DATA.title), element("p", { class: "sub lead", style: "margin-bottom:0" }, what),
    element("div", { class: "chips" }, ...chips),
    RUNS.length > 1 ? legend(RUNS.map((run, index) => [runColour(index), run.name])) : "",
    ...(DATA.sweep ? DATA.sweep.warnings : RUNS.flatMap((run) => run.warnings.map((one) => (RUNS.length > 1 ? `${run.name}: ${one}` : one))))
      .map((one) => element("div", { class: "banner" }, sentence(one))),
    ...RUNS.filter((run) => run.strayed).map((run) => element("div", { class: "banner bad" }, `${run.strayed} of ${run.answered} requests should have been disaggregated but took the local path.`)));
}

const spanOf = (run) => Math.max(run.duration, run.timeline?.samples.at(-1)?.at_s ?? 0) || 1;

header();
const main = document.getElementById("main");
if (DATA.pareto) main.append(...paretoCards());
if (DATA.sweep) main.append(...heading("Goodput against rate"), sweep());
if (RUNS.length) {
  if (DATA.sweep) main.append(...heading(`At ${RUNS[0].name}`));
  main.append(tiles(), ...heading("Latency", "Cumulative share above, histogram below. The first token does not wait for the hand-off; the gap to the second token contains it."),
    element("div", { class: "grid" }, ...Object.entries(DATA.latencies).filter(([name, found]) => found && name !== "late start" && name !== "TPOT").map(([name, found]) => latencyCard(name, found))),
    element("div", { style: "height:14px" }), latencyTable());
}
for (const run of RUNS) {
  main.append(...heading(RUNS.length > 1 ? `Over time · ${run.name}` : "Over time", run.timeline ? "As the cluster reports it, twice per second." : null),
    element("div", { class: "stack" }, story(run, spanOf(run))), element("div", { style: "height:14px" }),
    element("div", { class: "grid" }, ...details(run, spanOf(run))));
  const bars = gantt(run);
  main.append(...heading(RUNS.length > 1 ? `Requests · ${run.name}` : "Requests"), element("div", { class: "stack" }, ...[bars].filter(Boolean)),
    element("div", { style: "height:14px" }), element("div", { class: "grid" }, ...[parts(run), paths(run), reuse(run)].filter(Boolean)));
}
main.append(element("div", { style: "height:14px" }), element("div", { class: "stack" }, ...RUNS.map(settings)));
