// The page of a report: tables that sort and filter (DataTables), charts (Plotly), and a page for each run (#run=NUMBER).
// All numbers come from the embedded data; only the mean over seeds of a curve is computed here.

const MOST = 12; // methods that a reader can tell apart; of more, the best and the baseline are drawn, others by a click
const DASHES = ["solid", "dash", "dashdot", "dot", "longdash", "longdashdot", "2px,5px"];
const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star", "triangle-left",
  "triangle-right", "hexagon"];
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "--text", "#808080"];
const NARROW = 700; // pixels; a narrower screen begins with the columns that say how good a method is
const COSTS = [["gigabytes", "bytes", "GB exchanged in one run"],
  ["minutes", "seconds", "minutes of one run"], ["steps", "steps", "local steps of one run, all clients"]];
const SCREEN = {width: undefined};
const live = document.getElementById("live"); // only where `fedsim report --live` serves the page

// The packed scripts and data

async function unpack(name) {
  const bytes = Uint8Array.from(atob(document.getElementById(name).textContent), sign => sign.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function make(kind, properties = {}, ...children) {
  const one = Object.assign(document.createElement(kind), properties);
  one.append(...children);
  return one;
}

const [style, json, ...scripts] = await Promise.all(["datatables-css", "data", "datatables", "plotly"].map(unpack));
document.head.prepend(make("style", {textContent: style}));
for (const text of scripts) document.head.append(make("script", {text}));
const data = JSON.parse(json);

// Charts: `figure(chosen)` gives traces, layout and what is missing; a chart is drawn anew when the colours change

const charts = new Set();
const colour = name => name.startsWith("--") ? getComputedStyle(document.documentElement).getPropertyValue(name).trim() : name;
const drawAll = () => charts.forEach(draw => draw());

function looks(place) {
  return {color: colour(COLOURS[place % COLOURS.length]), dash: DASHES[place % DASHES.length],
    symbol: SYMBOLS[place % SYMBOLS.length]};
}

function chart(host, title, choices, figure) {
  const several = choices.filter(([, options]) => options.length > 1);
  const selects = several.map(([name, options]) => make("label", {}, `${name} `, make("select", {name, onchange: draw},
    ...options.map(([value, text]) => make("option", {value}, text)))));
  const plot = make("div", {className: "plot"}), said = make("p", {className: "soft said"});
  const own = make("figure", {className: "chart"}, make("figcaption", {}, title),
    make("div", {className: "choices"}, ...selects), plot, said);
  host.append(own);
  function draw() {
    const chosen = Object.fromEntries(choices.map(([name, options]) => [name, options[0]?.[0]]));
    for (const select of own.querySelectorAll("select")) chosen[select.name] = select.value;
    const width = SCREEN.width ?? plot.clientWidth, narrow = width < NARROW;
    const {traces, layout, missing} = figure(chosen, narrow);
    const axis = {gridcolor: colour("--line"), zerolinecolor: colour("--soft"), automargin: true};
    said.textContent = missing;
    Plotly.react(plot, traces, {
      font: {color: colour("--text"), family: "system-ui, sans-serif", size: 13}, width, height: 420,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: narrow ? false : "zoom",
      margin: {l: 50, r: 15, t: 10, b: 45}, ...layout, xaxis: {...axis, ...layout.xaxis}, yaxis: {...axis, ...layout.yaxis},
      hoverlabel: {bgcolor: colour("--card"), bordercolor: colour("--line"), font: {color: colour("--text")}},
    }, {displayModeBar: false});
  }
  draw();
  plot.on("plotly_click", ({points: [point]}) => {
    const run = [point.customdata].flat()[0];
    if (run !== undefined) location.hash = `run=${run}`;
  });
  charts.add(draw);
  return draw;
}

function legend(names, narrow, height = 420) {
  const below = {orientation: "h", x: 0, xanchor: "left", y: -0.22, yanchor: "top"};
  const rows = Math.ceil(names.length / 2);
  return {showlegend: names.length > 1, height: narrow ? height + 30 + 20 * rows : Math.max(height, 20 * Math.min(names.length, 40)),
    legend: {itemclick: "toggleothers", itemdoubleclick: "toggle", ...(narrow ? below : {})}};
}

// lines: [[name, [x values], [y values], {more of a trace}]]
function lineTraces(lines) {
  return lines.map(([name, x, y, more], place) => {
    const {color, dash, symbol} = looks(more?.place ?? place);
    return {name, x, y, mode: x.length > 25 ? "lines" : "lines+markers", line: {color, dash}, marker: {symbol, size: 6},
      hovertemplate: "%{fullData.name}<br>round %{x}: %{y:.4~g}<extra></extra>", ...more?.trace};
  });
}

const lineFigure = (lines, title, narrow) => ({
  traces: lineTraces(lines), missing: "",
  layout: {xaxis: {title: {text: "round"}}, yaxis: {title: {text: title}}, ...legend(lines, narrow)},
});

// The charts of an experiment, of the methods that its table shows, in the order of the table

function missingWords(experiment, methods, column) {
  const words = methods.flatMap(({shown, label}) => Object.entries(experiment.missing[label] ?? {})
    .filter(([target]) => column === "average" || target === column).map(([target, seeds]) => `${shown}: ${target} (${seeds})`));
  return words.length ? `Missing: ${words.join("; ")}.` : "";
}

function overSeeds(runs, column) {
  const found = new Map();
  for (const run of runs) run.round.forEach((round, place) => {
    const value = run.curves[column]?.[place];
    if (value != null) found.set(round, [...(found.get(round) ?? []), value]);
  });
  const rounds = [...found.keys()].sort((one, other) => one - other), values = rounds.map(round => found.get(round));
  const means = values.map(own => own.reduce((sum, value) => sum + value, 0) / own.length);
  const spreads = values.map((own, place) => own.length < 2 ? null
    : Math.sqrt(own.reduce((sum, value) => sum + (value - means[place]) ** 2, 0) / (own.length - 1)));
  return {rounds, means, spreads};
}

function learningCurves(experiment, shown) {
  const title = Object.fromEntries(experiment.curves);
  return ({target, curve}, narrow) => {
    const methods = shown(), few = new Set(methods.slice(0, MOST));
    const traces = [];
    for (const method of methods) {
      const runs = method.runs.filter(([own]) => own === target).map(([, run]) => run);
      const {rounds, means, spreads} = overSeeds(runs.map(run => data.runs[run]), curve);
      if (!rounds.length) continue;
      const visible = few.has(method) || method.label === experiment.baseline ? true : "legendonly";
      const more = {visible, legendgroup: method.label, customdata: spreads.map(spread => [runs[0], spread ?? 0])};
      if (spreads.some(spread => spread !== null)) more.hovertemplate =
        "%{fullData.name}<br>round %{x}: %{y:.1f} ± %{customdata[1]:.1f}<extra></extra>";
      const [line] = lineTraces([[method.shown, rounds, means, {place: method.place, trace: more}]]);
      const upper = means.map((mean, place) => mean + (spreads[place] ?? 0));
      const lower = means.map((mean, place) => mean - (spreads[place] ?? 0));
      if (spreads.some(spread => spread)) traces.push({x: [...rounds, ...rounds.toReversed()], y: [...upper, ...lower.toReversed()],
        fill: "toself", line: {width: 0}, fillcolor: line.line.color, opacity: 0.12, mode: "lines", hoverinfo: "skip",
        showlegend: false, legendgroup: method.label, visible});
      traces.push(line);
    }
    const names = traces.filter(trace => trace.name), left = names.filter(trace => trace.visible !== true).length;
    const words = left ? `${names.length - left} of ${names.length} methods are drawn; a click on a name shows it alone. ` : "";
    return {traces, missing: words + missingWords(experiment, methods, target),
      layout: {xaxis: {title: {text: "round"}}, yaxis: {title: {text: title[curve]}}, ...legend(names, narrow)}};
  };
}

function dots(experiment, shown) {
  return ({show, domain}, narrow) => {
    const methods = shown().filter(method => show === "accuracy" || method.label !== experiment.baseline);
    const value = method => (show === "accuracy" ? method.cells : method.differences)[domain] ?? [null];
    const values = methods.map(value), names = methods.map(method => method.shown);
    const spans = values.map(([mean, low, high]) => show === "accuracy" ? [low, low] : [mean - low, high - mean]);
    const known = values.map(own => own[1] != null);
    const gaps = methods.filter(method => experiment.missing[method.label]?.[domain]
      || (domain === "average" && experiment.missing[method.label]));
    return {
      traces: [{type: "scatter", mode: "markers", y: names, x: values.map(([mean]) => mean),
        marker: {size: 9, color: methods.map(({place}) => looks(place).color), symbol: methods.map(({place}) => looks(place).symbol)},
        error_x: {symmetric: false, array: spans.map(([, up], place) => known[place] ? up : 0),
          arrayminus: spans.map(([down], place) => known[place] ? down : 0), color: colour("--soft"), thickness: 1.2, width: 4},
        customdata: methods.map((method, place) => [method.runs.find(([own]) => own === domain)?.[1], known[place]
          ? show === "accuracy" ? `± ${values[place][1].toFixed(1)}` : `[${values[place][1].toFixed(1)}, ${values[place][2].toFixed(1)}], ${values[place][3]} pairs` : ""]),
        hovertemplate: `%{y}<br>%{x:.1f} %{customdata[1]}<extra></extra>`}],
      layout: {showlegend: false, height: 90 + 22 * Math.max(methods.length, 3), yaxis: {range: [methods.length - 0.5, -0.5], type: "category"},
        xaxis: {title: {text: show === "accuracy" ? `${experiment.metric}${experiment.seeds > 1 ? ", mean ± std over seeds" : ""}`
          : `difference to ${experiment.baseline} ${experiment.unit ? "(points)" : ""}${narrow ? "" : ", mean of the pairs and its 95 % interval"}`},
          zeroline: show !== "accuracy", nticks: narrow ? 5 : 12},
        annotations: gaps.map(method => ({x: 1, xref: "paper", xanchor: "right", y: method.shown, showarrow: false,
          text: "missing", font: {size: 11, color: colour("--soft")}}))},
      missing: missingWords(experiment, methods, domain),
    };
  };
}

function sizeUnit(gigabytes) { // [the unit in which the largest value is one or more, units in a gigabyte]
  return gigabytes >= 1 ? ["GB", 1] : gigabytes >= 1e-3 ? ["MB", 1e3] : ["kB", 1e6];
}

function costFront(experiment, shown) {
  return ({cost}, narrow) => {
    const methods = shown().filter(method => method.cells.average[0] != null && method.costs[cost] != null);
    const sign = experiment.less ? -1 : 1;
    const cheapest = methods.filter(method => method.ranked === experiment.methods[0].ranked)
      .sort((one, other) => one.costs[cost] - other.costs[cost] || sign * (other.cells.average[0] - one.cells.average[0]));
    let best = -Infinity;
    const front = cheapest.filter(({cells: {average: [mean]}}) => sign * mean > best && (best = sign * mean, true));
    const [unit, factor] = cost === "gigabytes" ? sizeUnit(Math.max(...methods.map(method => method.costs[cost]))) : ["", 1];
    const x = methods.map(method => factor * method.costs[cost]), left = shown().filter(method => !methods.includes(method));
    const logarithmic = Math.max(...x) > 10 * Math.min(...x) && Math.min(...x) > 0, scale = logarithmic ? Math.log : Number;
    const lowest = logarithmic ? scale(Math.min(...x)) : 0, width = scale(Math.max(...x)) - lowest || 1;
    const tops = methods.flatMap(({cells: {average: [mean, spread]}}) => [mean - spread, mean + spread]);
    const named = new Map(); // to [x, y, half of the name's width] in shares of the plot: names that would overlap wait for a hover
    for (const method of methods.length > MOST ? front : methods) {
      const at = [(scale(factor * method.costs[cost]) - lowest) / width, (method.cells.average[0] - Math.min(...tops)) / (Math.max(...tops) - Math.min(...tops) || 1),
        method.shown.length * (narrow ? 0.012 : 0.003)];
      if ([...named.values()].every(other => Math.abs(at[1] - other[1]) > 0.06 || Math.abs(at[0] - other[0]) > at[2] + other[2])) named.set(method, at);
    }
    return {
      traces: [{x: front.map(method => factor * method.costs[cost]), y: front.map(method => method.cells.average[0]), mode: "lines",
        line: {shape: "hv", color: colour("--soft"), width: 1}, hoverinfo: "skip"},
      {x, y: methods.map(method => method.cells.average[0]), mode: "markers+text", cliponaxis: false,
        text: methods.map(method => named.has(method) ? method.shown : ""),
        textposition: methods.map(method => named.get(method)?.[0] > 0.5 ? "middle left" : "middle right"), textfont: {size: 11},
        marker: {size: 10, color: methods.map(({place}) => looks(place).color), symbol: methods.map(({place}) => looks(place).symbol)},
        error_y: {array: methods.map(method => method.cells.average[1] ?? 0), color: colour("--soft"), thickness: 1, width: 3},
        hovertext: methods.map(method => method.shown), hovertemplate: "%{hovertext}<br>%{y:.4~g}" + experiment.unit + " for %{x:.4~g}<extra></extra>"}],
      layout: {showlegend: false, yaxis: {title: {text: `average ${experiment.metric}`}},
        xaxis: {title: {text: COSTS.find(([key]) => key === cost)[2].replace("GB", unit || "GB")}, nticks: 8,
          ...(logarithmic ? {type: "log", dtick: "D2"} : {rangemode: "tozero"})}},
      missing: (named.size < methods.length ? "Hover shows the other names. " : "") + (left.length ? `Not drawn, because a target or the cost is missing: ${left.map(method => method.shown).join(", ")}.` : ""),
    };
  };
}

function experimentCharts(host) {
  const experiment = data.experiments[host.dataset.experiment];
  let order = experiment.methods;
  const shown = () => order, pairs = names => names.map(name => [name, name]);
  const targets = pairs(experiment.targets), words = `${experiment.rule}${experiment.seeds > 1 ? "; mean ± std over seeds" : "; one seed"}`;
  const values = [...(experiment.methods.some(method => Object.keys(method.differences).length)
    ? [["difference", `difference to ${experiment.baseline}`]] : []), ["accuracy", experiment.metric]];
  const costs = COSTS.filter(([key]) => experiment.methods.some(method => method.costs[key] != null));
  const own = [];
  if (experiment.methods.some(method => Object.values(method.cells).some(([mean]) => mean != null)))
    own.push(chart(host, `Methods (${words})`, [["show", values], ["domain", [["average", "average"], ...targets]]], dots(experiment, shown)));
  if (experiment.curves.length)
    own.push(chart(host, "Learning curves", [["target", targets], ["curve", experiment.curves]], learningCurves(experiment, shown)));
  if (costs.length && experiment.methods.some(method => method.cells.average[0] != null))
    own.push(chart(host, "Accuracy against cost", [["cost", costs]], costFront(experiment, shown)));
  return places => {
    order = places.map(place => experiment.methods[place]);
    own.forEach(draw => draw());
  };
}

// The page of a run

const dialog = document.getElementById("run");
dialog.addEventListener("close", () => { if (location.hash.startsWith("#run=")) history.replaceState(null, "", " "); });
dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });

function plainTable(heads, rows) {
  const line = (kind, texts) => make("tr", {}, ...texts.map(text => make(kind, {}, text ?? "–")));
  return make("div", {className: "scroll"}, make("table", {className: "text"}, make("thead", {}, line("th", heads)),
    make("tbody", {}, ...rows.map(row => line("td", row)))));
}

function confusionFigure({classes, matrix}) {
  const shares = matrix.map(row => { const sum = row.reduce((one, other) => one + other, 0); return row.map(count => sum ? 100 * count / sum : null); });
  const side = Math.min(Math.max(320, 26 * classes.length), 700);
  return () => ({
    traces: [{type: "heatmap", x: classes, y: classes, z: shares, customdata: matrix, zmin: 0, zmax: 100, showscale: false,
      colorscale: [[0, colour("--card")], [1, "#0072B2"]], xgap: 1, ygap: 1,
      ...(classes.length <= 12 ? {texttemplate: "%{z:.0f}"} : {}),
      hovertemplate: "%{y} taken for %{x}: %{z:.1f} %, %{customdata} examples<extra></extra>"}],
    layout: {height: side, yaxis: {autorange: "reversed", title: {text: "class"}, type: "category"},
      xaxis: {title: {text: "predicted class"}, type: "category"}},
    missing: "% of the examples of each class, at the selected round",
  });
}

function choiceOfLines(host, title, groups) {
  const names = Object.keys(groups);
  if (names.length) chart(host, title, [["show", names.map(name => [name, name.replaceAll("_", " ")])]], ({show}, narrow) =>
    lineFigure(Object.entries(groups[show]).map(([name, [x, y]]) => [name, x, y]), show.replaceAll("_", " "), narrow));
}

function runPage(run, place) {
  const experiment = data.experiments.find(one => one.methods.some(method => method.runs.some(([, own]) => own === place)));
  const method = experiment.methods.find(one => one.runs.some(([, own]) => own === place));
  const text = (title, value) => value ? [make("h3", {}, title), value] : [];
  const others = method.runs.map(([target, own]) => make("a", {href: `#run=${own}`,
    className: own === place ? "here" : ""}, `${target}, seed ${data.runs[own].seed}`));
  const titles = Object.fromEntries(experiment.curves), curves = {};
  for (const [column, values] of Object.entries(run.curves)) {
    const kind = titles[column].includes(experiment.metric) ? experiment.metric : titles[column];
    (curves[kind] ??= {})[titles[column].replace(` ${experiment.metric}`, "")] = [run.round, values];
  }
  const drawn = make("div");
  dialog.replaceChildren(
    make("button", {className: "close", onclick: () => dialog.close(), ariaLabel: "close"}, "×"),
    make("h2", {}, `${method.shown} → ${run.target}, seed ${run.seed}`), make("nav", {}, ...others),
    plainTable(["rule", experiment.metric, "at round"], Object.entries(run.results).map(([rule, [value, round]]) =>
      [rule === "oracle" ? "ORACLE (upper bound)" : rule.replaceAll("_", " "), value, round])),
    drawn,
    ...text("Messages of each client, whole run", run.messages && plainTable(["client", ...run.messages[0].map(name =>
      name.startsWith("bytes_") ? `${name.slice(6).replaceAll("_", " ")} (MB)` : name)], run.messages.slice(1).map(([client, ...values]) =>
      [client, ...values.map((value, number) => run.messages[0][number].startsWith("bytes_") ? (value / 1e6).toPrecision(4) : value)]))),
    ...text("Failures", run.failures?.length && make("ul", {}, ...run.failures.map(line => make("li", {}, line)))),
    ...text("Recipe", Object.keys(run.recipe).length && plainTable(["part", "settings"], Object.entries(run.recipe))),
    ...text("Settings besides those that all runs share", Object.keys(run.settings).length && plainTable(["setting", "value"], Object.entries(run.settings))),
    ...text("Run it again", make("pre", {}, run.command)));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  choiceOfLines(drawn, "Learning curves", curves);
  choiceOfLines(drawn, "Clients", run.clients ?? {});
  choiceOfLines(drawn, "Layers", run.details);
  if (run.confusion.classes) chart(drawn, "Confusion on the unseen domain", [], confusionFigure(run.confusion));
}

const lasting = [];
function followHash() {
  const number = Number(new URLSearchParams(location.hash.slice(1)).get("run") ?? NaN);
  for (const draw of charts) if (!lasting.includes(draw)) charts.delete(draw);
  if (data.runs[number]) runPage(data.runs[number], number);
  else if (dialog.open) dialog.close();
}

// Tables: numbers by their value, empty cells last in both directions; a filter in the head of each column

const EMPTY = -Infinity; // what DataTables makes of an empty cell
const order = sign => (one, other) => (one === EMPTY) - (other === EMPTY) || sign * (one < other ? -1 : Number(one > other));
DataTable.ext.errMode = "throw";
const alphabet = sign => (one, other) => (one === "") - (other === "") || sign * (isNaN(one) - isNaN(other) || (isNaN(one) ? one.localeCompare(other) : one - other)); // numbers before words
Object.assign(DataTable.ext.type.order, {"num-asc": order(1), "num-desc": order(-1), "html-asc": alphabet(1), "html-desc": alphabet(-1)});

function enhance(table) {
  const rows = [...table.tBodies[0].rows], columns = [...table.tHead.rows[0].cells].map((_, column) => column);
  const isNumber = column => rows.length > 0 && rows[0].cells[column].hasAttribute("data-order");
  const isList = column => !isNumber(column) && new Set(rows.map(row => row.cells[column].textContent)).size <= 20;
  const filters = !table.classList.contains("text") && rows.length > 2;
  const heading = column => table.tHead.rows[0].cells[column].textContent.trim();
  const isFirst = table.classList.contains("methods") ? column => column === 0 || /^(Average|Δ|p$)/.test(heading(column))
    : column => column < 4;
  const isHidden = column => filters && innerWidth < NARROW && !isFirst(column);
  const hidden = columns.filter(isHidden).length;
  const button = hidden ? `columns: ${columns.length - hidden} of ${columns.length} are shown` : "columns";
  return new DataTable(table, {
    autoWidth: false, order: [], stateSave: Boolean(live), stateDuration: -1, paging: rows.length > 100, pageLength: 50, info: rows.length > 100, searching: filters || rows.length > 12,
    ordering: {indicators: false},
    layout: {topStart: filters ? {buttons: [{extend: "colvis", text: button}]} : null, topEnd: rows.length > 12 ? "search" : null},
    columnDefs: columns.map(column => ({
      targets: column, visible: !isHidden(column), type: isNumber(column) ? "num" : "html", orderSequence: isNumber(column) ? ["desc", "asc"] : ["asc", "desc"],
      ...(filters ? {columnControl: [[isList(column) && column ? "searchList" : "search"]]} : {}),
    })),
  });
}

const narrowing = new Map([...document.querySelectorAll(".charts")].map(host => [host.closest("section"), experimentCharts(host)]));
lasting.push(...charts);
for (const table of document.querySelectorAll("table.sortable:not(#live *)")) {
  const enhanced = enhance(table);
  if (table.classList.contains("methods")) enhanced.on("draw", () =>
    narrowing.get(table.closest("section"))(enhanced.rows({order: "applied", search: "applied"}).indexes().toArray()));
}

// A picture fits the screen; a click shows it large, to be scrolled
for (const image of document.querySelectorAll("figure img"))
  image.addEventListener("click", () => image.classList.toggle("large"));

const dark = matchMedia("(prefers-color-scheme: dark)");
function recolour() {
  document.documentElement.classList.toggle("dark", dark.matches && !SCREEN.width);
  drawAll();
}
dark.addEventListener("change", recolour);
document.documentElement.classList.toggle("dark", dark.matches);
addEventListener("beforeprint", () => { SCREEN.width = 680; document.documentElement.classList.add("paper"); recolour(); });
addEventListener("afterprint", () => { SCREEN.width = undefined; document.documentElement.classList.remove("paper"); recolour(); });
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(drawAll, 100); });
addEventListener("hashchange", followHash);
followHash();

// The live page reads its state every two seconds; it is loaded anew, with its filters, when another run has finished
if (live) setInterval(async () => {
  const state = await fetch("state").then(answer => answer.json()).catch(() => null);
  if (state) live.innerHTML = state.html;
  else live.replaceChildren(make("p", {}, "The server of this page has stopped."));
  if (state && String(state.finished) !== live.dataset.finished && !dialog.open) location.reload();
}, 2000);
document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds until everything is drawn
