// The live page: asks for the streams every two seconds and draws a card for each. No library, nothing from elsewhere.
"use strict";

const SECONDS = 2, MOST_CARDS = 60;
const $ = id => document.getElementById(id);
const tokens = { read: "", admin: "" };  // of this page only; nothing is stored
const cards = new Map();

// ---- asking the service ----

async function ask(path, { method = "GET", body, scope = "read" } = {}) {
  for (let again = true; ; again = false) {
    const token = tokens[scope] || tokens.admin || tokens.read;
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const response = await fetch(path, { method, body, headers, cache: "no-store" });
    if (response.ok) return response.json();
    const { error = response.statusText } = await response.json().catch(() => ({}));
    if (again && (response.status === 401 || response.status === 403)) {
      const given = await askForToken(error);
      if (given) { tokens[scope] = given; continue; }
    }
    throw new Error(error);
  }
}

let asking = null;
function askForToken(why) {
  asking ??= new Promise(resolve => {
    $("why").textContent = why;
    $("token").value = "";
    $("ask").returnValue = "";
    $("ask").showModal();
    $("ask").addEventListener("close", () => {
      asking = null;
      resolve($("ask").returnValue === "ok" ? $("token").value.trim() : "");
    }, { once: true });
  });
  return asking;
}

// ---- cards ----

const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const percent = value => `${(100 * value).toFixed(1)} %`;

function ago(seconds) {
  if (seconds < 5) return "now";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.floor(seconds)} s`;
}

/** Points of a line over the whole width, with gaps where a value is missing. */
function lineOf(values, toHeight, width = 240) {
  let path = "", drawing = false;
  values.forEach((value, place) => {
    if (value === null) { drawing = false; return; }
    const x = values.length > 1 ? width * place / (values.length - 1) : width;
    path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${toHeight(value).toFixed(1)}`;
    drawing = true;
  });
  return path;
}

function newCard(name) {
  const card = $("card").content.firstElementChild.cloneNode(true);
  card.dataset.stream = name;
  card.querySelector("h3").textContent = card.querySelector("h3").title = name;
  card.querySelector(".confidence").setAttribute("aria-label", "confidence over the last requests");
  card.querySelector(".collapse").setAttribute("aria-label", "collapse signal over the last requests");
  for (const button of card.querySelectorAll("button"))
    button.addEventListener("click", () => act(name, button));
  card.querySelector("header").addEventListener("click", () => { $("stream").value = name; });
  return card;
}

async function act(name, button) {
  button.disabled = true;
  try {
    show(await ask(`streams/${name}/${button.dataset.action}`, { method: "POST", scope: "admin" }));
    $("problem").textContent = "";
  } catch (error) {
    $("problem").textContent = `${name}: ${error.message}`;
  }
  button.disabled = false;
}

function show(stream) {
  const card = cards.get(stream.name) ?? newCard(stream.name);
  cards.set(stream.name, card);
  const put = (selector, text) => {
    const element = card.querySelector(selector);
    if (element.textContent !== text) element.textContent = text;
  };
  const alarmed = stream.collapse_score !== null && stream.collapse_score >= 1;
  const [state, kind] = alarmed ? ["alarm", "alarm"] : stream.frozen ? ["frozen", "still"]
    : stream.live ? ["adapting", "good"] : ["on disk", "still"];
  put(".badge", state);
  card.querySelector(".badge").className = `badge ${kind}`;
  card.classList.toggle("alarm", alarmed);

  const known = stream.confidences.filter(value => value !== null);
  const confidence = lineOf(stream.confidences, value => 54 - 52 * value);
  card.querySelector(".confidence .line").setAttribute("d", confidence);
  const closed = known.length === stream.confidences.length && known.length > 1;
  card.querySelector(".confidence .area").setAttribute("d", closed ? `${confidence}L240 56L0 56Z` : "");
  put(".confidence-now", known.length ? percent(known.at(-1)) : "–");
  const collapse = lineOf(stream.collapse_scores, value => 29 - 19 * Math.min(Math.max(value, 0), 1.5));
  card.querySelector(".collapse .line").setAttribute("d", collapse);
  put(".collapse-now", stream.collapse_score === null ? "no guard" : stream.collapse_score.toFixed(2));

  put(".updates", short.format(stream.updates));
  put(".images", short.format(stream.images));
  put(".skipped", short.format(stream.skipped.not_finite + stream.skipped.budget));
  put(".used", ago(Date.now() / 1000 - stream.used_at));
  put(".number", `(${stream.events.length})`);
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
    const { total, streams } = await ask(`streams?limit=${MOST_CARDS}`);
    if (!$("stream").value) $("stream").value = streams[0]?.name ?? "default";  // the one used last
    const names = new Set(streams.map(stream => stream.name));
    for (const [name, card] of cards) if (!names.has(name)) { card.remove(); cards.delete(name); }
    // By name, so that cards keep their places while streams take turns.
    for (const stream of streams.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }))) {
      const card = show(stream);
      if (!card.isConnected) {
        const after = [...$("cards").children]
          .find(other => other.dataset.stream.localeCompare(stream.name, "en", { numeric: true }) > 0);
        $("cards").insertBefore(card, after ?? null);
      }
    }
    showTotals(total, streams);
    $("connection").textContent = "";
  } catch (error) {
    $("connection").textContent = `No answer: ${error.message}`;
  }
}

function showTotals(total, streams) {
  const alarms = streams.filter(stream => stream.collapse_score !== null && stream.collapse_score >= 1).length;
  const sum = key => streams.reduce((all, stream) => all + stream[key], 0);
  const figures = {
    "in memory": streams.filter(stream => stream.live).length, alarms,
    updates: short.format(sum("updates")), images: short.format(sum("images")), waiting: sum("waiting"),
  };
  $("totals").replaceChildren(...Object.entries(figures).map(([name, value]) => {
    const pair = document.createElement("div"), key = document.createElement("dt"), figure = document.createElement("dd");
    [key.textContent, figure.textContent] = [name, value];
    pair.append(key, figure);
    return pair;
  }));
  $("count").textContent = total > streams.length ? `${streams.length} of ${total}, used last` : total || "";
  $("empty").hidden = total > 0;
  $("names").replaceChildren(...streams.map(stream => new Option(stream.name)));
}

// ---- a picture to try ----

let picture = null;

async function tryPicture() {
  if (!picture || !$("stream").reportValidity()) return;
  try {
    const query = `adapt=${$("adapt").checked}&compare=true`;
    const answer = await ask(`streams/${$("stream").value}/image?${query}`, { method: "POST", body: picture });
    showGuess($("source"), answer.source, "");
    showGuess($("adapted"), answer, answer.adapted ? "adapted to it" : answer.reason ?? "only predicted");
    $("problem").textContent = "";
    await refresh();
  } catch (error) {
    $("problem").textContent = error.message;
  }
}

function showGuess(figure, guess, remark) {
  figure.querySelector(".guess").textContent = guess.label ?? `class ${guess.class}`;
  figure.querySelector(".sure").textContent = `${percent(guess.confidence)} sure${remark ? `; ${remark}` : ""}`;
  figure.querySelector("rect").setAttribute("width", 100 * guess.confidence);
}

function choose(file) {
  if (!file) return;
  picture = file;
  URL.revokeObjectURL($("preview").src);
  $("preview").src = URL.createObjectURL(file);
  $("preview").hidden = false;
  $("hint").textContent = file.name;
  tryPicture();
}

$("file").addEventListener("change", () => {
  choose($("file").files[0]);
  $("file").value = "";  // or choosing the same picture again would be no change
});
$("stream").addEventListener("change", tryPicture);
for (const kind of ["dragover", "dragleave", "drop"])
  $("drop").addEventListener(kind, event => {
    event.preventDefault();
    $("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") choose(event.dataTransfer.files[0]);
  });
$("address").textContent = location.origin;
(async () => {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise(resolve => setTimeout(resolve, 1000 * SECONDS));
  }
})();
