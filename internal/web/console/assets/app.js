// The console works without this script. The script adds: pages that follow live data, times as
// "5 min ago", questions before actions that can't be undone, and buttons that copy.
"use strict";

const body = document.body;

// Times.

const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

function ago(date) {
  const seconds = Math.round((Date.now() - date) / 1000);
  const size = Math.abs(seconds);
  for (const [length, unit] of units) {
    if (size >= length) {
      const text = Math.floor(size / length) + " " + unit;
      return seconds < 0 ? "in " + text : text + " ago";
    }
  }
  return "now";
}

// The reader chooses the zone: that of this machine, or UTC as the server writes times.
const local = document.documentElement.dataset.zone === "local";
const clock = { timeZone: local ? undefined : "UTC", timeZoneName: "short", hour12: false };
const whole = { ...clock, year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" };

// Times with the class clock stay times, and the text of those with the class said stays as it is. Labels of charts have the attribute data-time.
function showTimes(within) {
  for (const time of within.querySelectorAll("time[datetime]")) {
    const date = new Date(time.dateTime);
    if (Number.isNaN(date.getTime())) {
      continue;
    }
    const text = time.classList.contains("clock") ? date.toLocaleString("en-GB", whole) : time.classList.contains("said") ? time.textContent : ago(date);
    if (time.textContent !== text || time.classList.contains("said")) {
      time.textContent = text;
      time.title = date.toLocaleString("en-GB", whole);
    }
  }
  for (const label of local ? within.querySelectorAll("[data-time]") : []) {
    label.textContent = new Date(label.dataset.time).toLocaleTimeString("en-GB").slice(0, label.textContent.split(" ")[0].length);
  }
  for (const label of local ? within.querySelectorAll(".zone") : []) {
    label.textContent = "";
  }
}

// Live regions. What the reader does in a region survives its replacement: the text of inputs,
// ticked boxes and open details, all found again by their ids, and the focus (see selectorOf). While
// text in a region is selected, the region waits.

const pending = new Map(); // id of a region -> its newest HTML, which is not shown yet
const shown = new Map(); // id of a region -> the HTML that the server sent last

function selects(region) {
  const selection = document.getSelection();
  return selection && !selection.isCollapsed && region.contains(selection.anchorNode);
}

function replace(id, html) {
  const region = document.getElementById(id);
  if (!region || !("live" in region.dataset)) {
    return;
  }
  if (shown.get(id) === html) {
    pending.delete(id); // what waited is out of date: the server sends a region only when it changes
    return;
  }
  if (selects(region)) {
    pending.set(id, html);
    return;
  }
  pending.delete(id);
  shown.set(id, html);
  const focused = region.contains(document.activeElement) ? document.activeElement : null;
  const focusedSelector = focused && selectorOf(focused);
  const focusedIndex = focusedSelector ? [...region.querySelectorAll(focusedSelector)].indexOf(focused) : -1;
  const at = focused && "selectionStart" in focused ? [focused.selectionStart, focused.selectionEnd] : null;
  const ticked = ids(region, "input:checked");
  const open = ids(region, "details[open]");
  const values = [...region.querySelectorAll("input:not([type=checkbox]), select, textarea")]
    .filter((input) => input.id).map((input) => [input.id, input.value]);
  const scrolled = [...region.querySelectorAll(".scroll")].map((box) => box.scrollLeft);

  // The HTML comes from this server, which has escaped it. The policy of the page runs no scripts in
  // it.
  const template = document.createElement("template");
  template.innerHTML = html;
  region.replaceChildren(template.content);

  each(ticked, (box) => { box.checked = true; });
  each(open, (details) => { details.open = true; });
  values.forEach(([inputID, value]) => each([inputID], (input) => { input.value = value; }));
  region.querySelectorAll(".scroll").forEach((box, i) => { box.scrollLeft = scrolled[i] || 0; });
  const element = focusedSelector ? region.querySelectorAll(focusedSelector)[focusedIndex] : null;
  element?.focus({ preventScroll: true });
  if (element && at && at[0] !== null) {
    element.setSelectionRange(at[0], at[1]);
  }
  prepare(region);
}

// selectorOf returns a CSS selector that finds an element again in new HTML: by its id, the summary
// of details by their id, or a link by its address; "" if it has none of them.
function selectorOf(element) {
  const owner = element.matches("details[id] > summary") ? element.parentElement : element;
  if (owner.id) {
    return "#" + CSS.escape(owner.id) + (owner === element ? "" : " > summary");
  }
  const address = element.getAttribute("href");
  return address ? "[href=\"" + CSS.escape(address) + "\"]" : "";
}

function ids(region, selector) {
  return [...region.querySelectorAll(selector)].map((element) => element.id).filter(Boolean);
}

function each(list, change) {
  list.map((id) => document.getElementById(id)).filter(Boolean).forEach((element) => change(element));
}

document.addEventListener("selectionchange", () => {
  for (const [id, html] of [...pending]) {
    replace(id, html);
  }
});

let goodSince = new Date();

function showAway(away) {
  const strip = document.getElementById("away");
  if (away === "away" in body.dataset) {
    return;
  }
  if (away) {
    body.dataset.away = "";
    document.getElementById("as-of").textContent = "What you see is of " + goodSince.toLocaleTimeString() + ".";
  } else {
    delete body.dataset.away;
  }
  strip.hidden = !away;
}

// One stream follows the topic of the page. A hidden page closes it, because browsers open few
// connections to a host. Without a stream, the page is read again from time to time.

const events = new URL("../../events", document.currentScript.src).pathname; // below the prefix of a proxy
let stream = null;
let poll = null;
let polls = 0;

function connect() {
  stopFollowing();
  stream = new EventSource(events + "?topics=" + encodeURIComponent(body.dataset.topic));
  stream.addEventListener("regions", (event) => {
    const regions = JSON.parse(event.data);
    for (const id of Object.keys(regions)) {
      replace(id, regions[id]);
    }
    goodSince = new Date();
    showAway(false);
  });
  stream.addEventListener("away", () => showAway(true));
  stream.addEventListener("gone", () => location.reload());
  stream.addEventListener("error", () => {
    if (stream && stream.readyState === EventSource.CLOSED) { // refused: the browser does not try again
      stopFollowing();
      polls = 0;
      poll = setInterval(readPage, 5000);
    }
  });
}

function stopFollowing() {
  if (stream) {
    stream.close();
  }
  clearInterval(poll);
  stream = poll = null;
}

// The header says that no person has asked, so that an open page does not keep its session alive.
function fetchPage() {
  return fetch(location.href, { redirect: "manual", headers: { "X-Bulkaction-Poll": "1" } });
}

async function readPage() {
  try {
    const answer = await fetchPage();
    if (answer.type === "opaqueredirect" || answer.status === 404) {
      location.reload(); // the session is over, or the group is deleted
      return;
    }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if ("away" in page.body.dataset || answer.status >= 500) {
      showAway(true);
      return;
    }
    for (const region of page.querySelectorAll("[data-live]")) {
      replace(region.id, region.innerHTML);
    }
    goodSince = new Date();
    showAway(false);
  } catch {
    showAway(true);
    return;
  }
  if (++polls % 12 === 0) {
    connect();
  }
}

function follow() {
  if (document.hidden) {
    stopFollowing();
  } else if (!stream && !poll) {
    connect();
  }
}

if (body.dataset.topic) {
  document.addEventListener("visibilitychange", follow);
  addEventListener("pageshow", follow);
  addEventListener("pagehide", stopFollowing); // a page that is kept for the button Back has no stream
  follow();
}

// A page that could not be read is tried again.
async function tryAgain() {
  const answer = await fetchPage().catch(() => null);
  if (answer && answer.status < 500) { // a redirection to the login has the status 0
    location.reload();
    return;
  }
  setTimeout(tryAgain, 4000);
}

if (document.querySelector("[data-again]")) {
  setTimeout(tryAgain, 4000);
}

// Questions before actions.

let confirmed = null;

function question(button) {
  if (button.dataset.confirm) {
    const input = document.getElementById(button.dataset.confirmInput); // its value stands for %s
    return input ? button.dataset.confirm.replace("%s", () => input.value) : button.dataset.confirm;
  }
  if (button.dataset.confirmTicked) {
    const n = document.querySelectorAll("#bulk input[name=id]:checked").length;
    return n > 0 ? button.dataset.confirmTicked + " " + n + (n === 1 ? " group." : " groups.") : "";
  }
  return "";
}

document.addEventListener("submit", (event) => {
  const button = event.submitter;
  const text = button && button !== confirmed ? question(button) : "";
  confirmed = null;
  if (!text) {
    return;
  }
  event.preventDefault();
  const dialog = document.getElementById("confirm");
  const form = event.target;
  document.getElementById("confirm-text").textContent = text;
  document.getElementById("confirm-yes").textContent = button.textContent;
  document.getElementById("confirm-yes").className = button.classList.contains("danger") ? "danger" : "primary";
  dialog.returnValue = "";
  dialog.onclose = () => {
    const same = document.getElementById(button.id) || button; // a live region may have replaced it
    same.focus();
    if (dialog.returnValue === "yes") {
      confirmed = same.isConnected ? same : button;
      (confirmed.form || form).requestSubmit(confirmed);
    }
  };
  dialog.showModal();
});

// Copying, and the number of ticked rows.

document.addEventListener("click", async (event) => {
  const button = event.target.closest(".copy");
  if (button) {
    const from = button.dataset.copyFrom; // of a text that must not be in the page twice
    await navigator.clipboard.writeText(from ? document.getElementById(from).textContent : button.dataset.copy);
    const label = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  }
});

function showTicked() {
  const label = document.getElementById("ticked");
  if (label) {
    const n = document.querySelectorAll("#bulk input[name=id]:checked").length;
    label.textContent = "Ticked groups: " + n;
    document.querySelectorAll("#bulk [name=command]").forEach((button) => { button.disabled = n === 0; });
  }
}

document.addEventListener("change", showTicked);

function prepare(within) {
  showTimes(within);
  showTicked();
  if (navigator.clipboard) { // absent on plain http beyond this machine
    for (const button of within.querySelectorAll(".copy")) {
      button.hidden = false;
    }
  }
}

prepare(document);
setInterval(() => showTimes(document), 5000);
