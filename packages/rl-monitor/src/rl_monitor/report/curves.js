// Curves as SVG. A series is {label, color, dash, steps, values}; a panel is a title, metric names and a scale.

const COLORS = ["#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777", "#64748b", "#65a30d"];
const DASHES = ["", "5 3", "1 3", "8 3 1 3"];
const WIDTH = 360, HEIGHT = 190, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;
const MARKED = 30; // maximum points of a curve with a mark at each point

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
    series.push({ label, color, dash: several ? DASHES[j % DASHES.length] : "", steps, values: smoothed(values, smooth) });
  }));
  return series;
}

function ticks(low, high) {
  const raw = (high - low) / 4, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const positions = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) positions.push(i * step);
  return positions;
}

// Return an SVG with axes, functions from step and value to coordinates, and the range of steps.
function frame(steps, values, log) {
  let [left, right] = [Math.min(...steps), Math.max(...steps)];
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (left === right) [left, right] = [left - 1, right + 1];
  if (log) [low, high] = [Math.log10(low), Math.log10(high)];
  const margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  [low, high] = [low >= 0 && !log && low - margin < 0 ? 0 : low - margin, high + margin];
  const x = (step) => LEFT + ((step - left) / (right - left)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (((log ? Math.log10(value) : value) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  for (const at of ticks(low, high)) {
    const value = log ? 10 ** at : at;
    svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: LEFT - 4, y: y(value) + 3, "text-anchor": "end" }, number(Number(value.toPrecision(6)))));
  }
  for (const step of ticks(left, right).filter(Number.isInteger)) {
    const anchor = x(step) > WIDTH - 20 ? "end" : "middle";
    svg.append(element("text", { x: x(step) + (anchor === "end" ? RIGHT - 2 : 0), y: HEIGHT - 5, "text-anchor": anchor }, String(step)));
  }
  return { svg, x, y, left, right };
}

// Return the text alternative of a chart for screen readers: the first and the last value of each series.
function summary(title, series) {
  const ends = series.map(({ label, steps, values }) =>
    `${label} ${number(values[0])} at step ${steps[0]}, ${number(values.at(-1))} at step ${steps.at(-1)}`);
  return `${title}: ${ends.join("; ")}`;
}

// Return a card whose legend shows the values at the step under the pointer; `valuesAt(step)` lists [label, color, value, dash].
function card(title, note, picture, valuesAt) {
  const { svg, x, left, right } = picture;
  const legend = element("p", { class: "legend" }), caption = element("small", {}, note);
  const cursor = element("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  const show = (step) => legend.replaceChildren(...valuesAt(step).map(([label, color, value, dash]) =>
    element("span", {}, element("i", { class: "swatch", style: `background:${dash ? dashed(color) : color}` }), `${label} ${number(value)}`)));
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
    caption.textContent = note;
    show(right);
  });
  show(right);
  return element("div", { class: "card" }, element("h3", {}, title, caption), svg, legend);
}

function dashed(color) {
  return `repeating-linear-gradient(90deg, ${color} 0 4px, transparent 4px 6px)`;
}

function latest(steps, values, step) {
  let value = null;
  for (let i = 0; i < steps.length && steps[i] <= step; i++) value = values[i];
  return value;
}

function curveCard(title, series, scale) {
  if (!series.length) return null;
  const log = scale === "log" && series.some((one) => one.values.some((value) => value > 0));
  const drawn = series.map((one) => {
    const visible = one.values.map((value, i) => [one.steps[i], value]).filter(([, value]) => !log || value > 0);
    return { ...one, points: visible };
  });
  const points = drawn.flatMap((one) => one.points);
  const picture = frame(points.map(([step]) => step), points.map(([, value]) => value), log);
  for (const one of drawn) {
    const line = one.points.map(([step, value], i) => `${i ? "L" : "M"}${picture.x(step).toFixed(1)} ${picture.y(value).toFixed(1)}`).join("");
    picture.svg.append(element("path", { d: line, fill: "none", stroke: one.color, "stroke-width": 1.6, "stroke-dasharray": one.dash }));
    if (one.points.length > MARKED) continue;
    for (const [step, value] of one.points) picture.svg.append(element("circle", { cx: picture.x(step), cy: picture.y(value), r: 2, fill: one.color }));
  }
  picture.svg.setAttribute("aria-label", summary(title, series));
  return card(title, log ? "log scale" : "", picture, (step) => series.map((one) => [one.label, one.color, latest(one.steps, one.values, step), one.dash]));
}

// Return a card with the seconds of each stage, stacked.
function bandCard(title, stages) {
  const names = Object.keys(stages.seconds), steps = stages.steps;
  if (!names.length) return null;
  const tops = [steps.map(() => 0)];
  for (const name of names) tops.push(tops[tops.length - 1].map((below, i) => below + stages.seconds[name][i]));
  const wide = steps.length > 1 ? steps : [steps[0] - 0.5, steps[0] + 0.5], at = (i) => Math.min(i, steps.length - 1);
  const picture = frame(wide, [0, ...tops[tops.length - 1]], false);
  names.forEach((name, k) => {
    const edge = (row, order) => order.map((i) => `${picture.x(wide[i]).toFixed(1)} ${picture.y(row[at(i)]).toFixed(1)}`).join("L");
    const order = wide.map((_, i) => i);
    const line = `M${edge(tops[k + 1], order)}L${edge(tops[k], [...order].reverse())}Z`;
    picture.svg.append(element("path", { d: line, fill: COLORS[k % COLORS.length], "fill-opacity": 0.75 }));
  });
  picture.svg.setAttribute("aria-label", summary(title, names.map((label) => ({ label, steps, values: stages.seconds[label] }))));
  return card(title, "", picture, (step) => names.map((name, k) => [name, COLORS[k % COLORS.length], latest(steps, stages.seconds[name], step)]));
}

function drawCurves(runs) {
  const smooth = Number(document.getElementById("smooth").value), chosen = document.getElementById("figure").value;
  const cards = PANELS.map(([title, names, scale]) => curveCard(title, seriesOf(runs, names, smooth), scale));
  const bands = runs.map((run) => bandCard(runs.length > 1 ? `Seconds per step, ${run.label}` : "Seconds per step", run.stages));
  cards.splice(1 + PANELS.findIndex(([title]) => title.startsWith("Throughput")), 0, ...bands);
  if (chosen) cards.unshift(curveCard(chosen, seriesOf(runs, [chosen], smooth)));
  document.getElementById("panels").replaceChildren(...cards.filter((one) => one));
}

function setUpCurves(runs) {
  const figure = document.getElementById("figure"), draw = () => drawCurves(runs);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].sort();
  figure.append(...["", ...names].map((name) => element("option", { value: name }, name || "(choose)")));
  figure.addEventListener("change", draw);
  document.getElementById("smooth").addEventListener("input", draw);
  if (runs.length > 1) {
    document.getElementById("runs").append(...runs.map((run, i) =>
      element("span", {}, element("i", { class: "swatch", style: `background:${COLORS[i % COLORS.length]}` }), run.label)));
  }
  if (names.length) draw();
  else document.getElementById("panels").append(element("p", { class: "faint" }, "No completed steps yet."));
}
