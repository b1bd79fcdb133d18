// The plots

// Distributions: the cumulative share above the histogram, on one axis

function latencyCard(name, found) {
  const slo = Math.min(...RUNS.map((run) => run.slos[{ TTFT: "ttft", TPOT: "tpot", E2E: "e2e" }[name]] ?? Infinity));
  const beyond = found.runs.map((run, index) => run.beyond
    ? `${RUNS.length > 1 ? `${RUNS[index].name}: ` : ""}${percent(run.beyond / run.n)} of the samples are beyond the axis, up to ${ms(run.cdf.at(-1))}` : "").filter(Boolean).join("; ");
  const plot = chart(262, `${NAMES[name]}: cumulative share and histogram`, (svg, width) => {
    const [left, right, top, middle, base] = [40, width - 10, 12, 150, 226];
    const x = scale(found.low, found.high, left, right, found.log);
    const y = scale(0, 1, middle, top);
    const peak = most(found.runs.flatMap((run) => run.bins.map((count) => count / Math.max(1, run.n)))) || 1;
    const h = scale(0, peak, base, middle + 18);
    yGrid(svg, y, [0, 0.5, 0.9, 1], left, right, (value) => `${value * 100}%`);
    found.runs.forEach((run, index) => {
      const bin = (right - left) / run.bins.length;
      run.bins.forEach((count, place) => {
        if (!count) return;
        const up = h(count / run.n);
        shape("rect", {
          x: left + place * bin + 0.5, width: Math.max(1, bin - 1), y: up, height: base - up, rx: 1,
          fill: runColour(index), "fill-opacity": found.runs.length > 1 ? 0.45 : 0.75,
        }, svg);
      });
    });
    const values = found.log ? logTicks(found.low, found.high) : ticks(0, found.high, Math.max(3, width / 90));
    xAxis(svg, x, values, base, number, logScale("ms", found.log), left, right);
    if (slo < found.high) {
      shape("line", { x1: x(slo), x2: x(slo), y1: top - 4, y2: base, class: "slo" }, svg);
      const end = x(slo) > right - 90;
      shape("text", { x: x(slo) + (end ? -5 : 5), y: middle + 14, class: "slo-text", "text-anchor": end ? "end" : "start" }, svg, `SLO ${number(slo)} ms`);
    }
    found.runs.forEach((run, index) => {
      if (!run.n) return;
      const steps = run.cdf.length - 1;
      const points = run.cdf.map((value, step) => [x(Math.min(value, found.high)), y(step / steps)]);
      shape("path", { d: path(points), fill: "none", stroke: runColour(index), "stroke-width": 2, "stroke-linejoin": "round" }, svg);
      if (found.runs.length === 1)
        for (const share of [0.5, 0.9, 0.99])
          shape("circle", { cx: x(run.cdf[share * steps]), cy: y(share), r: 3.2, fill: runColour(index), stroke: "var(--card)", "stroke-width": 1.5 }, svg);
    });
    const cross = shape("line", { y1: top, y2: base, class: "cross", visibility: "hidden" }, svg);
    const area = shape("rect", { x: left, y: top, width: right - left, height: base - top, fill: "transparent" }, svg);
    area.addEventListener("pointermove", (event) => {
      const place = Math.max(left, Math.min(right, event.clientX - svg.getBoundingClientRect().left));
      const value = x.inverse(place);
      cross.setAttribute("x1", place); cross.setAttribute("x2", place); cross.setAttribute("visibility", "visible");
      showTip(event, [[null, `within ${ms(value)}`], ...found.runs.map((run, index) => {
        const at = run.cdf.findIndex((one) => one > value);
        return [runColour(index), `${percent(at < 0 ? 1 : Math.max(0, at - 1) / (run.cdf.length - 1))} of ${run.n.toLocaleString("en")}${RUNS.length > 1 ? ` · ${RUNS[index].name}` : ""}`];
      })]);
    });
    area.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
  });
  const sub = RUNS.map((run) => {
    const one = run.latencies[name];
    return one ? `${RUNS.length > 1 ? `${run.name}: ` : ""}median ${ms(one.median * 1000)}, p90 ${ms(one.p90 * 1000)}, p99 ${ms(one.p99 * 1000)}` : "";
  }).filter(Boolean).join(" · ");
  return card(NAMES[name], sub, plot, beyond && element("p", { class: "sub", style: "margin:6px 0 0" }, beyond));
}

// Lines over time, with one crosshair for each group of plots

function lines(group, title, sub, series, span, marks, format) {
  const filled = series.filter((one) => one.points.length);
  const plot = chart(150, `${title} over time`, (svg, width) => {
    const [left, right, top, base] = [44, width - 12, marks.length ? 20 : 10, 116];
    const high = most(filled.flatMap((one) => one.points.map((point) => point[1]))) || 1;
    const x = scale(0, span, left, right);
    const grid = ticks(0, high, 3).filter((value) => format !== String || Number.isInteger(value));
    const y = scale(0, Math.max(high, grid.at(-1)) * 1.04, base, top);
    yGrid(svg, y, grid, left, right, format === String ? number : format);
    const values = ticks(0, span, Math.max(3, width / 110));
    xAxis(svg, x, values, base, number, "seconds", left, right);
    for (const one of filled) {
      const points = one.points.map(([at, value]) => [x(at), y(value)]);
      const drawn = path(one.step ? stepped(points) : points);
      if (one.fill) shape("path", { d: `${drawn}L${points.at(-1)[0]} ${base}L${points[0][0]} ${base}Z`, fill: one.colour, "fill-opacity": 0.13 }, svg);
      shape("path", { d: drawn, fill: "none", stroke: one.colour, "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-dasharray": one.dash || "none" }, svg);
    }
    marks.forEach((mark, index) => {
      shape("line", { x1: x(mark.at_s), x2: x(mark.at_s), y1: top - 4, y2: base, class: "mark" }, svg);
      const flag = shape("g", { style: "cursor:default" }, svg);
      shape("circle", { cx: x(mark.at_s), cy: top - 10, r: 8, fill: colour(mark.pool) }, flag);
      shape("text", { x: x(mark.at_s), y: top - 6.5, "text-anchor": "middle", style: "fill:#fff;font-weight:650;font-size:10px" }, flag, index + 1);
      flag.addEventListener("pointermove", (event) => showTip(event, [[colour(mark.pool), `${mark.pool} ${mark.before} → ${mark.after}`], [null, `${seconds(mark.at_s)}: ${mark.reason}`]]));
      flag.addEventListener("pointerleave", hideTip);
    });
    const cross = shape("line", { y1: top, y2: base, class: "cross", visibility: "hidden" }, svg);
    group.push((at) => {
      if (!svg.isConnected) return;
      cross.setAttribute("visibility", at === null ? "hidden" : "visible");
      if (at !== null) { cross.setAttribute("x1", x(at)); cross.setAttribute("x2", x(at)); }
    });
    const area = shape("rect", { x: left, y: top, width: right - left, height: base - top, fill: "transparent" }, svg);
    area.addEventListener("pointermove", (event) => {
      const at = Math.max(0, Math.min(span, x.inverse(event.clientX - svg.getBoundingClientRect().left)));
      group.forEach((move) => move(at));
      showTip(event, [[null, seconds(at)], ...filled.map((one) => {
        const last = one.points.findLast((point) => point[0] <= at) ?? one.points[0];
        return [one.colour, `${one.name}: ${format(+last[1].toPrecision(4))}`];
      })]);
    });
    area.addEventListener("pointerleave", () => { group.forEach((move) => move(null)); hideTip(); });
  });
  return card(title, sub, legend(filled.map((one) => [one.colour, one.name, "line"])), plot);
}

// The other measurements of the cluster

function details(run, span) {
  const found = run.timeline;
  if (!found || !found.samples.length) return [];
  const of = (pick) => found.samples.map((one) => [one.at_s, pick(one)]);
  const pools = Object.keys(found.samples[0].pools);
  const each = (field, extra = {}) => pools.map((pool) => ({ name: pool, colour: colour(pool), points: of((one) => one.pools[pool]?.[field] ?? 0), ...extra }));
  const group = [];
  return [
    lines(group, "Requests running", null, each("running", { step: true }), span, found.decisions, String),
    lines(group, "Utilisation", "Prefill: share of the workers' time. Decode: share of the workers' throughput. Means over the ready workers.", each("busy_share", { fill: true }), span, found.decisions, percent),
    lines(group, "KV held", "Share of each pool's KV blocks that requests hold.", each("kv_share", { fill: true }), span, found.decisions, percent),
    lines(group, "Tokens per second", "Prefill: prompt tokens. Decode: answer tokens, and the prompt tokens of local requests.", each("tokens_per_second"), span, found.decisions, number),
  ];
}

// Requests as bars of phases

function gantt(run) {
  const rows = run.gantt.rows.filter((one) => one.segments.length || one.error);
  if (!rows.length) return null;
  const span = most(rows.map((one) => one.segments.at(-1)?.[2] ?? one.at)) || 1;
  const kinds = Object.keys(KINDS).filter((kind) => rows.some((one) => one.segments.some((part) => part[0] === kind && part[2] > part[1])));
  const tall = Math.max(3, Math.min(14, 640 / rows.length));
  const plot = chart(rows.length * tall + 48, "Requests by phase", (svg, width) => {
    const [left, right, top] = [width < 500 ? 30 : 44, width - 12, 8];
    const base = top + rows.length * tall;
    const x = scale(0, span, left, right);
    for (const value of ticks(0, span, Math.max(3, width / 110)))
      shape("line", { x1: x(value), x2: x(value), y1: top, y2: base, class: "grid-line" }, svg);
    xAxis(svg, x, ticks(0, span, Math.max(3, width / 110)), base + 2, number, "seconds", left, right);
    rows.forEach((one, index) => {
      const y = top + index * tall;
      const line = shape("g", {}, svg);
      shape("rect", { x: left, width: right - left, y, height: tall, fill: "transparent" }, line);
      if (index % Math.ceil(22 / tall) === 0)
        shape("text", { x: left - 6, y: y + tall / 2 + 4, "text-anchor": "end" }, line, String(one.id));
      for (const [kind, start, stop] of one.segments)
        if (stop > start) shape("rect", { x: x(start).toFixed(2), width: Math.max(0.7, x(stop) - x(start)).toFixed(2), y: (y + tall * 0.1).toFixed(2), height: (tall * 0.8).toFixed(2), fill: colour(kind) }, line);
      if (one.first !== null && tall >= 5)
        shape("rect", { x: x(one.first) - 0.75, width: 1.5, y, height: tall, fill: "var(--ink)" }, line);
      if (one.error) shape("circle", { cx: x(one.at), cy: y + tall / 2, r: Math.max(2.4, tall / 2.6), fill: colour("failed") }, line);
      line.addEventListener("pointermove", (event) => showTip(event, ganttTip(one)));
      line.addEventListener("pointerleave", hideTip);
    });
  });
  const items = kinds.map((kind) => [colour(kind), KINDS[kind]]);
  if (tall >= 5) items.push(["var(--ink)", "first token", "tick"]);
  if (rows.some((one) => one.error)) items.push([colour("failed"), "failed request", "dot"]);
  const which = run.gantt.step > 1 ? `One in ${run.gantt.step} of ${run.requests} requests, one line each.` : `${rows.length} requests, one line each.`;
  return card("Requests by phase", `${which} A bar begins at the scheduled arrival. Hand-off is the part of the hand-off after the end of prefill.`, legend(items), plot);
}

function ganttTip(one) {
  const [prompt, cached, output] = one.tokens;
  const rows = [[null, `request ${one.id}, due at ${seconds(one.at)}`]];
  if (one.error) return [...rows, [colour("failed"), one.error]];
  for (const [kind, start, stop] of one.segments) if (stop > start) rows.push([colour(kind), `${KINDS[kind]} ${ms((stop - start) * 1000)}`]);
  rows.push([null, `first token after ${ms((one.first - one.at) * 1000)}`], [null, `${prompt} prompt tokens, ${cached} cached, ${output} out`]);
  if (one.handoff) rows.push([null, `hand-off over ${one.handoff.transport}: ${(one.handoff.bytes / 2 ** 20).toFixed(2)} MiB in ${ms(one.handoff.ms)}`]);
  if (one.path) rows.push([null, `${one.path}: ${one.why}`]);
  return rows;
}

// Goodput against rate

function sweep() {
  const { runs, attainment, slos, best } = DATA.sweep;
  const of = (pick) => runs.map((one) => [one.rate, pick(one)]);
  const stat = (name, which) => runs.filter((one) => one.latencies[name]).map((one) => [one.rate, one.latencies[name][which] * 1000]);
  const pair = (name) => [{ name: "median", colour: runColour(0), points: stat(name, "median") }, { name: "p99", colour: colour("plain"), points: stat(name, "p99") }];
  const mark = best ? [best, `${number(best)}/s`] : null;
  const panel = (title, sub, unit, series, options) => curves(title, sub, series, { unit, mark, xUnit: "requests per second", ...options });
  const limit = (metric) => (slos[metric] ? [[slos[metric], `SLO ${number(slos[metric])} ms`]] : []);
  return element("div", { class: "grid" },
    panel("Requests within every objective", `The target is at least ${percent(attainment)}.`, "", [{ name: "within every objective", colour: runColour(0), points: of((one) => one.share) }], { high: 1.05, format: (value) => `${Math.round(value * 100)}%`, limits: [[attainment, percent(attainment)]] }),
    panel("Goodput", "Requests per second that met every objective. The dashed line is the offered rate.", "/s", [{ name: "goodput", colour: runColour(0), points: of((one) => one.goodput) }, { name: "offered", colour: colour("plain"), points: of((one) => one.rate), dash: "4 4" }], { format: number }),
    panel("Time to first token", "Milliseconds.", " ms", pair("TTFT"), { format: number, limits: limit("ttft") }),
    panel("Time per output token", "Milliseconds.", " ms", pair("TPOT"), { format: number, limits: limit("tpot") }));
}
