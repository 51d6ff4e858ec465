/* The charts of a job, or of several jobs in the same axes: plain SVG, drawn from the result of `chart_data`.
 *
 *   CloudtrainCharts.draw(element, [data, ...], {x: "step" | "time" | "money"})
 *
 * A call with newer data draws again in place: the reader's choice of axis, the hover and the focus stay.
 * The script loads no resource, and inserts every text as text: the output of a job is never parsed as HTML.
 */
(function () {
  "use strict";

  const SVG = "http://www.w3.org/2000/svg";
  const PLAIN = 168, TALL = 264; // heights in px
  const LEFT = 62, RIGHT = 16, TOP = 18, BOTTOM = 24;
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 2", "6 2 1 2 1 2"];
  const AXES = {
    step: {name: "Step", label: "step", over: "over steps", format: whole},
    time: {name: "Time", label: "time since the start", over: "over time since the start", format: span},
    money: {name: "Money", label: "spent", over: "over USD spent", format: usd, tick: number},
  };
  const REASONS = {user: "a stop", budget: "the budget's end", time_limit: "the time limit", paused: "a pause", preempted: "a preemption", no_machines: "a lack of machines", node_failure: "a node failure", error: "an error"};
  const PARTS = [["data_s", "data"], ["compute_s", "compute"], ["communication_s", "communication"], ["checkpoint_s", "checkpoint"]];
  const KNOWN = new Set(["attempt", "bytes_sent", "time_s", "step", "usd", "loss", "lr", "grad_norm", "samples_per_s", "tokens_per_s", "mfu",
    "step_s", "memory_bytes", "weight", "epoch", "samples", ...PARTS.map((part) => part[0])]);
  const EXAMPLE = 'print(f\'step {step}  ::ct {{"e":"step","step":{step},"max_steps":{total},"loss":{loss}}}\', flush=True)';
  const views = new WeakMap();

  /* ---- the view of an element: a view stays when the data change ---- */

  function draw(element, datas, options) {
    let view = views.get(element);
    if (!view) {
      view = {element, x: null, log: false, smooth: true, hover: null, figures: new Map(), charts: []};
      views.set(element, view);
      build(view);
    }
    view.jobs = datas.map(prepared);
    const can = axesOf(view.jobs);
    const wish = view.x || (options && options.x);
    view.axis = can.includes(wish) ? wish : can[0] || "step";
    view.can = can;
    render(view);
  }

  function build(view) {
    view.element.classList.add("ct-charts");
    view.bar = node("div", {class: "ct-bar"});
    view.readout = node("p", {class: "ct-readout", role: "status", "aria-live": "polite"});
    view.grid = node("div", {class: "ct-grid"});
    view.table = node("details", {class: "ct-table"}, [node("summary", {}, ["Table of values"])]);
    view.table.addEventListener("toggle", () => fillTable(view));
    view.element.replaceChildren(view.bar, view.grid, view.table);
    let width = 0;
    new ResizeObserver((entries) => {
      const now = Math.round(entries[0].contentRect.width);
      if (now !== width && width !== 0 && now > 0) render(view);
      width = now;
    }).observe(view.element);
  }

  function render(view) {
    renderBar(view);
    const specs = view.jobs.some((job) => job.count || job.data.evals.length) ? specsOf(view) : [];
    view.domain = domainOf(view);
    view.bar.hidden = view.table.hidden = specs.length === 0;
    if (!specs.length) {
      view.charts = [];
      view.figures.clear();
      view.grid.replaceChildren(nothing(view));
      return;
    }
    const figures = specs.map((spec) => figureOf(view, spec));
    if (figures.length !== view.grid.children.length || figures.some((figure, i) => view.grid.children[i] !== figure.root)) {
      view.grid.replaceChildren(...figures.map((figure) => figure.root));
    }
    view.charts = specs.map((spec, i) => renderChart(view, spec, figures[i]));
    hover(view, view.hover);
    fillTable(view);
  }

  function renderBar(view) {
    const names = ["x", ...Object.keys(AXES), "log", "smooth", view.jobs.length].join();
    if (view.barNames !== names) {
      view.barNames = names;
      const axes = Object.keys(AXES).map((axis) =>
        button(AXES[axis].name, () => { view.x = view.axis = axis; view.hover = null; render(view); }, {"data-x": axis}));
      view.bar.replaceChildren(
        node("div", {class: "ct-switch", role: "group", "aria-label": "x axis"}, axes),
        button("Log scale", () => { view.log = !view.log; render(view); }, {"data-toggle": "log", title: "Of loss and gradient norm"}),
        button("Smooth", () => { view.smooth = !view.smooth; render(view); }, {"data-toggle": "smooth", title: "A moving average over the reported figures"}),
        view.readout);
    }
    for (const each of view.bar.querySelectorAll("[data-x]")) {
      const axis = each.dataset.x, can = view.can.includes(axis);
      each.setAttribute("aria-pressed", String(axis === view.axis));
      each.disabled = !can;
      each.title = can ? "" : axis === "money" ? "No price is known, so there is no money to draw over" : "The job has reported no steps";
    }
    view.bar.querySelector("[data-toggle=log]").setAttribute("aria-pressed", String(view.log));
    view.bar.querySelector("[data-toggle=smooth]").setAttribute("aria-pressed", String(view.smooth));
  }

  function nothing(view) {
    const runs = view.jobs.some((job) => ["pending", "running"].includes(job.data.job.state));
    if (!runs && view.jobs.some((job) => job.data.job.step > 0)) {
      return node("p", {class: "ct-nothing"}, ["There are no curves: it ran before this version of cloudtrain, which keeps what a job tells of its steps."]);
    }
    return node("div", {class: "ct-nothing"}, [
      node("p", {}, [runs ? "No step is reported yet. " : "The job reported no steps, so there are no curves. ",
        "The trainer tells them by itself; a script does with a line like this from rank 0:"]),
      node("pre", {}, [EXAMPLE]),
    ]);
  }

  /* ---- the data of a job, prepared for drawing ---- */

  function prepared(data, index) {
    const steps = data.steps, count = steps.step ? steps.step.length : 0;
    const began = data.attempts.map((attempt) => attempt.began_s).find((time) => time != null);
    const first = Math.min(...[began, steps.time_s && steps.time_s[0], data.evals[0] && data.evals[0].time_s].filter((time) => time != null));
    // The number of events in a row: 1, in a long job the events of a stretch; 0 for a row that only marks an extreme value.
    const weights = steps.weight || new Array(count).fill(1);
    const job = {data, index, count, weights, begin: Number.isFinite(first) ? first : 0, name: data.job.job};
    job.hasSteps = count === 0 || steps.step.some((step) => step != null);
    job.xs = axesIn(job, steps, count);
    job.evalXs = axesIn(job, columnsOf(data.evals), data.evals.length);
    job.cuts = cutsOf(steps, count);
    job.evalCuts = new Set(data.evals.map((row, i) => (i && row.attempt !== data.evals[i - 1].attempt ? i : -1)));
    job.stale = staleOf(steps, count);
    return job;
  }

  function axesIn(job, columns, count) {
    const numbered = Array.from({length: count}, (_, i) => i + 1);
    return {
      step: count === 0 ? [] : job.hasSteps ? columns.step : numbered,
      time: count === 0 ? [] : columns.time_s.map((time) => time - job.begin),
      money: count === 0 ? [] : columns.usd,
    };
  }

  function columnsOf(rows) {
    return {step: rows.map((row) => row.step), time_s: rows.map((row) => row.time_s), usd: rows.map((row) => row.usd)};
  }

  /* The breaks of a line: before each row that begins an attempt, or returns to an earlier step. */
  function cutsOf(steps, count) {
    const cuts = new Set();
    for (let i = 1; i < count; i++) {
      const goesBack = steps.step[i] != null && steps.step[i - 1] != null && steps.step[i] <= steps.step[i - 1];
      if (steps.attempt[i] !== steps.attempt[i - 1] || goesBack) cuts.add(i);
    }
    return cuts;
  }

  /* The steps that were lost and repeated later: drawn faintly if the x axis is the step. */
  function staleOf(steps, count) {
    const stale = new Array(count).fill(false);
    for (let i = count - 1, least = Infinity; i >= 0; i--) {
      if (steps.step[i] == null) continue;
      stale[i] = steps.step[i] >= least;
      least = Math.min(least, steps.step[i]);
    }
    return stale;
  }

  function axesOf(jobs) {
    const some = jobs.filter((job) => job.count || job.data.evals.length);
    const priced = some.length && some.every((job) => job.data.spend.length && job.data.spend[job.data.spend.length - 1][1] > 0);
    return priced ? ["step", "time", "money"] : ["step", "time"];
  }

  function domainOf(view) {
    let low = Infinity, high = -Infinity;
    const take = (value) => { if (value != null && Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); } };
    for (const job of view.jobs) {
      job.xs[view.axis].forEach(take);
      job.evalXs[view.axis].forEach(take);
      if (view.axis === "time") job.data.attempts.forEach((attempt) => { if (attempt.ended_s) take(attempt.ended_s - job.begin); });
      if (view.axis === "money") job.data.spend.forEach((corner) => take(corner[1]));
    }
    if (view.axis !== "step" || low < 0.2 * high) low = Math.min(0, low);
    if (!(high > low)) high = low + Math.max(1, Math.abs(low) * 1e-9);
    return [low, high];
  }

  /* ---- the list of charts ---- */

  function specsOf(view) {
    const has = (key) => view.jobs.some((job) => (job.data.steps[key] || []).some((value) => value != null));
    const specs = [];
    const add = (key, title, format, more) => {
      if (has(key)) specs.push({id: key, title, format, series: view.jobs.map((job) => line(view, job, key)), ...more});
    };
    add("loss", "Training loss", number, {tall: true, log: true, smooth: true, marks: true, unit: keyOf(view)});
    for (const name of metricsOf(view.jobs)) specs.push(evalSpec(view, name));
    add("samples_per_s", "Throughput", (value) => `${si(value)}/s`, {unit: "samples/s", zero: true, tick: si, smooth: true});
    add("tokens_per_s", "Throughput", (value) => `${si(value)}/s`, {unit: "tokens/s", zero: true, tick: si, smooth: true});
    add("mfu", "Model FLOPs utilisation", percent, {unit: "of the peak", zero: true, smooth: true});
    if (view.jobs.length === 1 && has("compute_s")) specs.push(stackSpec(view.jobs[0], view));
    else add("step_s", "Time of a step", span, {zero: true, smooth: true});
    add("lr", "Learning rate", number, {zero: true});
    add("grad_norm", "Gradient norm", number, {log: true, unit: "before clipping", smooth: true});
    add("memory_bytes", "Memory, most in use", bytes, {unit: "rank 0", zero: true, base: 1024});
    add("bytes_sent", "Sent by a rank in a step", bytes, {zero: true});
    for (const key of ownColumns(view.jobs)) add(key, key.replace(/_/g, " "), number, {smooth: true});
    const spend = spendSpec(view);
    if (spend) specs.push(spend);
    if (specs.length) specs[0].marks = true;
    if (specs.length) specs[0].unit = [AXES[view.axis].over, specs[0].unit].filter(Boolean).join(" · "); // paper has no switch that shows the axis
    return specs;
  }

  function keyOf(view) {
    const some = (test) => view.jobs.some(test), parts = [];
    if (view.jobs.length === 1 && some((job) => job.data.marks.some(isSave))) parts.push("▴ checkpoint");
    if (some((job) => (job.data.steps.loss || []).some((value) => typeof value === "string"))) parts.push("× not finite");
    if (view.axis === "step" && some((job) => job.stale.some(Boolean))) parts.push("faint: done again later");
    return parts.join(" · ");
  }

  function isSave(mark) { return mark.kind === "checkpoint" && mark.text.startsWith("saved"); }

  function ownColumns(jobs) {
    return [...new Set(jobs.flatMap((job) => Object.keys(job.data.steps)))].filter((key) => !KNOWN.has(key)).sort();
  }

  function metricsOf(jobs) {
    const names = new Set();
    for (const job of jobs) for (const row of job.data.evals) Object.keys(row.metrics).forEach((name) => names.add(name));
    return [...names].slice(0, 8);
  }

  function look(view, job) {
    return view.jobs.length === 1 ? {colour: "var(--s0)", dash: ""} : {colour: `var(--s${job.index % 8})`, dash: DASHES[job.index % 8]};
  }

  function line(view, job, key) {
    const ys = job.data.steps[key] || [];
    return {job, name: job.name, key, x: job.xs[view.axis], y: ys, weights: job.weights, rows: ys.length, cuts: job.cuts, stale: view.axis === "step" ? job.stale : null, ...look(view, job)};
  }

  function evalSpec(view, name) {
    const series = view.jobs.map((job) => {
      const y = job.data.evals.map((row) => row.metrics[name] === undefined ? null : row.metrics[name]);
      return {job, name: job.name, key: name, x: job.evalXs[view.axis], y, rows: y.length, cuts: view.axis === "time" ? job.evalCuts : new Set(), stale: null, dots: true, ...look(view, job)};
    });
    const isLoss = /loss|perplexity|error/i.test(name);
    return {id: `eval-${name}`, title: name.charAt(0).toUpperCase() + name.slice(1).replace(/_/g, " "), unit: "evaluation", format: number, series, log: isLoss, least: !isLoss && /acc|f1|auc|precision|recall/i.test(name) ? 1 : null};
  }

  function stackSpec(job, view) {
    const parts = PARTS.filter((part) => (job.data.steps[part[0]] || []).some((value) => value > 0));
    const bottoms = new Array(job.count).fill(0);
    const series = parts.map(([key, name], i) => {
      const y = (job.data.steps[key] || []).map((value) => (typeof value === "number" ? value : 0));
      const base = bottoms.slice();
      y.forEach((value, at) => { bottoms[at] += value; });
      return {job, name, key, x: job.xs[view.axis], y, base, weights: job.weights, rows: y.length, cuts: job.cuts, stale: view.axis === "step" ? job.stale : null, area: true, colour: `var(--ct-part-${PARTS.findIndex((part) => part[0] === key) + 1})`, dash: ""};
    });
    return {id: "split", title: "Where a step's time goes", format: span, zero: true, series, stack: true};
  }

  function spendSpec(view) {
    if (!view.jobs.some((job) => job.data.spend.length && job.data.spend[job.data.spend.length - 1][1] > 0)) return null;
    if (view.axis === "money") {
      const series = view.jobs.map((job) => ({...line(view, job, "step"), stale: null}));
      return {id: "bought", title: "Steps that the money bought", format: whole, zero: true, series};
    }
    const series = view.jobs.map((job) => {
      if (view.axis === "step") return {...line(view, job, "usd"), stale: null};
      const x = job.data.spend.map((corner) => corner[0] - job.begin), y = job.data.spend.map((corner) => corner[1]);
      return {job, name: job.name, key: "usd", x, y, rows: y.length, cuts: new Set(), stale: null, between: true, ...look(view, job)};
    });
    const limit = view.jobs.length === 1 ? view.jobs[0].data.limit_usd : null;
    return {id: "spend", title: "Spend", unit: "all attempts, USD", format: usd, tick: number, zero: true, series, limit};
  }

  /* ---- a chart ---- */

  function figureOf(view, spec) {
    let figure = view.figures.get(spec.id);
    if (figure) return figure;
    const root = node("figure", {class: `ct-chart${spec.tall ? " ct-tall" : ""}`, "data-chart": spec.id});
    const head = node("figcaption", {});
    const svg = shape("svg", {tabindex: "0", role: "img"});
    root.append(head, svg);
    figure = {root, head, svg};
    view.figures.set(spec.id, figure);
    svg.addEventListener("pointermove", (event) => hoverAt(view, spec.id, event));
    svg.addEventListener("pointerdown", (event) => hoverAt(view, spec.id, event));
    svg.addEventListener("pointerleave", () => { if (document.activeElement !== svg) hover(view, null); });
    svg.addEventListener("blur", () => hover(view, null));
    svg.addEventListener("keydown", (event) => walk(view, event));
    return figure;
  }

  function renderChart(view, spec, figure) {
    const width = Math.max(260, Math.round(figure.root.clientWidth || 480) - 2), height = spec.tall ? TALL : PLAIN;
    const isLog = Boolean(spec.log && view.log && positive(spec));
    const [low, high] = rangeOf(spec, isLog);
    const chart = {spec, figure, width, height, isLog, low, high, x: scale(view.domain, [LEFT, width - RIGHT], false), y: scale([low, high], [height - BOTTOM, TOP], isLog)};
    const {svg} = figure;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const summary = summaryOf(view, spec);
    svg.setAttribute("aria-label", summary);
    const parts = [shape("title", {}, spec.unit ? `${spec.title}, ${spec.unit}` : spec.title), shape("desc", {}, summary)];
    const back = shape("g", {class: "ct-back", "aria-hidden": "true"}), front = shape("g", {class: "ct-front"});
    drawAxes(view, chart, back);
    if (view.jobs.length === 1) drawMarks(view, chart, back, view.jobs[0]);
    if (spec.limit != null) drawLimit(chart, back);
    for (const series of spec.series) drawSeries(view, chart, front, series);
    chart.cross = shape("g", {class: "ct-cross", "aria-hidden": "true"});
    svg.replaceChildren(...parts, back, front, chart.cross);
    return chart;
  }

  function positive(spec) {
    return spec.series.some((series) => series.y.some((value) => value > 0));
  }

  function rangeOf(spec, isLog) {
    let low = Infinity, high = -Infinity;
    for (const series of spec.series) {
      for (let i = 0; i < series.rows; i++) {
        const value = series.y[i];
        if (typeof value !== "number" || (isLog && value <= 0)) continue;
        const top = value + (series.base ? series.base[i] : 0);
        low = Math.min(low, value);
        high = Math.max(high, top);
      }
    }
    if (low > high) [low, high] = [0, 1];
    if (isLog) return [low / 1.15, high * 1.15];
    if (spec.limit != null && high > 0.1 * spec.limit) high = Math.max(high, spec.limit);
    if (spec.zero) low = Math.min(0, low);
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    if (!spec.zero) low = low >= 0 && low - pad < 0 ? 0 : low - pad;
    return [low, spec.least && high <= spec.least && high + pad > spec.least ? spec.least : high + pad];
  }

  function drawAxes(view, chart, into) {
    const {width, height, x, y} = chart, bottom = height - BOTTOM;
    for (const value of chart.isLog ? logTicks(chart.low, chart.high) : ticks(chart.low, chart.high, chart.spec.tall ? 6 : 4, chart.spec.base)) {
      const at = y(value);
      into.append(shape("line", {class: "ct-rule", x1: LEFT, x2: width - RIGHT, y1: at, y2: at}));
      into.append(shape("text", {class: "ct-tick", x: LEFT - 7, y: at + 3.5, "text-anchor": "end"}, (chart.spec.tick || chart.spec.format)(value)));
    }
    into.append(shape("line", {class: "ct-base", x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom}));
    const axis = AXES[view.axis], room = Math.max(2, Math.floor((width - LEFT) / 90));
    const places = view.axis === "time" ? timeTicks(...view.domain, room) : ticks(...view.domain, room);
    let free = 0;
    for (const value of places) {
      const at = x(value), text = (axis.tick || axis.format)(value), half = text.length * 3.2;
      if (view.axis === "step" && value % 1 || at - half < free) continue;
      const anchor = at + half > width - 2 ? "end" : "middle";
      free = at + half + 8;
      into.append(shape("line", {class: "ct-base", x1: at, x2: at, y1: bottom, y2: bottom + 4}));
      into.append(shape("text", {class: "ct-tick", x: anchor === "end" ? width - 2 : at, y: bottom + 16, "text-anchor": anchor}, text));
    }
  }

  /* Attempts and restarts as vertical lines, the time between attempts shaded, checkpoints as ticks on the base. */
  function drawMarks(view, chart, into, job) {
    const {height, x, spec} = chart, bottom = height - BOTTOM, attempts = job.data.attempts;
    for (let i = 1; i < attempts.length && view.axis === "time"; i++) {
      const from = attempts[i - 1].ended_s, to = attempts[i].began_s;
      if (from == null || to == null || to <= from) continue;
      const left = x(from - job.begin), right = x(to - job.begin);
      into.append(shape("rect", {class: "ct-gap", x: left, y: TOP, width: Math.max(1, right - left), height: bottom - TOP}));
    }
    let free = -Infinity;
    for (const mark of uprights(view, job)) {
      const at = x(mark.x);
      if (!Number.isFinite(at)) continue;
      const upright = shape("line", {class: `ct-mark ct-${mark.kind}`, x1: at, x2: at, y1: TOP, y2: bottom});
      upright.append(shape("title", {}, mark.text));
      into.append(upright);
      if (!spec.marks) continue;
      const wide = mark.text.length * 6.1, isLeft = at + 5 + wide > chart.width - RIGHT;
      const left = isLeft ? at - 5 - wide : at + 5;
      if (left < Math.max(free, LEFT)) continue;
      free = left + wide + 6;
      into.append(shape("text", {class: `ct-label ct-${mark.kind}`, x: isLeft ? at - 5 : at + 5, y: TOP - 5, "text-anchor": isLeft ? "end" : "start"}, mark.text));
    }
    if (!spec.marks) return;
    for (const mark of job.data.marks) {
      const value = placeOf(view, job, mark);
      if (!isSave(mark) || value == null) continue;
      const at = x(value), tick = shape("path", {class: "ct-saved", d: `M${round(at)} ${bottom - 6}l3.5 6h-7z`});
      tick.append(shape("title", {}, mark.text));
      into.append(tick);
    }
  }

  function placeOf(view, job, row) {
    if (view.axis === "time") return row.time_s - job.begin;
    return view.axis === "money" ? row.usd : row.step;
  }

  function uprights(view, job) {
    const found = [], attempts = job.data.attempts;
    let spent = 0;
    attempts.forEach((attempt, i) => {
      const place = {step: attempt.first_step, time: attempt.began_s == null ? null : attempt.began_s - job.begin, money: spent}[view.axis];
      const before = i && attempts[i - 1].reason, why = before ? `, after ${REASONS[before] || before.replace(/_/g, " ")}` : "";
      if (i && place != null) found.push({x: place, kind: "attempt", text: `attempt ${attempt.number}${why}`});
      spent += attempt.spent_usd || 0;
    });
    const seen = new Map();
    for (const mark of job.data.marks) {
      const count = mark.kind === "restart" ? (seen.get(mark.attempt) || 0) + 1 : 0;
      if (mark.kind === "restart") seen.set(mark.attempt, count);
      const value = placeOf(view, job, mark);
      if (value == null) continue;
      // From the second attempt on, the first restart is the begin of the attempt, and already has a line.
      if (mark.kind === "restart" && (mark.attempt === attempts[0].number || count > 1)) found.push({x: value, kind: "restart", text: `restart, ${mark.text}`});
      if (mark.kind === "error") found.push({x: value, kind: "error", text: mark.text.length > 60 ? `${mark.text.slice(0, 59)}…` : mark.text});
    }
    return found.sort((one, other) => one.x - other.x);
  }

  function drawLimit(chart, into) {
    const {spec, y, width} = chart, text = `limit ${usd(spec.limit)}`;
    if (spec.limit > chart.high) {
      into.append(shape("text", {class: "ct-label ct-limit", x: width - RIGHT, y: TOP - 5, "text-anchor": "end"}, `${text}, far above`));
      return;
    }
    const at = y(spec.limit);
    into.append(shape("line", {class: "ct-limit", x1: LEFT, x2: width - RIGHT, y1: at, y2: at}));
    into.append(shape("text", {class: "ct-label ct-limit", x: width - RIGHT, y: at - 5, "text-anchor": "end"}, text));
  }

  function drawSeries(view, chart, into, series) {
    const isSmooth = chart.spec.smooth && view.smooth && series.rows >= 24;
    if (series.area) return drawArea(chart, into, series);
    for (const run of runsOf(series)) {
      const faint = run.stale ? " ct-stale" : "";
      const raw = thin(chart, series, run, series.y);
      if (raw.length === 1 && !series.dots) into.append(dot(series, raw[0], `ct-dot${faint}`));
      if (!isSmooth) into.append(path(series, raw, `ct-line${faint}`));
      else if (view.jobs.length <= 3) into.append(path({...series, dash: ""}, raw, `ct-line ct-raw${faint}`)); // with more jobs the raw lines are only noise
      if (isSmooth) into.append(path(series, thin(chart, series, run, smoothed(series, run)), `ct-line${faint}`));
      if (series.dots) thin(chart, series, run, series.y).slice(0, 400).forEach((point) => into.append(dot(series, point, "ct-dot")));
    }
    let free = -Infinity; // for many neighbouring values a single cross is enough
    for (let i = 0; i < series.rows; i++) {
      if (typeof series.y[i] !== "string" || series.x[i] == null) continue;
      const at = round(chart.x(series.x[i]));
      if (at < free) continue;
      free = at + 6;
      const mark = shape("path", {class: "ct-notfinite", d: `M${at - 4} ${TOP + 2}l8 8m0 -8l-8 8`});
      mark.append(shape("title", {}, `${series.y[i]} at ${AXES[view.axis].label} ${AXES[view.axis].format(series.x[i])}`));
      into.append(mark);
    }
    return undefined;
  }

  function drawArea(chart, into, series) {
    for (const run of runsOf(series)) {
      if (run.stale) continue; // two overlapping stacks would look like a sum
      const tops = [], bottoms = [];
      for (let i = run.from, to; i < run.to; i = to) { // the mean of the rows in the same column of pixels
        const at = Math.round(chart.x(series.x[i]));
        let base = 0, sum = 0, weight = 0;
        for (to = i; to < run.to && Math.round(chart.x(series.x[to])) === at; to++) {
          base += series.base[to] * series.weights[to];
          sum += series.y[to] * series.weights[to];
          weight += series.weights[to];
        }
        if (!weight) continue;
        tops.push(`${at} ${round(chart.y((base + sum) / weight))}`);
        bottoms.push(`${at} ${round(chart.y(base / weight))}`);
      }
      if (tops.length) into.append(shape("path", {class: "ct-area", d: `M${tops.join("L")}L${bottoms.reverse().join("L")}Z`, style: `fill:${series.colour}`}));
    }
  }

  /* The stretches drawn as a single line: without cut, hole or change between valid and lost steps. */
  function runsOf(series) {
    const runs = [];
    let from = null;
    const isStale = (i) => Boolean(series.stale && series.stale[i]);
    for (let i = 0; i <= series.rows; i++) {
      const isHole = i === series.rows || typeof series.y[i] !== "number" || series.x[i] == null;
      const isCut = from !== null && !isHole && (series.cuts.has(i) || isStale(i) !== isStale(from));
      if (from !== null && (isHole && (i === series.rows || series.y[i] != null || !series.dots) || isCut)) {
        runs.push({from, to: i, stale: isStale(from)});
        from = null;
      }
      if (from === null && !isHole) from = i;
    }
    return runs;
  }

  /* The first, least, greatest and last of all points in the same column of pixels. */
  function thin(chart, series, run, ys) {
    const found = [];
    let pixel = null, group = [];
    const flush = () => {
      if (group.length <= 4) return found.push(...group);
      const low = group.reduce((one, other) => (other.v < one.v ? other : one)), high = group.reduce((one, other) => (other.v > one.v ? other : one));
      const keep = new Set([group[0], low, high, group[group.length - 1]]);
      return found.push(...group.filter((point) => keep.has(point)));
    };
    for (let i = run.from; i < run.to; i++) {
      const v = ys[i];
      if (typeof v !== "number" || (chart.isLog && v <= 0)) continue;
      const point = {x: chart.x(series.x[i]), y: chart.y(v), v};
      const at = Math.floor(point.x);
      if (at !== pixel) { flush(); group = []; pixel = at; }
      group.push(point);
    }
    flush();
    return found;
  }

  /* The mean over the same number of events on either side, so that the line does not lag. Near the begin of a line both
     sides are narrower; near the end only the later side, so that a last outlier does not look like a turn. Rows are
     weighted by their number of events; `compare` computes the same mean. */
  function smoothed(series, run) {
    const found = new Array(series.rows).fill(null), places = [0], sums = [0];
    for (let i = run.from; i < run.to; i++) {
      const weight = series.weights[i];
      if (weight === 0) continue;
      places.push(places[places.length - 1] + weight);
      sums.push(sums[sums.length - 1] + weight * series.y[i]);
    }
    const all = series.weights.reduce((sum, weight) => sum + weight, 0), end = places[places.length - 1];
    const most = Math.max(2, Math.round(all / 60)) + 0.5;
    let row = 0, low = 0, high = 0;
    const until = (place, from) => { // the sum of all events before the place
      let at = from;
      while (at + 2 < places.length && places[at + 1] <= place) at++;
      return [sums[at] + (sums[at + 1] - sums[at]) * (place - places[at]) / (places[at + 1] - places[at]), at];
    };
    for (let i = run.from; i < run.to; i++) {
      if (series.weights[i] === 0) continue;
      const middle = (places[row] + places[row + 1]) / 2, left = Math.min(most, middle), right = Math.min(left, end - middle);
      let before, after;
      [before, low] = until(middle - left, low);
      [after, high] = until(middle + right, high);
      found[i] = (after - before) / (left + right);
      row += 1;
    }
    return found;
  }

  function path(series, points, name) {
    const d = points.length ? `M${points.map((point) => `${round(point.x)} ${round(point.y)}`).join("L")}` : "";
    const dash = series.dash ? `;stroke-dasharray:${series.dash}` : "";
    return shape("path", {class: name, d, style: `stroke:${series.colour}${dash}`});
  }

  function dot(series, point, name) {
    return shape("circle", {class: name, cx: round(point.x), cy: round(point.y), r: 2.6, style: `fill:${series.colour}`});
  }

  function summaryOf(view, spec) {
    return spec.series.map((series) => {
      const values = series.y.filter((value) => typeof value === "number");
      const bad = series.y.filter((value) => typeof value === "string").length, also = bad ? `, ${bad} not finite` : "";
      if (!values.length) return `${series.name}: no values${also}`;
      const lowest = values.reduce((one, other) => Math.min(one, other)), highest = values.reduce((one, other) => Math.max(one, other));
      const who = view.jobs.length > 1 || spec.stack ? `${series.name}: ` : `${spec.title}: `;
      return `${who}from ${spec.format(values[0])} to ${spec.format(values[values.length - 1])}, least ${spec.format(lowest)}, greatest ${spec.format(highest)}${also}`;
    }).join("; ");
  }

  /* ---- hover: the same x for all charts ---- */

  function hoverAt(view, id, event) {
    const chart = view.charts.find((each) => each.spec.id === id), box = chart.figure.svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * chart.width / box.width;
    hover(view, at < LEFT - 8 ? null : snapped(view, chart.x.back(at)));
  }

  /* The place of the nearest step, so that every chart shows the same moment. */
  function snapped(view, value) {
    let best = value, off = Infinity;
    for (const job of view.jobs) {
      for (const xs of [job.xs[view.axis], job.evalXs[view.axis]]) {
        for (const x of xs) if (x != null && Math.abs(x - value) < off) { off = Math.abs(x - value); best = x; }
      }
    }
    return best;
  }

  function walk(view, event) {
    const places = [...new Set(view.jobs.flatMap((job) => [...job.xs[view.axis], ...job.evalXs[view.axis]]))].filter((value) => value != null).sort((a, b) => a - b);
    if (!places.length) return;
    const now = view.hover === null ? -1 : places.findIndex((value) => value >= view.hover);
    const jump = event.shiftKey ? 10 : 1;
    const next = {ArrowRight: now === -1 ? 0 : now + jump, ArrowLeft: now === -1 ? places.length - 1 : now - jump, Home: 0, End: places.length - 1}[event.key];
    if (event.key === "Escape") hover(view, null);
    if (next === undefined) return;
    event.preventDefault();
    hover(view, places[Math.min(places.length - 1, Math.max(0, next))]);
  }

  function hover(view, value) {
    view.hover = value;
    for (const chart of view.charts) {
      const points = chart.spec.series.map((series) => (value === null ? last(series) : nearest(series, value)));
      renderHead(view, chart, points);
      chart.cross.replaceChildren();
      if (value === null) continue;
      const at = round(chart.x(Math.min(view.domain[1], Math.max(view.domain[0], value))));
      chart.cross.append(shape("line", {x1: at, x2: at, y1: TOP, y2: chart.height - BOTTOM}));
      chart.spec.series.forEach((series, i) => {
        const point = points[i];
        if (!point || typeof point.y !== "number" || series.area || (chart.isLog && point.y <= 0)) return;
        chart.cross.append(shape("circle", {cx: round(chart.x(point.x)), cy: round(chart.y(point.y)), r: 4, style: `fill:${series.colour}`}));
      });
    }
    view.readout.textContent = value === null ? "" : readout(view, value);
  }

  function last(series) {
    for (let i = series.rows - 1; i >= 0; i--) if (series.y[i] != null && series.x[i] != null) return {x: series.x[i], y: series.y[i], i};
    return null;
  }

  function nearest(series, value) {
    let best = null, off = Infinity;
    for (let i = 0; i < series.rows; i++) {
      if (series.x[i] == null || series.y[i] == null || (series.stale && series.stale[i])) continue;
      const now = Math.abs(series.x[i] - value);
      if (now <= off) { off = now; best = i; }
    }
    if (best === null) return null;
    if (series.between) return between(series, value);
    return {x: series.x[best], y: series.y[best], i: best};
  }

  function between(series, value) {
    const at = series.x.findIndex((x) => x >= value);
    if (at <= 0) return {x: value, y: series.y[at < 0 ? series.rows - 1 : 0]};
    const share = (value - series.x[at - 1]) / (series.x[at] - series.x[at - 1] || 1);
    return {x: value, y: series.y[at - 1] + share * (series.y[at] - series.y[at - 1])};
  }

  function renderHead(view, chart, points) {
    const {spec, figure} = chart, isMany = spec.series.length > 1;
    const title = [node("b", {}, [spec.title])];
    if (spec.unit) title.push(node("span", {class: "ct-unit"}, [spec.unit]));
    const values = spec.series.map((series, i) => {
      const point = points[i], text = point ? (typeof point.y === "number" ? spec.format(point.y) : String(point.y)) : "–";
      return node("span", {class: "ct-value"}, isMany ? [swatch(series), `${series.name} `, node("b", {}, [text])] : [node("b", {}, [text])]);
    });
    figure.head.replaceChildren(node("span", {class: "ct-title"}, title), node("span", {class: `ct-values${isMany ? " ct-many" : ""}`}, values));
  }

  function swatch(series) {
    if (series.area) return node("i", {class: "ct-swatch", style: `background:${series.colour}`});
    const svg = shape("svg", {class: "ct-stroke", width: 22, height: 8, "aria-hidden": "true"});
    svg.append(shape("line", {x1: 0, x2: 22, y1: 4, y2: 4, style: `stroke:${series.colour}${series.dash ? `;stroke-dasharray:${series.dash}` : ""}`}));
    return svg;
  }

  function readout(view, value) {
    const job = view.jobs[0], axis = AXES[view.axis];
    const place = `${axis.label} ${axis.format(value)}`;
    if (view.jobs.length > 1) return place;
    const row = nearest({x: job.xs[view.axis], y: job.xs[view.axis], rows: job.count, stale: view.axis === "step" ? job.stale : null}, value);
    if (!row) return place;
    const {steps} = job.data, i = row.i, clock = new Date(1000 * steps.time_s[i]);
    const parts = [steps.step[i] == null ? null : `step ${whole(steps.step[i])}`, `${span(steps.time_s[i] - job.begin)} in`, steps.usd[i] == null ? null : usd(steps.usd[i]),
      job.weights[i] > 1 ? `mean of ${whole(job.weights[i])}` : null, `attempt ${steps.attempt[i]}`, `${clock.toISOString().slice(0, 19).replace("T", " ")} UTC`];
    return parts.filter(Boolean).join(" · ");
  }

  /* ---- the values as a table, created when the reader opens the table ---- */

  function fillTable(view) {
    if (!view.table.open || view.table.hidden) return;
    const most = 400, blocks = [];
    for (const job of view.jobs) {
      const names = Object.keys(job.data.steps).filter((name) => name !== "time_s" && name !== "samples");
      const stride = Math.max(1, Math.ceil(job.count / most)), rows = [];
      for (let i = 0; i < job.count; i++) {
        if (i % stride && i !== job.count - 1) continue;
        rows.push(node("tr", {}, names.map((name) => node("td", {}, [cell(job.data.steps[name][i])]))));
      }
      const told = job.weights.reduce((sum, weight) => sum + weight, 0), some = stride > 1 ? `, one row in ${stride}` : "";
      blocks.push(node("table", {}, [node("caption", {}, [`${job.name}: ${whole(told)} steps reported${told > job.count ? ", many rows are means of several steps" : ""}${some}`]),
        node("thead", {}, [node("tr", {}, names.map((name) => node("th", {scope: "col"}, [name])))]), node("tbody", {}, rows)]));
    }
    view.table.replaceChildren(view.table.firstElementChild, node("div", {class: "ct-rows", tabindex: "0"}, blocks));
  }

  function cell(value) {
    return value == null ? "" : typeof value === "number" ? String(value) : value;
  }

  /* ---- scales, ticks and figures in words ---- */

  function scale([low, high], [from, to], isLog) {
    const warp = isLog ? Math.log10 : (value) => value, begin = warp(low), width = warp(high) - begin || 1;
    const at = (value) => from + (warp(value) - begin) / width * (to - from);
    at.back = (pixel) => begin + (pixel - from) / (to - from) * width; // for a linear scale
    return at;
  }

  /* Round numbers between low and high; with `base` 1024, multiples of its powers. */
  function ticks(low, high, count, base) {
    const unit = base ? base ** Math.floor(Math.log(Math.max(high, 1)) / Math.log(base)) : 1;
    const rough = (high - low) / Math.max(1, count) / unit, size = 10 ** Math.floor(Math.log10(rough)) * unit;
    const width = size * [1, 2, 2.5, 5, 10].find((each) => each * size >= rough * unit * 0.8), found = [];
    const first = Math.ceil(low / width - 1e-9); // may be too large for first + 1 to be a different number
    for (let i = 0; i < 50 && (first + i) * width <= high + width * 1e-9; i++) found.push(Number(((first + i) * width).toPrecision(12)));
    return [...new Set(found)];
  }

  function timeTicks(low, high, count) {
    const widths = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000];
    const width = widths.find((each) => (high - low) / each <= count);
    if (!width || high - low < 4) return ticks(low, high, count);
    return Array.from({length: Math.floor(high / width) + 1}, (_, i) => i * width).filter((value) => value >= low);
  }

  function logTicks(low, high) {
    const found = [], decades = Math.log10(high / low);
    const steps = decades > 3 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
    const stride = Math.max(1, Math.ceil(decades / 7));
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      if (power % stride) continue;
      for (const each of steps) { const value = each * 10 ** power; if (value >= low && value <= high) found.push(Number(value.toPrecision(6))); }
    }
    return found.length > 1 ? found : ticks(low, high, 4).filter((value) => value > 0);
  }

  function number(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  }

  function whole(value) { return Math.round(value).toLocaleString("en-US").replace(/,/g, "\u202f"); }

  function si(value) {
    for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(value) >= 0.9995 * size) return `${Number((value / size).toPrecision(3))}${letter}`;
    return String(Number(value.toPrecision(3)));
  }

  function percent(value) { return `${Number((100 * value).toPrecision(3))} %`; }

  function bytes(value) {
    for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
    return `${Number(value.toPrecision(3))} B`;
  }

  function usd(value) {
    if (value === 0 || Math.abs(value) >= 0.995) return `${value.toFixed(2)} USD`;
    const plain = value.toPrecision(2);
    return `${plain.includes("e") ? Number(plain).toFixed(9).replace(/0+$/, "") : plain} USD`;
  }

  function span(seconds) {
    if (seconds === 0) return "0 s";
    if (Math.abs(seconds) < 1) return seconds < 0.001 ? `${Number((seconds * 1e6).toPrecision(3))} µs` : `${Number((seconds * 1e3).toPrecision(3))} ms`;
    if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
    const units = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]], at = units.findIndex((unit) => Math.round(seconds) >= unit[1]);
    const major = Math.floor(Math.round(seconds) / units[at][1]), rest = Math.round(seconds) % units[at][1];
    const minor = at < 3 ? Math.floor(rest / units[at + 1][1]) : 0;
    return `${major}${units[at][0]}${minor ? ` ${minor}${units[at + 1][0]}` : ""}`;
  }

  /* ---- nodes ---- */

  function round(value) { return Math.round(value * 10) / 10; }

  function node(name, attributes, children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) set(made, key, value);
    made.append(...(children || []));
    return made;
  }

  function shape(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) set(made, key, typeof value === "number" ? round(value) : value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function set(made, key, value) {
    if (key === "style") made.style.cssText = value; // the CSP of a page may forbid a style attribute
    else made.setAttribute(key, value);
  }

  function button(text, act, attributes) {
    const made = node("button", {type: "button", "aria-pressed": "false", ...attributes}, [text]);
    made.addEventListener("click", act);
    return made;
  }

  window.CloudtrainCharts = {draw};
})();
