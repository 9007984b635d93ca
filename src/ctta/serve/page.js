// The live page: polls a page of the streams and draws a card for each. No libraries, nothing from other servers.
"use strict";

const REFRESH_SECONDS = 2, PAGE_SIZE = 24, FEW_CARDS = 12;
const $ = id => document.getElementById(id);
const tokens = { infer: "", admin: "" };  // in memory only
const cards = new Map();

// ---- requests ----

async function request(path, { method = "GET", body, scope = "infer", read = response => response.json() } = {}) {
  for (let retry = true; ; retry = false) {
    const token = tokens[scope] || tokens.admin || tokens.infer;
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const response = await fetch(path, { method, body, headers, cache: "no-store" });
    if (response.ok) return read(response);
    const { error = response.statusText } = await response.json().catch(() => ({}));
    if (retry && (response.status === 401 || response.status === 403)) {
      const given = await promptForToken(error);
      if (given) { tokens[scope] = given; continue; }
    }
    throw new Error(error);
  }
}

let prompting = null;  // one dialog at a time, for all requests that need a token
function promptForToken(reason) {
  prompting ??= new Promise(resolve => {
    const dialog = $("token-dialog");
    $("token-reason").textContent = reason;
    $("token").value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      prompting = null;
      resolve(dialog.returnValue === "ok" ? $("token").value.trim() : "");
    }, { once: true });
  });
  return prompting;
}

// ---- cards ----

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const formatPercent = value => `${(100 * value).toFixed(1)} %`;

function formatAge(seconds) {
  if (seconds < 5) return "now";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.floor(seconds)} s`;
}

/** Return the SVG path of a curve over the whole width, with gaps where a value is missing. */
function curvePath(values, toHeight, width = 240) {
  let path = "", drawing = false;
  values.forEach((value, index) => {
    if (value === null) { drawing = false; return; }
    const x = values.length > 1 ? width * index / (values.length - 1) : width;
    path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${toHeight(value).toFixed(1)}`;
    drawing = true;
  });
  return path;
}

function createCard(name) {
  const card = $("card").content.firstElementChild.cloneNode(true);
  card.dataset.stream = name;
  const title = card.querySelector(".name");
  title.textContent = name;
  title.title = `${name}: try an image on this stream`;
  title.id = `stream-${name}`;
  card.setAttribute("aria-labelledby", title.id);
  for (const button of card.querySelectorAll("[data-action]"))
    button.addEventListener("click", () => act(name, button));
  title.addEventListener("click", () => { $("stream").value = name; $("stream").focus(); });
  const compared = card.querySelector(".compared");
  compared.addEventListener("toggle", () => { if (compared.open) showAnswers(card); });
  return card;
}

async function act(name, button) {
  button.disabled = true;
  try {
    showStream(await request(`streams/${name}/${button.dataset.action}`, { method: "POST", scope: "admin" }));
    $("error").textContent = "";
  } catch (error) {
    $("error").textContent = `${name}: ${error.message}`;
  }
  button.disabled = false;
}

/** Show the last answers of a stream beside those of the source, as a table: rows are the source's classes. */
async function showAnswers(card) {
  const compared = card.querySelector(".compared"), seen = card.dataset.images;
  if (!compared.open || compared.hidden || compared.dataset.seen === seen) return;
  compared.dataset.seen = seen;
  const { total, agreement, classes, counts } = await request(`streams/${card.dataset.stream}/answers`);
  const share = agreement === null ? "" : `(${(100 * agreement).toFixed(0)} % as the source)`;
  compared.querySelector(".agreement").textContent = share;
  compared.querySelector("caption").textContent = total
    ? `last ${total} answers; rows: source, columns: adapted` : "no answers yet";
  const names = classes.map(each => each.label ?? String(each.class));
  if (counts.length > names.length) names.push("other");
  const header = (text, scope) => {
    const cell = document.createElement("th");
    [cell.textContent, cell.title, cell.scope] = [text, text, scope];
    return cell;
  };
  const head = document.createElement("tr");
  head.append(document.createElement("td"), ...names.map(name => header(name, "col")));
  compared.querySelector("thead").replaceChildren(...(total ? [head] : []));
  compared.querySelector("tbody").replaceChildren(...counts.map((numbers, row) => {
    const line = document.createElement("tr");
    line.append(header(names[row], "row"), ...numbers.map((number, column) => {
      const cell = document.createElement("td");
      cell.textContent = number;
      cell.className = number === 0 ? "zero" : row === column ? "same" : "other";
      return cell;
    }));
    return line;
  }));
}

async function showImage(card) {
  const image = card.querySelector(".image"), seen = card.dataset.images;
  if (image.dataset.seen === seen) return;
  image.dataset.seen = seen;
  const content = await request(`streams/${card.dataset.stream}/image`, { read: response => response.blob() });
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(content);
  image.alt = `last image of ${card.dataset.stream}`;
  image.hidden = false;
}

// The gain over the network without adaptation, such as "+6.2 ± 1.8 points"; streams without labels have none.
function formatGain(feedback) {
  if (!feedback || feedback.gain === null) return "";
  const points = (100 * feedback.gain).toFixed(1).replace("-", "−");
  const half = (50 * (feedback.high - feedback.low)).toFixed(1);
  return `adapting: ${feedback.gain < 0 ? "" : "+"}${points} ± ${half} points by ${feedback.num_labels} labels`;
}

// The same without labels, if the guard can tell.
function formatEstimate(health) {
  const { estimated_gain: gain = null, estimated_gain_low: low, estimated_gain_high: high } = health;
  if (gain === null || (low <= 0 && high >= 0)) return "";
  const [points, from, to] = [gain, low, high].map((each) => `${each < 0 ? "" : "+"}${(100 * each).toFixed(1).replace("-", "−")}`);
  return `adapting: ${points} points (${from} to ${to}), estimated`;
}

/** Return whether the gain is above or below zero for certain. */
function judgeGain({ feedback, health }) {
  const [low, high] = feedback && feedback.gain !== null ? [feedback.low, feedback.high]
    : [health.estimated_gain_low ?? null, health.estimated_gain_high ?? null];
  return low !== null && low > 0 ? "good" : high !== null && high < 0 ? "alarm" : "";
}

const spellRange = (values, format) => values.length
  ? `from ${format(Math.min(...values))} to ${format(Math.max(...values))}, now ${format(values.at(-1))}` : "no values yet";

/** Let screen readers say something. */
function announce(text) {
  $("announcements").textContent = text;
}

const isAlarmed = stream => stream.collapse_score !== null && stream.collapse_score >= 1;

function showStream(stream) {
  const card = cards.get(stream.name) ?? createCard(stream.name);
  cards.set(stream.name, card);
  const setText = (selector, text) => {
    const element = card.querySelector(selector);
    if (element.textContent !== text) element.textContent = text;
  };
  const [state, style] = isAlarmed(stream) ? ["alarm", "alarm"] : stream.frozen ? ["frozen", "still"]
    : stream.live ? ["adapting", "good"] : ["on disk", "still"];
  setText(".badge", state);
  card.querySelector(".badge").className = `badge ${style}`;
  if (isAlarmed(stream) && !card.classList.contains("alarm")) announce(`${stream.name}: alarm`);
  card.classList.toggle("alarm", isAlarmed(stream));
  card.dataset.images = stream.images;

  const known = stream.confidences.filter(value => value !== null);
  const confidence = curvePath(stream.confidences, value => 54 - 52 * value);
  card.querySelector(".confidence .line").setAttribute("d", confidence);
  const hasArea = known.length === stream.confidences.length && known.length > 1;
  card.querySelector(".confidence .area").setAttribute("d", hasArea ? `${confidence}L240 56L0 56Z` : "");
  const describe = (selector, text) => card.querySelector(selector).setAttribute("aria-label", text);
  describe(".confidence", `confidence over the last ${known.length} requests, ${spellRange(known, formatPercent)}`);
  const scores = stream.collapse_scores.filter(value => value !== null);
  describe(".collapse", `collapse score, ${spellRange(scores, value => value.toFixed(2))}; an alarm from 1 on`);
  setText(".confidence-now", known.length ? formatPercent(known.at(-1)) : "–");
  const collapse = curvePath(stream.collapse_scores, value => 29 - 19 * Math.min(Math.max(value, 0), 1.5));
  card.querySelector(".collapse .line").setAttribute("d", collapse);
  setText(".collapse-now", stream.collapse_score === null ? "no guard" : stream.collapse_score.toFixed(2));

  setText(".updates", compact.format(stream.updates));
  setText(".images", compact.format(stream.images));
  setText(".skipped", compact.format(stream.skipped.not_finite + stream.skipped.budget));
  setText(".gain", formatGain(stream.feedback) || formatEstimate(stream.health));
  card.querySelector(".gain").className = `gain ${judgeGain(stream)}`;
  setText(".used", formatAge(Date.now() / 1000 - stream.used_at));
  setText(".number", `(${stream.events.length})`);
  showEvents(card.querySelector("ol"), stream.events);
  const freeze = card.querySelector("[data-action=freeze], [data-action=unfreeze]");
  freeze.dataset.action = stream.frozen ? "unfreeze" : "freeze";
  freeze.textContent = stream.frozen ? "Unfreeze" : "Freeze";
  return card;
}

function showEvents(list, events) {
  const newest = events.length ? JSON.stringify(events.at(-1)) : "";
  if (list.dataset.newest === newest) return;
  list.dataset.newest = newest;
  list.replaceChildren(...events.toReversed().map(event => {
    const line = document.createElement("li"), time = document.createElement("time"), text = document.createElement("span");
    time.textContent = new Date(1000 * event.time).toLocaleTimeString("en-GB");
    text.textContent = `${event.kind}: ${event.cause}`;
    line.append(time, text);
    return line;
  }));
}

let offset = 0;

async function refresh() {
  try {
    const query = new URLSearchParams({ limit: PAGE_SIZE, offset, order: $("order").value, search: $("search").value.trim() });
    if ($("state").value) query.set("state", $("state").value);
    const listed = await request(`streams?${query}`);
    if (offset && offset >= listed.matching) {  // there are fewer than before
      offset = Math.max(0, PAGE_SIZE * (Math.ceil(listed.matching / PAGE_SIZE) - 1));
      return await refresh();
    }
    const streams = listed.streams, names = new Set(streams.map(stream => stream.name));
    if (!$("stream").value) $("stream").value = streams[0]?.name ?? "default";
    for (const [name, card] of cards) if (!names.has(name)) { card.remove(); cards.delete(name); }
    arrange(streams.map(showStream));
    showTotals(listed);
    $("connection").textContent = "";
    await Promise.all(streams.map(stream => showDetails(stream, listed.matching)));
  } catch (error) {
    $("connection").textContent = `Cannot load the streams: ${error.message}`;
  }
}

/** Bring the cards into order, but not while one of them is in use: it would lose the focus. */
function arrange(ordered) {
  const section = $("cards"), isInUse = section !== document.activeElement && section.contains(document.activeElement);
  ordered.forEach((card, place) => {
    if (isInUse ? !card.isConnected : section.children[place] !== card) section.insertBefore(card, section.children[place] ?? null);
  });
}

async function showDetails(stream, matching) {
  const card = cards.get(stream.name), compared = card.querySelector(".compared");
  if (stream.feedback && compared.hidden) {
    compared.hidden = false;
    compared.open = matching <= FEW_CARDS;  // each open one is a request
  }
  if (stream.live && stream.feedback) await showAnswers(card);
  if (stream.live && stream.last_image) await showImage(card);
}

function showTotals({ total, matching, totals, streams }) {
  const shown = {
    "in memory": compact.format(totals.live),
    alarms: totals.alarms,
    harmed: totals.harmed,
    frozen: compact.format(totals.frozen),
    updates: compact.format(totals.updates),
    images: compact.format(totals.images),
    waiting: totals.waiting,
  };
  $("totals").replaceChildren(...Object.entries(shown).map(([name, value]) => {
    const pair = document.createElement("div"), term = document.createElement("dt"), text = document.createElement("dd");
    [term.textContent, text.textContent] = [name, value];
    pair.append(term, text);
    return pair;
  }));
  const setText = (id, text) => { if ($(id).textContent !== text) $(id).textContent = text; };
  const format = number => number.toLocaleString("en");
  setText("count", matching < total ? `${format(matching)} of ${format(total)}` : total ? format(total) : "");
  setText("range", matching ? `${format(offset + 1)}–${format(offset + streams.length)} of ${format(matching)}` : "");
  $("previous").disabled = offset === 0;
  $("next").disabled = offset + PAGE_SIZE >= matching;
  $("pages").hidden = matching <= PAGE_SIZE;
  $("empty").hidden = total > 0;
  $("filters").hidden = total === 0;
  $("none").hidden = total === 0 || matching > 0;
  $("names").replaceChildren(...streams.map(stream => new Option(stream.name)));
}

async function turnPage(pages) {
  offset = Math.max(0, offset + pages * PAGE_SIZE);
  await refresh();
  announce(`streams ${$("range").textContent}`);
}

async function filter() {
  offset = 0;
  await refresh();
  announce(`${$("count").textContent} streams`);
}

let typing = null;
$("search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(filter, 250); });
for (const id of ["state", "order"]) $(id).addEventListener("change", filter);
$("filters").addEventListener("submit", event => { event.preventDefault(); filter(); });
$("previous").addEventListener("click", () => turnPage(-1));
$("next").addEventListener("click", () => turnPage(1));
$("clear").addEventListener("click", () => { $("search").value = $("state").value = ""; filter(); });
document.addEventListener("keydown", event => {
  if (event.key === "/" && !event.ctrlKey && !event.metaKey && !event.target.closest("input, select, textarea, dialog")) {
    event.preventDefault();
    $("search").focus();
  }
});

// ---- trying an image ----

let image = null;

async function classifyImage() {
  if (!image || !$("stream").reportValidity()) return;
  try {
    const query = `adapt=${$("adapt").checked}&compare=true`;
    const answer = await request(`streams/${$("stream").value}/image?${query}`, { method: "POST", body: image });
    showPrediction($("source"), answer.source, "");
    showPrediction($("adapted"), answer, answer.adapted ? "adapted" : answer.reason ?? "not adapted");
    $("error").textContent = "";
    await refresh();
  } catch (error) {
    $("error").textContent = error.message;
  }
}

function showPrediction(figure, prediction, remark) {
  figure.querySelector(".prediction").textContent = prediction.label ?? `class ${prediction.class}`;
  const confidence = `confidence ${formatPercent(prediction.confidence)}`;
  figure.querySelector(".score").textContent = remark ? `${confidence}; ${remark}` : confidence;
  figure.querySelector("rect").setAttribute("width", 100 * prediction.confidence);
}

function chooseImage(file) {
  if (!file) return;
  image = file;
  URL.revokeObjectURL($("preview").src);
  $("preview").src = URL.createObjectURL(file);
  $("preview").hidden = false;
  $("hint").textContent = file.name;
  classifyImage();
}

$("file").addEventListener("change", () => {
  chooseImage($("file").files[0]);
  $("file").value = "";  // or choosing the same file again would not be a change
});
$("stream").addEventListener("change", classifyImage);
for (const kind of ["dragover", "dragleave", "drop"])
  $("drop").addEventListener(kind, event => {
    event.preventDefault();
    $("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") chooseImage(event.dataTransfer.files[0]);
  });
$("address").textContent = location.origin;
(async () => {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise(resolve => setTimeout(resolve, 1000 * REFRESH_SECONDS));
  }
})();
