// The live page: polls the streams and draws a card for each. No libraries, nothing from other servers.
"use strict";

const REFRESH_SECONDS = 2, MAX_CARDS = 60;
const $ = id => document.getElementById(id);
const tokens = { infer: "", admin: "" };  // in memory only
const cards = new Map();

// ---- requests ----

async function request(path, { method = "GET", body, scope = "infer" } = {}) {
  for (let retry = true; ; retry = false) {
    const token = tokens[scope] || tokens.admin || tokens.infer;
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const response = await fetch(path, { method, body, headers, cache: "no-store" });
    if (response.ok) return response.json();
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
  card.querySelector("h3").textContent = card.querySelector("h3").title = name;
  card.querySelector(".confidence").setAttribute("aria-label", "confidence over the last requests");
  card.querySelector(".collapse").setAttribute("aria-label", "collapse score over the last requests");
  for (const button of card.querySelectorAll("button"))
    button.addEventListener("click", () => act(name, button));
  card.querySelector("header").addEventListener("click", () => { $("stream").value = name; });
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

// The gain over the network without adaptation, such as "+6.2 ± 1.8 points"; streams without labels have none.
function formatGain(feedback) {
  if (!feedback || feedback.gain === null) return "";
  const points = (100 * feedback.gain).toFixed(1).replace("-", "−");
  const half = (50 * (feedback.high - feedback.low)).toFixed(1);
  return `adapting: ${feedback.gain < 0 ? "" : "+"}${points} ± ${half} points by ${feedback.num_labels} labels`;
}

// The same without labels, if the guard has an estimator.
function formatEstimate(health) {
  if ((health.estimated_gain ?? null) === null) return "";
  const points = (100 * health.estimated_gain).toFixed(1).replace("-", "−");
  const half = (50 * (health.estimated_gain_high - health.estimated_gain_low)).toFixed(1);
  return `adapting: ${health.estimated_gain < 0 ? "" : "+"}${points} ± ${half} points, estimated`;
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
  card.classList.toggle("alarm", isAlarmed(stream));

  const known = stream.confidences.filter(value => value !== null);
  const confidence = curvePath(stream.confidences, value => 54 - 52 * value);
  card.querySelector(".confidence .line").setAttribute("d", confidence);
  const hasArea = known.length === stream.confidences.length && known.length > 1;
  card.querySelector(".confidence .area").setAttribute("d", hasArea ? `${confidence}L240 56L0 56Z` : "");
  setText(".confidence-now", known.length ? formatPercent(known.at(-1)) : "–");
  const collapse = curvePath(stream.collapse_scores, value => 29 - 19 * Math.min(Math.max(value, 0), 1.5));
  card.querySelector(".collapse .line").setAttribute("d", collapse);
  setText(".collapse-now", stream.collapse_score === null ? "no guard" : stream.collapse_score.toFixed(2));

  setText(".updates", compact.format(stream.updates));
  setText(".images", compact.format(stream.images));
  setText(".skipped", compact.format(stream.skipped.not_finite + stream.skipped.budget));
  setText(".gain", formatGain(stream.feedback) || formatEstimate(stream.health));
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

async function refresh() {
  try {
    const { total, streams } = await request(`streams?limit=${MAX_CARDS}`);
    if (!$("stream").value) $("stream").value = streams[0]?.name ?? "default";  // the most recently used
    const names = new Set(streams.map(stream => stream.name));
    for (const [name, card] of cards) if (!names.has(name)) { card.remove(); cards.delete(name); }
    // By name, so that cards stay where they are while streams are used in turn.
    const compareNames = (one, other) => one.localeCompare(other, "en", { numeric: true });
    for (const stream of streams.sort((one, other) => compareNames(one.name, other.name))) {
      const card = showStream(stream);
      if (!card.isConnected) {
        const next = [...$("cards").children].find(other => compareNames(other.dataset.stream, stream.name) > 0);
        $("cards").insertBefore(card, next ?? null);
      }
    }
    showTotals(total, streams);
    $("connection").textContent = "";
  } catch (error) {
    $("connection").textContent = `Cannot load the streams: ${error.message}`;
  }
}

function showTotals(total, streams) {
  const sum = key => streams.reduce((subtotal, stream) => subtotal + stream[key], 0);
  const totals = {
    "in memory": streams.filter(stream => stream.live).length,
    alarms: streams.filter(isAlarmed).length,
    updates: compact.format(sum("updates")),
    images: compact.format(sum("images")),
    waiting: sum("waiting"),
  };
  $("totals").replaceChildren(...Object.entries(totals).map(([name, value]) => {
    const pair = document.createElement("div"), term = document.createElement("dt"), text = document.createElement("dd");
    [term.textContent, text.textContent] = [name, value];
    pair.append(term, text);
    return pair;
  }));
  $("count").textContent = total > streams.length ? `${streams.length} of ${total}, most recently used` : total || "";
  $("empty").hidden = total > 0;
  $("names").replaceChildren(...streams.map(stream => new Option(stream.name)));
}

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
