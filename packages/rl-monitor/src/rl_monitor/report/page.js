// Title, summary, events, settings and origin, and the entry point of the script.

function table(heads, rows) {
  const row = (cells, kind) => element("tr", {}, ...cells.map((cell) => element(kind, {}, cell instanceof Node ? cell : String(cell ?? "–"))));
  const cells = element("table", {}, ...(heads ? [row(heads, "th")] : []), ...rows.map((cells) => row(cells, "td")));
  return element("div", { class: "table" }, cells);
}

function setUpTitle(data) {
  document.getElementById("title").textContent = data.runs.map((run) => run.label).join(" and ");
  const about = data.runs.map((run) => {
    const restarts = run.restarts ? `, restarted automatically ${run.restarts} time(s)` : "";
    return `${run.directory}: ${run.state}, step ${run.step}${run.total_steps ? ` of ${run.total_steps}` : ""}${restarts}`;
  });
  document.getElementById("about").textContent = [...about, `Written ${data.made}.`].join("\n");
}

function setUpSummary(data) {
  const section = document.getElementById("summary-list"), { runs, differing } = data, several = runs.length > 1;
  const heads = several ? ["", ...runs.map((run) => run.label)] : null;
  const labels = [...new Set(runs.flatMap((run) => Object.keys(run.summary)))];
  if (labels.length) section.append(table(heads, labels.map((label) => [label, ...runs.map((run) => run.summary[label])])));
  else section.append(element("p", { class: "faint" }, "No settings and no completed steps yet."));
  if (!several) return;
  const final = finalMetrics(runs), missing = () => element("p", { class: "faint" }, "None.");
  section.append(element("h3", {}, "Final metrics"), final.length ? table(heads, final) : missing());
  const rows = differing.map(([name, ...values]) => [name, ...values.map((one, i) => (name in runs[i].settings ? value(one) : "–"))]);
  section.append(element("h3", {}, "Differing settings"), rows.length ? table(heads, rows) : missing());
}

// Return a row with the last value of each run for each metric of the panels and of evaluation sets.
function finalMetrics(runs) {
  const sets = runs.flatMap((run) => Object.keys(run.curves)).filter((name) => /^eval\/[^/]+\/examples$/.test(name))
    .flatMap((name) => ["accuracy", "reward"].map((metric) => name.replace("examples", metric)));
  const names = [...new Set([...PANELS.flatMap(([, metrics]) => metrics), ...sets, "time/step"])];
  return names.filter((name) => runs.some((run) => run.curves[name])).map((name) => {
    const label = element("span", notes[name] ? { title: notes[name].text, class: "explained" } : {}, name);
    return [label, ...runs.map((run) => element("span", { class: "number" }, number(run.curves[name]?.[1].at(-1))))];
  });
}

function setUpEvents(runs) {
  const several = runs.length > 1, rows = runs.flatMap((run) => run.events.map((event) => {
    const until = event.last_step > event.step ? ` to ${event.last_step}` : "";
    const when = event.step === undefined ? event.at ?? "" : `step ${event.step}${until}`;
    const level = element("span", { class: event.level }, event.level);
    return [...(several ? [run.label] : []), level, event.where, when, event.times > 1 ? `${event.times} times` : "", event.text];
  }));
  const heads = [...(several ? ["run"] : []), "", "where", "when", "", "what"];
  document.getElementById("event-list").append(rows.length ? table(heads, rows) : element("p", { class: "faint" }, "No failures, restarts or warnings."));
}

function value(setting) {
  return setting === null ? "null" : setting === "" ? "(empty)" : typeof setting === "object" ? JSON.stringify(setting) : String(setting);
}

function setUpSettings(data) {
  const section = document.getElementById("setting-list"), runs = data.runs, labels = runs.map((run) => run.label);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const search = element("input", { type: "search", placeholder: "find a setting" }), list = element("div");
  const draw = () => list.replaceChildren(table(["setting", ...labels],
    names.filter((name) => name.includes(search.value)).map((name) => [name, ...runs.map((run) => (name in run.settings ? value(run.settings[name]) : "–"))])));
  search.addEventListener("input", draw);
  draw();
  section.append(element("details", {}, element("summary", {}, `All ${names.length} settings`), search, list));
}

function setUpOrigin(runs) {
  const section = document.getElementById("origin-list");
  for (const run of runs) {
    if (runs.length > 1) section.append(element("h3", {}, run.label));
    if (!run.commands.length) section.append(element("p", { class: "faint" }, "The origin of this run was not recorded."));
    for (const fact of run.commands) {
      const commits = Object.entries(fact.commits ?? {}).map(([root, commit]) => `${commit} (${root})`).join("\n");
      const packages = Object.entries(fact.packages ?? {});
      section.append(table(["command", (fact.command ?? []).join(" ")], [
        ["started", fact.started], ["host", `${fact.host}, ${fact.system}`], ["directory", fact.directory],
        ["commit", commits || "none"], ["Python", fact.python],
        ["packages", element("details", {}, element("summary", {}, `${packages.length} packages`),
          element("div", { class: "text" }, packages.map(([name, version]) => `${name} ${version}`).join("\n")))],
      ]));
    }
  }
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent), runs = data.runs;
  const shared = new Set(runs.map((run) => run.name)).size < runs.length;
  for (const run of runs) run.label = shared ? run.directory : run.name;
  setUpTitle(data);
  setUpCurves(runs, data.notes);
  setUpSummary(data);
  setUpEvents(runs);
  setUpAnswers(runs, data.images);
  setUpSettings(data);
  setUpOrigin(runs);
}

start();
