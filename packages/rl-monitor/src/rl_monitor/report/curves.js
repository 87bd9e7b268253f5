// Curves as SVG. A series is {label, note, color, dash, steps, values}; a panel is a title, metric names and a scale.

const COLORS = ["#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777", "#64748b", "#65a30d"];
const DASHES = ["", "5 3", "1 3", "8 3 1 3"];
const WIDTH = 360, HEIGHT = 210, LEFT = 46, RIGHT = 8, TOP = 18, BOTTOM = 32;
const MARKED = 30; // maximum points of a curve with a mark at each point
let notes = {}; // meaning, unit and kind of each metric by name
let range = [0, 1]; // first and last step of the runs, the x axis of all charts

const PANELS = [
  ["Reward", ["reward/mean", "eval/reward"]],
  ["Accuracy", ["eval/accuracy", "pair/accuracy"]],
  ["Loss", ["loss/policy", "loss/train", "loss/eval"]],
  ["Length (tokens)", ["length/mean", "eval/length"]],
  ["Truncated (fraction)", ["truncated/fraction"]],
  ["Entropy", ["entropy/mean"]],
  ["KL", ["kl/beh_k3", "kl/old_k3", "kl/ref_k3"]],
  ["Log-prob gap", ["gap/mean_abs", "gap/max_abs", "gap/fresh_mean_abs"], "log"],
  ["Staleness (versions)", ["staleness/mean", "staleness/max"]],
  ["Throughput (tokens/s)", ["throughput/generated_tokens_per_s", "throughput/trained_tokens_per_s"]],
  ["Gradient norm", ["grad_norm"]],
  ["Learning rate", ["lr"]],
  ["Clipped (fraction)", ["clip/low", "clip/high", "correction/capped"]],
  ["Groups with equal rewards", ["groups/zero_variance"]],
  ["Peak memory (GiB)", ["memory/peak_gib"]],
];

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "rect", "g"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || (size && size < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function smoothed(values, weight) {
  let last = values[0];
  return values.map((value) => (last = weight * last + (1 - weight) * value));
}

function seriesOf(runs, names, smooth) {
  const several = runs.length > 1, series = [];
  runs.forEach((run, i) => names.forEach((name, j) => {
    if (!run.curves[name]) return;
    const [steps, values] = run.curves[name];
    const color = COLORS[(several ? i : j) % COLORS.length];
    const label = several ? `${run.label} ${name}` : name;
    series.push({ label, note: notes[name], color, dash: several ? DASHES[j % DASHES.length] : "", steps, values: smoothed(values, smooth) });
  }));
  return series;
}

function ticks(low, high) {
  const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const positions = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) positions.push(i * step);
  return positions;
}

// Return the lowest and the highest value of an axis. Fractions have the axis 0 to 1, a log axis whole powers of 10.
function rangeOf(values, log, fraction) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (fraction && low >= 0 && high <= 1) return [0, 1];
  if (log) return [Math.floor(Math.log10(low)), Math.max(Math.ceil(Math.log10(high)), Math.floor(Math.log10(low)) + 1)];
  if (low === high) return high >= 0 ? [0, high * 1.25 || 1] : [low - 1, high + 1];
  const margin = (high - low) * 0.05;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

// Return an SVG with axes, functions from step and value to coordinates, and the range of steps.
function frame(values, { log = false, fraction = false, unit = "" } = {}) {
  const [left, right] = range, [low, high] = rangeOf(values, log, fraction);
  const x = (step) => LEFT + ((step - left) / (right - left)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (((log ? Math.log10(value) : value) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  svg.append(element("text", { class: "unit", x: 2, y: 10 }, unit), element("text", { x: (LEFT + WIDTH) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "step"));
  for (const at of ticks(low, high).filter((at) => !log || Number.isInteger(at))) {
    const value = log ? 10 ** at : at;
    svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: LEFT - 4, y: y(value) + 3, "text-anchor": "end" }, number(Number(value.toPrecision(6))).replace(/\.?0+e/, "e")));
  }
  for (const step of ticks(left, right).filter(Number.isInteger)) {
    const anchor = x(step) > WIDTH - 20 ? "end" : "middle";
    svg.append(element("text", { x: x(step) + (anchor === "end" ? RIGHT - 2 : 0), y: HEIGHT - BOTTOM + 14, "text-anchor": anchor }, String(step)));
  }
  return { svg, x, y, left, right };
}

// Draw a dashed line at each step after which a run was resumed, and a triangle at each checkpoint.
function drawMarks({ svg, x, left, right }, runs) {
  const visible = (steps) => steps.filter((step) => left <= step && step <= right), base = HEIGHT - BOTTOM;
  for (const step of visible(runs.flatMap((run) => run.resumed))) svg.append(element("line", { class: "resumed", x1: x(step), x2: x(step), y1: TOP, y2: base }));
  for (const step of visible(runs.flatMap((run) => run.checkpoints))) svg.append(element("path", { class: "checkpoint", d: `M${x(step) - 4} ${base}h8l-4 -7Z` }));
}

function marksText(runs) {
  return runs.flatMap((run) => [[run.resumed, "┆", "resumed after"], [run.checkpoints, "▲", `checkpoint${run.checkpoints.length > 1 ? "s" : ""} of`]].filter(([steps]) => steps.length)
    .map(([steps, sign, text]) => `${sign} ${runs.length > 1 ? `${run.label}: ` : ""}${text} step${steps.length > 1 ? "s" : ""} ${listed(steps)}`)).join("  ");
}

function listed(steps) {
  return (steps.length > 8 ? [...steps.slice(0, 3), "...", ...steps.slice(-3)] : steps).join(", ");
}

// Return the text alternative of a chart for screen readers: the first and the last value of each series.
function summary(title, series) {
  const ends = series.map(({ label, steps, values }) =>
    `${label} ${number(values[0])} at step ${steps[0]}, ${number(values.at(-1))} at step ${steps.at(-1)}`);
  return `${title}: ${ends.join("; ")}`;
}

// Return a card whose legend shows the values at the step under the pointer; `valuesAt(step)` lists [label, color, value, note, dash].
function card(title, caveat, picture, valuesAt) {
  const { svg, x, left, right } = picture;
  const legend = element("p", { class: "legend" }), caption = element("small", {}, caveat);
  const cursor = element("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  const show = (step) => legend.replaceChildren(...valuesAt(step).map(([label, color, value, note, dash]) =>
    element("span", note ? { title: `${label}: ${note.text}${note.unit && ` (${note.unit})`}`, class: "explained" } : {}, element("i", { class: "swatch", style: `background:${dash ? dashed(color, dash) : color}` }), `${label} ${number(value)}`)));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), position = ((event.clientX - box.left) / box.width) * WIDTH;
    const fraction = (position - LEFT) / (WIDTH - LEFT - RIGHT), step = Math.round(left + Math.min(1, Math.max(0, fraction)) * (right - left));
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    caption.textContent = `step ${step}`;
    show(step);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    caption.textContent = caveat;
    show(right);
  });
  show(right);
  return element("div", { class: "card" }, element("h3", {}, title, caption), svg, legend);
}

function dashed(color, dash) {
  const [drawn, gap] = dash.split(" ").map(Number);
  return `repeating-linear-gradient(90deg, ${color} 0 ${drawn}px, transparent ${drawn}px ${drawn + gap}px)`;
}

function latest(steps, values, step) {
  let value = null;
  for (let i = 0; i < steps.length && steps[i] <= step; i++) value = values[i];
  return value;
}

function curveCard(title, series, runs, scale) {
  if (!series.length) return null;
  const log = scale === "log" && series.some((one) => one.values.some((value) => value > 0));
  const drawn = series.map((one) => {
    const visible = one.values.map((value, i) => [one.steps[i], value]).filter(([, value]) => !log || value > 0);
    return { ...one, points: visible };
  });
  const points = drawn.flatMap((one) => one.points);
  const [{ note }] = series, fraction = series.every((one) => one.note?.fraction);
  const picture = frame(points.map(([, value]) => value), { log, fraction, unit: note?.unit });
  drawMarks(picture, runs);
  for (const one of drawn) {
    const line = one.points.map(([step, value], i) => `${i ? "L" : "M"}${picture.x(step).toFixed(1)} ${picture.y(value).toFixed(1)}`).join("");
    picture.svg.append(element("path", { d: line, fill: "none", stroke: one.color, "stroke-width": 1.6, "stroke-dasharray": one.dash }));
    if (one.points.length > MARKED) continue;
    for (const [step, value] of one.points) picture.svg.append(element("circle", { cx: picture.x(step), cy: picture.y(value), r: 2, fill: one.color }));
  }
  picture.svg.setAttribute("aria-label", summary(title, series));
  return card(title, log ? "log scale" : "", picture, (step) => series.map((one) => [one.label, one.color, latest(one.steps, one.values, step), one.note, one.dash]));
}

// Return a card with the seconds of each stage, stacked.
function bandCard(title, run, colors) {
  const { stages } = run, names = Object.keys(stages.seconds), steps = stages.steps;
  if (!names.length) return null;
  const tops = [steps.map(() => 0)];
  for (const name of names) tops.push(tops[tops.length - 1].map((below, i) => below + stages.seconds[name][i]));
  const picture = frame([0, ...tops[tops.length - 1]], { unit: "s" }), at = (i) => Math.min(i, steps.length - 1);
  const wide = steps.length > 1 ? steps : [steps[0] - 0.5, Math.min(steps[0] + 0.5, picture.right)];
  names.forEach((name, k) => {
    const edge = (row, order) => order.map((i) => `${picture.x(wide[i]).toFixed(1)} ${picture.y(row[at(i)]).toFixed(1)}`).join("L");
    const order = wide.map((_, i) => i);
    const line = `M${edge(tops[k + 1], order)}L${edge(tops[k], [...order].reverse())}Z`;
    picture.svg.append(element("path", { d: line, fill: colors[name], "fill-opacity": 0.75 }));
  });
  drawMarks(picture, [run]);
  picture.svg.setAttribute("aria-label", summary(title, names.map((label) => ({ label, steps, values: stages.seconds[label] }))));
  return card(title, "", picture, (step) => names.map((name) => [name, colors[name], latest(steps, stages.seconds[name], step), notes[`time/${name}`]]));
}

function drawCurves(runs) {
  const smooth = Number(document.getElementById("smooth").value), chosen = document.getElementById("figure").value;
  const cards = PANELS.map(([title, names, scale]) => curveCard(title, seriesOf(runs, names, smooth), runs, scale));
  const stages = [...new Set(runs.flatMap((run) => Object.keys(run.stages.seconds)))];
  const colors = Object.fromEntries(stages.map((name, k) => [name, COLORS[k % COLORS.length]]));
  const bands = runs.map((run) => bandCard(runs.length > 1 ? `Seconds per step, ${run.label}` : "Seconds per step", run, colors));
  cards.splice(1 + PANELS.findIndex(([title]) => title.startsWith("Throughput")), 0, ...bands);
  if (chosen) cards.unshift(curveCard(chosen, seriesOf(runs, [chosen], smooth), runs));
  document.getElementById("panels").replaceChildren(...cards.filter((one) => one));
}

function setUpCurves(runs, meanings) {
  notes = meanings;
  const ends = runs.flatMap((run) => Object.values(run.curves).flatMap(([steps]) => [steps[0], steps.at(-1)]));
  range = [Math.min(...ends), Math.max(...ends)];
  if (range[0] === range[1]) range = [Math.max(0, range[0] - 1), range[1] + 1];
  const figure = document.getElementById("figure"), draw = () => drawCurves(runs);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].sort();
  figure.append(...["", ...names].map((name) => element("option", { value: name }, name || "(choose)")));
  figure.addEventListener("change", draw);
  document.getElementById("smooth").addEventListener("input", draw);
  if (runs.length > 1) {
    document.getElementById("runs").append(...runs.map((run, i) =>
      element("span", {}, element("i", { class: "swatch", style: `background:${COLORS[i % COLORS.length]}` }), run.label)));
  }
  document.getElementById("marks").textContent = marksText(runs);
  if (names.length) draw();
  else document.getElementById("panels").append(element("p", { class: "faint" }, "No completed steps yet."));
}
