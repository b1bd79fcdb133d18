// The page of a plan.

const PLAN = DATA.plan;
const CURVES = DATA.curves;
const PREFIXES = ["", "k", "M", "G", "T", "P"];

function scaled(value, unit) {
  let step = 0;
  while (Math.abs(value) >= 999.5 && step < PREFIXES.length - 1) { value /= 1000; step += 1; }
  return `${+value.toPrecision(3)} ${PREFIXES[step]}${unit}`;
}
// Halves are rounded as the terminal does.
const count = (value) => (value === null ? "unlimited" : value.toLocaleString("en", { maximumFractionDigits: 0, roundingMode: "halfEven" }));
const kibibytes = (value) => `${+(value / 1024).toPrecision(4)} KiB`;
const short = (value) => scaled(value, "").replace(" ", "");
const exact = (value, digits = 3) => value.toLocaleString("en", { maximumSignificantDigits: digits });

function block(title, sub) {
  return [element("h2", {}, title), sub ? element("p", { class: "sub" }, sub) : element("div", { style: "height:8px" })];
}

function summary() {
  const first = PLAN.longest_context[0];
  const busiest = PLAN.longest_context.at(-1);
  const tiles = [
    ["KV per token", kibibytes(PLAN.kv.bytes_per_token), `${PLAN.kv.dtype}, ${PLAN.kv.form}`],
    ["Weights", scaled(PLAN.memory.weight_bytes, "B"), PLAN.memory.weight_dtype],
    ["Free for KV", scaled(PLAN.memory.kv_bytes, "B"), `of ${scaled(PLAN.memory.usable_bytes, "B")} usable`],
    [`Context of ${count(busiest.users)} ${busiest.users === 1 ? "user" : "users"}`, count(busiest.tokens), `tokens each; wall: ${busiest.limit}`],
  ];
  if (first !== busiest) tiles.push(["Context of 1 user", count(first.tokens), `tokens; wall: ${first.limit}`]);
  return element("div", { class: "tiles" }, ...tiles.map(([label, value, note]) => element("div", { class: "card tile" },
    element("div", { class: "label" }, label), element("div", { class: "value" }, value), element("div", { class: "note" }, note))));
}

function pageHead() {
  const model = PLAN.model;
  document.getElementById("top").append(
    element("h1", {}, `${model.name} on ${PLAN.devices} × ${PLAN.device.full_name}`),
    element("p", { class: "sub lead", style: "margin-bottom:0" }, `${exact(model.parameters / 1e9, 4)} billion parameters, ${exact(model.active_parameters / 1e9)} billion active per token; ${model.layers} layers: ${model.attention}`),
    element("div", { class: "chips" }, element("span", { class: "chip" }, element("b", {}, "model "), model.source), element("span", { class: "chip" }, element("b", {}, "device "), PLAN.device.source)),
    ...PLAN.notes.map((one) => element("div", { class: "banner" }, one)));
}

function cluster() {
  const found = PLAN.cluster;
  if (!found) return [];
  const pools = [];
  const { disaggregated, colocated, workload, slo } = found;
  for (const name of ["prefill", "decode"]) {
    const pool = disaggregated[name];
    if (pool) pools.push([name, count(pool.workers), pool.degree, count(pool.workers * pool.degree), percent(pool.utilisation), percent(pool.missed), pool.square_root, pool.limit]);
  }
  if (colocated.size) pools.push(["colocated", count(colocated.size.workers), colocated.size.degree, count(colocated.devices), `${percent(colocated.size.prompt_share)} prompts`, percent(colocated.size.missed), "–", `chunks of ${count(colocated.size.chunk_tokens)} tokens`]);
  const bars = [["disaggregated", disaggregated.devices, [["prefill", disaggregated.prefill], ["decode", disaggregated.decode]], disaggregated.impossible], ["colocated", colocated.devices, [["queue", colocated.size]], colocated.impossible]];
  const widest = Math.max(...bars.map((one) => one[1] ?? 0));
  const drawn = bars.map(([name, devices, parts, impossible]) => element("div", { class: "bar" },
    element("div", { class: "name" }, name),
    element("div", { class: "rail" }, devices ? element("div", { class: "track", style: `width:${(100 * devices) / widest}%` },
      ...parts.filter(([, pool]) => pool).map(([paint, pool]) => element("div", { style: `width:${(100 * pool.workers * pool.degree) / devices}%;background:${colour(paint)}` }))) : element("span", { class: "sub" }, impossible)),
    element("div", { class: "end" }, devices ? `${count(devices)} ${devices === 1 ? "device" : "devices"}` : "–")));
  const cost = found.cost ? `Cost in the currency of --price: ${exact(found.cost.per_hour, 4)} per hour, ${exact(found.cost.per_million_output, 4)} per million answer tokens.` : "";
  return [...block("Cluster for the workload", `${workload.source}: ${exact(workload.rate_per_second, 4)} requests/s, arrival SCV ${exact(workload.arrival_scv)}, prompts ${count(workload.mean_prompt_tokens)} and answers ${count(workload.mean_answer_tokens)} tokens on average. SLO: TTFT ${exact(1000 * slo.ttft_s, 6)} ms and ITL ${exact(1000 * slo.itl_s, 6)} ms for ${percent(slo.attainment)} of the requests.`),
    element("div", { class: `banner${found.disaggregate ? "" : " bad"}` }, `${found.verdict} Bottleneck: ${found.bottleneck}. ${cost}`),
    element("div", { style: "height:14px" }),
    element("div", { class: "stack" },
      card("Devices for the same SLO", "Prefill and decode pools against one colocated pool.", legend([[colour("prefill"), "prefill"], [colour("decode"), "decode"], [colour("queue"), "colocated"]]), ...drawn),
      card("Pools", "Busy: share of the workers' time, or of the batch slots. Misses: share of the requests that miss the SLO because of the pool.", table(["pool", "workers", "devices each", "devices", "busy", "misses", "square-root staffing", "limit"], pools, [7])))];
}

function plots() {
  const line = (name, paint, points, more = {}) => ({ name, colour: colour(paint), points, small: true, ...more });
  const steps = (name, paint, points) => ({ name, colour: colour(paint), points: points.map((one) => one.slice(0, 2)), labels: points.map((one) => one[2]), alone: true });
  const itl = (PLAN.cluster?.slo.itl_s ?? PLAN.itl_seconds) * 1000;
  const free = PLAN.memory.kv_bytes / 1e9;
  return element("div", { class: "grid" },
    curves("KV of one sequence", `GB over tokens. ${PLAN.kv.formula} = ${count(PLAN.kv.bytes_per_token)} B per token.`, Object.entries(CURVES.kv).map(([dtype, points], index) => line(dtype, ["prefill", "decode", "handoff"][index], points)),
      { unit: " GB", xUnit: "tokens", logY: true, xFormat: short, limits: [[free, `free for KV: ${exact(free)} GB`]] }),
    curves("Longest context", "Tokens of each user over users: what memory allows, and what the ITL allows. The lower one is the wall.", [line("memory", "prefill", CURVES.context_by_memory), line("ITL", "handoff", CURVES.context_by_latency)].filter((one) => one.points.length),
      { unit: " tokens", xUnit: "users", logY: true, format: short, limits: PLAN.model.max_tokens ? [[PLAN.model.max_tokens, `the model's ${count(PLAN.model.max_tokens)}`]] : [] }),
    curves("Roofline", `TFLOP/s over operations per byte. The roof bends at ${exact(PLAN.roofline.ridge_operations_per_byte)} op/B.`, [line("roof", "first", CURVES.roof, { dash: "5 3" }), steps("prefill", "prefill", CURVES.prefill_steps), steps("decode", "decode", CURVES.decode_steps)],
      { unit: " TFLOP/s", xUnit: "op/B", logY: true }),
    curves("Decode step", "ms over the batch. A step reads the weights once, and the KV of each sequence.", [line("step", "decode", CURVES.step_ms)], { unit: " ms", xUnit: "sequences", limits: [[itl, `ITL ${exact(itl)} ms`]] }),
    curves("Decode throughput", "Tokens per second of one worker over the batch.", [line("tokens/s", "decode", CURVES.tokens_per_s)], { unit: " tokens/s", xUnit: "sequences", format: short }),
    curves("Hand-off", `ms over prompt tokens, at ${scaled(PLAN.handoff.bytes_per_second, "B/s")} in chunks of ${count(PLAN.handoff.chunk_tokens)} tokens. Exposed: after the end of the prefill.`, [line("prefill in chunks", "prefill", CURVES.prefill_ms), line("transfer", "handoff", CURVES.transfer_ms), line("exposed", "error", CURVES.exposed_ms)],
      { unit: " ms", xUnit: "tokens", logY: true, xFormat: short }));
}

function tables() {
  const kv = Object.keys(PLAN.kv.native_bytes_per_token).map((dtype) => [dtype, kibibytes(PLAN.kv.native_bytes_per_token[dtype]), kibibytes(PLAN.kv.compact_bytes_per_token[dtype])]);
  const contexts = PLAN.longest_context.map((one) => [count(one.users), count(one.tokens), count(one.tokens_by_memory), count(one.tokens_by_latency), one.tokens_by_model === null ? "–" : count(one.tokens_by_model), one.limit]);
  const users = PLAN.most_users.map((one) => [count(one.context_tokens), count(one.users), count(one.users_by_memory), count(one.users_by_latency)]);
  const steps = PLAN.roofline.steps.map((one) => [`${one.phase}, ${count(one.size)}${one.phase === "decode" ? ` × ${count(one.context)}` : ""}`, scaled(one.operations, "FLOP"), scaled(one.moved_bytes, "B"), exact(one.intensity), one.bound, ms(1000 * one.seconds)]);
  const handoffs = PLAN.handoff.prompts.map((one) => [count(one.tokens), scaled(one.num_bytes, "B"), ms(1000 * one.transfer_s), ms(1000 * one.prefill_s), ms(1000 * one.exposed_s), percent(one.hidden_share)]);
  const worker = `${count(PLAN.devices)} device${PLAN.devices === 1 ? "" : "s"}`;
  return element("div", { class: "grid" },
    card("KV per token", `native: as kvrelay's engine keeps it; compact: latent vectors of MLA.`, table(["dtype", "native", "compact"], kv)),
    card("Longest context", `Tokens of each user, on a worker of ${worker}.`, table(["users", "tokens", "by memory", "by ITL", "by model", "wall"], contexts)),
    card("Most users", `On a worker of ${worker}.`, table(["context, tokens", "users", "by memory", "by ITL"], users)),
    card("Steps", `Lower bounds of time on a worker of ${worker}, with the assumed efficiencies.`, table(["step, tokens", "operations", "bytes", "op/B", "bound", "time"], steps)),
    card("Hand-offs", `From a worker of ${worker}.`, table(["prompt, tokens", "bytes", "transfer", "prefill in chunks", "exposed", "hidden"], handoffs)));
}

pageHead();
document.getElementById("main").replaceChildren(summary(), ...cluster(),
  ...block("What bounds it"), plots(), ...block("Figures"), tables(),
  ...block("Formulas and sources"), element("div", { class: "stack" },
    card(null, null, table(["figure", "formula", "source"], PLAN.references, [1, 2], true)),
    card("Assumptions", null, ...PLAN.assumptions.map((one) => element("p", { class: "sub" }, one)))));
