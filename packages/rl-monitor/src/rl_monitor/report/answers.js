// The answers: filters, and each of them token by token. What a model wrote is only ever set as text.

const SHOWN = 40; // so many answers at first, and so many more with each click
const COLOUR_BY = {
  "log-prob": "The redder, the less likely a token was.",
  gap: "The trainer's log-prob minus the server's: orange where less likely, blue where more.",
  version: "One colour for each version of the weights.",
  advantage: "Green: made more likely, red: less.",
  nothing: "",
};

function select(label, options, chosen, change) {
  const made = element("select", {}, ...options.map(([value, text]) => element("option", { value }, text)));
  made.value = chosen;
  made.addEventListener("change", change);
  return [element("label", {}, label, made), made];
}

function input(label, attributes, change) {
  const made = element("input", attributes);
  made.addEventListener("input", change);
  return [element("label", {}, label, made), made];
}

function stopOf(answer) {
  return answer.truncated ? "cut off" : "ended";
}

function fateOf(answer) {
  return answer.evaluation ? "evaluation" : answer.rejected ? `rejected: ${answer.rejected}` : "learned from";
}

function tint(by, tokens, i, advantage) {
  const paint = (rgb, strength) => `rgba(${rgb},${Math.min(0.85, strength).toFixed(2)})`;
  const logprob = tokens.logprobs?.[i], gap = gapOf(tokens, i), gain = tokens.advantages?.[i] ?? advantage;
  if (by === "log-prob" && logprob !== undefined && logprob !== null) return paint("220,38,38", -logprob / 5);
  if (by === "gap" && gap !== null) return paint(gap < 0 ? "234,88,12" : "37,99,235", Math.abs(gap) / tokens.widest);
  if (by === "advantage" && gain !== undefined && gain !== null) return paint(gain < 0 ? "220,38,38" : "22,163,74", Math.abs(gain) / 2);
  if (by === "version") return COLOURS[tokens.version[i] % COLOURS.length] + "55";
  return "";
}

function gapOf(tokens, i) {
  const [ours, theirs] = [tokens.proximal?.[i], tokens.logprobs?.[i]];
  return typeof ours === "number" && typeof theirs === "number" ? ours - theirs : null;
}

function tokenLine(answer, by) {
  const tokens = answer.tokens, line = element("div", { class: "text tokens assistant" });
  tokens.version ??= tokens.versions.flatMap(([version, times]) => Array(times).fill(version));
  tokens.widest ??= Math.max(1e-6, ...tokens.text.map((_, i) => Math.abs(gapOf(tokens, i) ?? 0)));
  tokens.text.forEach((text, i) => {
    const gap = gapOf(tokens, i), gain = tokens.advantages?.[i] ?? answer.advantage;
    const parts = [`token ${i + 1}`, `log-prob ${number(tokens.logprobs?.[i])}`, gap === null ? "" : `gap ${number(gap)}`,
      `version ${tokens.version[i]}`, gain === undefined ? "" : `advantage ${number(gain)}`];
    line.append(element("span", { title: parts.filter((part) => part).join(" · "), style: `background:${tint(by, tokens, i, answer.advantage)}` }, text));
  });
  const left = tokens.count - tokens.text.length;
  if (left > 0) line.append(element("span", { class: "faint" }, ` [... ${left} more tokens]`));
  return line;
}

function messageLines(message) {
  const about = [message.role, message.name, message.version_first === undefined ? "" : `version ${message.version_first}`,
    message.reward ? `reward ${number(message.reward)}` : ""];
  const body = element("div", { class: `text ${["user", "assistant", "tool", "system"].includes(message.role) ? message.role : ""}` });
  if (message.thought) body.append(element("span", { class: "faint" }, `<think>${message.thought}</think>\n`));
  for (const part of message.parts) body.append(part.image ? element("img", { src: part.image, alt: "" }) : part.text);
  for (const call of message.calls ?? []) body.append(element("div", {}, `→ ${call}`));
  return [element("div", { class: "role" }, about.filter((part) => part).join(" · ")), body];
}

function answerBody(answer, by) {
  const lines = [], role = (text) => element("div", { class: "role" }, text);
  if (answer.conversation) lines.push(...answer.conversation.flatMap(messageLines));
  else if (answer.prompt !== undefined) lines.push(role("prompt"), element("div", { class: "text user" }, answer.prompt));
  if (answer.tokens) lines.push(role(answer.conversation ? "what was sampled" : "answer"), tokenLine(answer, by));
  else if (answer.completion !== undefined) lines.push(role("answer"), element("div", { class: "text assistant" }, answer.completion));
  if (answer.answer !== undefined) lines.push(role("expected"), element("div", { class: "text" }, answer.answer));
  return lines;
}

function answerCard(answer, by, open) {
  const versions = answer.version_first === answer.version_last ? `v${answer.version_first}` : `v${answer.version_first}–${answer.version_last}`;
  const parts = [answer.run, `${answer.evaluation ? "evaluation at step" : "step"} ${answer.step}`,
    answer.advantage === undefined ? "" : `advantage ${number(answer.advantage)}`, `prompt ${answer.prompt_id}`, versions,
    answer.tokens ? `${answer.tokens.count} tokens` : "", stopOf(answer), answer.rejected ? fateOf(answer) : ""];
  const made = element("details", {}, element("summary", {}, element("b", {}, `reward ${number(answer.reward)}`), ` ${parts.filter((part) => part).join(" · ")}`));
  const fill = () => made.open && made.childElementCount === 1 && made.append(...answerBody(answer, by));
  made.addEventListener("toggle", fill);
  made.open = open;
  fill();
  return made;
}

function setUpAnswers(runs) {
  const answers = runs.flatMap((run) => run.answers.map((answer) => ({ ...answer, run: runs.length > 1 ? run.label : "" })));
  const list = document.getElementById("answer-list");
  if (!answers.length) return list.append(element("p", { class: "faint" }, "No answers are kept (rollouts.every)."));
  const distinct = (of) => [...new Set(answers.map(of))];
  const options = (values, every) => [["", every], ...values.map((value) => [String(value), String(value)])];
  const redraw = () => draw(SHOWN);
  const [stepLabel, step] = select("step", options(distinct((answer) => answer.step).sort((a, b) => b - a), "all"), "", redraw);
  const [fateLabel, fate] = select("what became of it", options(distinct(fateOf), "all"), "", redraw);
  const [stopLabel, stop] = select("stop", options(distinct(stopOf), "all"), "", redraw);
  const [runLabel, run] = select("run", options(distinct((answer) => answer.run), "all"), "", redraw);
  const [lowLabel, low] = input("reward from", { type: "number", step: "any" }, redraw);
  const [highLabel, high] = input("to", { type: "number", step: "any" }, redraw);
  const [wordLabel, word] = input("with", { type: "search", placeholder: "words" }, redraw);
  const [orderLabel, order] = select("order", [["newest", "newest"], ["worst", "worst first"], ["best", "best first"]], "newest", redraw);
  const [byLabel, by] = select("colour by", Object.keys(COLOUR_BY).map((name) => [name, name]), "log-prob", redraw);
  const labels = [stepLabel, fateLabel, stopLabel, lowLabel, highLabel, wordLabel, orderLabel, byLabel];
  document.getElementById("filters").append(...(runs.length > 1 ? [runLabel] : []), ...labels);

  function fits(answer) {
    const wanted = word.value.toLowerCase();
    return (!step.value || String(answer.step) === step.value) && (!fate.value || fateOf(answer) === fate.value) &&
      (!stop.value || stopOf(answer) === stop.value) && (!run.value || answer.run === run.value) &&
      (low.value === "" || answer.reward >= Number(low.value)) && (high.value === "" || answer.reward <= Number(high.value)) &&
      (!wanted || JSON.stringify([answer.prompt, answer.completion, answer.conversation]).toLowerCase().includes(wanted));
  }

  function draw(number) {
    const found = answers.filter(fits), sign = { worst: 1, best: -1 }[order.value];
    if (sign) found.sort((a, b) => sign * (a.reward - b.reward));
    const some = (has) => found.some((answer) => answer.tokens && has(answer));
    const lacking = (by.value === "gap" && !some((answer) => answer.tokens.proximal)) ||
      (by.value === "advantage" && !some((answer) => answer.advantage !== undefined));
    document.getElementById("colours").textContent =
      `${found.length} of the ${answers.length} answers on this page. ${lacking ? `None of them has its ${by.value} on record.` : COLOUR_BY[by.value]}`;
    list.replaceChildren(...found.slice(0, number).map((answer, i) => answerCard(answer, by.value, i === 0)));
    if (found.length <= number) return;
    const more = element("button", {}, `${found.length - number} more`);
    more.addEventListener("click", () => draw(number + SHOWN));
    list.append(more);
  }
  redraw();
}
