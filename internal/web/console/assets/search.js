// The search field: "/" goes to it, what is typed is looked up, and the arrows choose among what was
// found. Without this script the field is a plain form.
"use strict";

const search = document.getElementById("search");
const suggested = document.getElementById("suggested");
let typing = null;
let asking = null; // the request that has not been answered

async function suggest() {
  const text = search.q.value.trim();
  const parameters = new URLSearchParams(new FormData(search));
  parameters.set("typed", "");
  asking?.abort();
  asking = new AbortController();
  const answer = text && await fetch(search.action + "?" + parameters, { signal: asking.signal }).catch(() => null);
  if (search.q.value.trim() !== text || document.activeElement !== search.q) {
    return; // more was typed
  }
  const page = answer && answer.ok && new DOMParser().parseFromString(await answer.text(), "text/html");
  const found = page && page.getElementById("found");
  suggested.hidden = !found;
  if (found) {
    found.classList.remove("card");
    found.removeAttribute("id");
    suggested.replaceChildren(found);
  }
}

if (search) {
  search.q.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(suggest, 200);
  });
  search.addEventListener("submit", () => clearTimeout(typing));
  search.addEventListener("focusout", (event) => {
    suggested.hidden = suggested.hidden || !search.contains(event.relatedTarget);
  });
  document.addEventListener("keydown", (event) => {
    const inSearch = search.contains(document.activeElement);
    if (event.key === "/" && !event.ctrlKey && !event.metaKey && !document.activeElement.matches("input, textarea, select")) {
      event.preventDefault(); // Firefox would search in the page
      document.addEventListener("keyup", () => search.q.select(), { once: true });
    } else if (event.key === "Escape" && inSearch) {
      suggested.hidden = true;
      search.q.focus();
    } else if (inSearch && !suggested.hidden && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      event.preventDefault();
      const stops = [search.q, ...suggested.querySelectorAll("a")];
      const next = stops.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1);
      stops[(next + stops.length) % stops.length].focus();
    }
  });
}
