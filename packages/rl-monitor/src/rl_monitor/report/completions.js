// Completions: filters, and each completion token by token. Model output is set only as text, never as HTML.

const SHOWN = 40; // number of completions shown at first, and added by each click
let thumbnails = {}; // data URL of each image by name
const COLOR_BY = {
  "log-prob": "Red: low probability of the token.",
  gap: "Log-prob of the trainer minus log-prob of the server. Orange: less likely for the trainer; blue: more likely.",
  version: "One color per version of the weights.",
  advantage: "Green: the update makes the token more likely; red: less likely.",
  nothing: "",
};

function select(label, options, selected, change) {
  const node = element("select", {}, ...options.map(([value, text]) => element("option", { value }, text)));
  node.value = selected;
  node.addEventListener("change", change);
  return [element("label", {}, label, node), node];
}

function input(label, attributes, change) {
  const node = element("input", attributes);
  node.addEventListener("input", change);
  return [element("label", {}, label, node), node];
}

function stopOf(completion) {
  return completion.truncated ? "truncated" : "ended";
}

function outcomeOf(completion) {
  return completion.evaluation ? "evaluation" : completion.rejected ? `rejected: ${completion.rejected}` : "trained";
}

function tint(by, tokens, i, advantage) {
  const paint = (rgb, strength) => `rgba(${rgb},${Math.min(0.85, strength).toFixed(2)})`;
  const logprob = tokens.logprobs?.[i], gap = gapOf(tokens, i), gain = tokens.advantages?.[i] ?? advantage;
  if (by === "log-prob" && logprob !== undefined && logprob !== null) return paint("220,38,38", -logprob / 5);
  if (by === "gap" && gap !== null) return paint(gap < 0 ? "234,88,12" : "37,99,235", Math.abs(gap) / tokens.widest);
  if (by === "advantage" && gain !== undefined && gain !== null) return paint(gain < 0 ? "220,38,38" : "22,163,74", Math.abs(gain) / 2);
  if (by === "version") return COLORS[tokens.version[i] % COLORS.length] + "55";
  return "";
}

function gapOf(tokens, i) {
  const [trainer, server] = [tokens.proximal?.[i], tokens.logprobs?.[i]];
  return typeof trainer === "number" && typeof server === "number" ? trainer - server : null;
}

function tokenLine(completion, by) {
  const tokens = completion.tokens, line = element("div", { class: "text tokens assistant" });
  tokens.version ??= tokens.versions.flatMap(([version, times]) => Array(times).fill(version));
  tokens.widest ??= Math.max(1e-6, ...tokens.text.map((_, i) => Math.abs(gapOf(tokens, i) ?? 0)));
  tokens.text.forEach((text, i) => {
    const gap = gapOf(tokens, i), gain = tokens.advantages?.[i] ?? completion.advantage;
    const parts = [`token ${i + 1}`, `log-prob ${number(tokens.logprobs?.[i])}`, gap === null ? "" : `gap ${number(gap)}`,
      `version ${tokens.version[i]}`, gain === undefined ? "" : `advantage ${number(gain)}`];
    line.append(element("span", { title: parts.filter((part) => part).join(" · "), style: `background:${tint(by, tokens, i, completion.advantage)}` }, text));
  });
  const omitted = tokens.count - tokens.text.length;
  if (omitted > 0) line.append(element("span", { class: "faint" }, ` [... ${omitted} more tokens]`));
  return line;
}

function partNode(part) {
  if (!part.image) return part.text;
  return element("img", { src: thumbnails[part.image] ?? part.image, alt: part.label ?? "", title: part.label ?? "" });
}

function messageLines(message) {
  const heading = [message.role, message.name, message.version_first === undefined ? "" : `version ${message.version_first}`,
    message.reward ? `reward ${number(message.reward)}` : ""];
  const body = element("div", { class: `text ${["user", "assistant", "tool", "system"].includes(message.role) ? message.role : ""}` });
  if (message.thought) body.append(element("span", { class: "faint" }, `<think>${message.thought}</think>\n`));
  body.append(...message.parts.map(partNode));
  for (const call of message.calls ?? []) body.append(element("div", {}, `→ ${call}`));
  return [element("div", { class: "role" }, heading.filter((part) => part).join(" · ")), body];
}

function completionBody(completion, by) {
  const lines = [], role = (text) => element("div", { class: "role" }, text);
  if (completion.images) lines.push(role("images"), element("div", { class: "text images" }, ...completion.images.map(partNode)));
  if (completion.conversation) lines.push(...completion.conversation.flatMap(messageLines));
  else if (completion.prompt !== undefined) lines.push(role("prompt"), element("div", { class: "text user" }, completion.prompt));
  if (completion.tokens) lines.push(role(completion.conversation ? "sampled tokens" : "completion"), tokenLine(completion, by));
  else if (completion.completion !== undefined) lines.push(role("completion"), element("div", { class: "text assistant" }, completion.completion));
  if (completion.answer !== undefined) lines.push(role("expected"), element("div", { class: "text" }, completion.answer));
  return lines;
}

function completionCard(completion, by) {
  const versions = completion.version_first === completion.version_last ? `v${completion.version_first}` : `v${completion.version_first}–${completion.version_last}`;
  const parts = [completion.run, `${completion.evaluation ? "evaluation at step" : "step"} ${completion.step}`,
    completion.set && `set ${completion.set}`,
    completion.advantage === undefined ? "" : `advantage ${number(completion.advantage)}`, `prompt ${completion.prompt_id}`, versions,
    completion.tokens ? `${completion.tokens.count} tokens` : "", stopOf(completion), completion.rejected ? outcomeOf(completion) : ""];
  const card = element("details", {}, element("summary", {}, element("b", {}, `reward ${number(completion.reward)}`), ` ${parts.filter((part) => part).join(" · ")}`));
  card.addEventListener("toggle", () => card.open && card.childElementCount === 1 && card.append(...completionBody(completion, by)));
  return card;
}

// Return the last turn of the user and the completion, with the reward as title.
function shortCard(title, completion) {
  const lines = [], role = (text) => element("div", { class: "role" }, text), messages = completion.conversation;
  if (messages) lines.push(...messages.slice(Math.max(0, messages.findLastIndex((message) => message.role === "user"))).flatMap(messageLines));
  else {
    if (completion.images) lines.push(element("div", { class: "text images" }, ...completion.images.map(partNode)));
    lines.push(role("user"), element("div", { class: "text user" }, completion.question ?? completion.prompt ?? ""));
    lines.push(role("completion"), element("div", { class: "text assistant" }, completion.completion ?? ""));
  }
  if (completion.answer !== undefined) lines.push(role("expected"), element("div", { class: "text" }, completion.answer));
  const heading = element("h3", {}, `${title}: reward ${number(completion.reward)}`, element("small", {}, `prompt ${completion.prompt_id}`));
  return element("article", { class: "card" }, heading, ...lines);
}

// Show the best and the worst completion of a run's newest step, or of the newest step with different rewards.
function setUpExtremes(run, several) {
  const steps = new Map();
  for (const one of run.completions.filter((one) => !one.rejected)) {
    const key = `${one.evaluation} ${one.step}`;
    steps.set(key, [...(steps.get(key) ?? []), one]);
  }
  const ordered = [...steps.values()].map((completions) => completions.sort((a, b) => b.reward - a.reward));
  const chosen = ordered.find((completions) => completions[0].reward !== completions.at(-1).reward) ?? ordered[0];
  if (!chosen) return;
  const where = `${several ? `${run.label}, ` : ""}${chosen[0].evaluation ? "evaluation at " : ""}step ${chosen[0].step}`;
  const cards = [shortCard(`Best of ${where}`, chosen[0]), shortCard(`Worst of ${where}`, chosen.at(-1))];
  document.getElementById("extremes").append(element("div", { class: "pair" }, ...cards));
}

function setUpAnswers(runs, images) {
  thumbnails = images;
  for (const run of runs) setUpExtremes(run, runs.length > 1);
  const completions = runs.flatMap((run) => run.completions.map((completion) => ({ ...completion, run: runs.length > 1 ? run.label : "" })));
  const list = document.getElementById("completion-list");
  if (!completions.length) return list.append(element("p", { class: "faint" }, "No completions so far. rollouts.every selects the steps to save; supervised runs have none."));
  const distinct = (field) => [...new Set(completions.map(field))];
  const options = (values, all) => [["", all], ...values.map((value) => [String(value), String(value)])];
  const redraw = () => draw(SHOWN);
  const [stepLabel, step] = select("step", options(distinct((completion) => completion.step).sort((a, b) => b - a), "all"), "", redraw);
  const [outcomeLabel, outcome] = select("outcome", options(distinct(outcomeOf), "all"), "", redraw);
  const [stopLabel, stop] = select("stop", options(distinct(stopOf), "all"), "", redraw);
  const [runLabel, run] = select("run", options(distinct((completion) => completion.run), "all"), "", redraw);
  const [lowLabel, low] = input("reward from", { type: "number", step: "any" }, redraw);
  const [highLabel, high] = input("to", { type: "number", step: "any" }, redraw);
  const [wordLabel, word] = input("contains", { type: "search", placeholder: "text" }, redraw);
  const [orderLabel, order] = select("order", [["newest", "newest"], ["worst", "worst first"], ["best", "best first"]], "newest", redraw);
  const [byLabel, by] = select("color by", Object.keys(COLOR_BY).map((name) => [name, name]), "log-prob", redraw);
  const labels = [stepLabel, outcomeLabel, stopLabel, lowLabel, highLabel, wordLabel, orderLabel, byLabel];
  document.getElementById("filters").append(...(runs.length > 1 ? [runLabel] : []), ...labels);

  function fits(completion) {
    const words = word.value.toLowerCase();
    return (!step.value || String(completion.step) === step.value) && (!outcome.value || outcomeOf(completion) === outcome.value) &&
      (!stop.value || stopOf(completion) === stop.value) && (!run.value || completion.run === run.value) &&
      (low.value === "" || completion.reward >= Number(low.value)) && (high.value === "" || completion.reward <= Number(high.value)) &&
      (!words || JSON.stringify([completion.prompt, completion.completion, completion.conversation]).toLowerCase().includes(words));
  }

  function draw(number) {
    const matches = completions.filter(fits), sign = { worst: 1, best: -1 }[order.value];
    if (sign) matches.sort((a, b) => sign * (a.reward - b.reward));
    const some = (has) => matches.some((completion) => completion.tokens && has(completion));
    const missing = (by.value === "gap" && !some((completion) => completion.tokens.proximal)) ||
      (by.value === "advantage" && !some((completion) => completion.advantage !== undefined));
    document.getElementById("colors").textContent =
      `${matches.length} of the ${completions.length} completions on this page. ${missing ? `None of them has a recorded ${by.value}.` : COLOR_BY[by.value]}`;
    list.replaceChildren(...matches.slice(0, number).map((completion) => completionCard(completion, by.value)));
    if (matches.length <= number) return;
    const more = element("button", {}, `${matches.length - number} more`);
    more.addEventListener("click", () => draw(number + SHOWN));
    list.append(more);
  }
  redraw();
}
