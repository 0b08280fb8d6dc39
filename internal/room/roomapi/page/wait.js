// The waiting page: it follows the visitor's stream of events, shows the place in the queue, and
// goes on to return_url with the token when it is the visitor's turn. Without EventSource, or when
// a proxy does not let streams pass, it polls.
(() => {
  "use strict";
  const room = document.getElementById("room");
  const byID = (id) => document.getElementById(id);
  const { event: eventName, page, stream, ticket, token } = room.dataset;
  const lang = document.documentElement.lang;
  const announceEvery = 30000; // ms between two positions that a screen reader speaks
  const pollFor = 60000; // ms until a page that polls tries the stream again
  let announced = 0;
  let source = null;
  let going = false;

  const later = (f, ms) => setTimeout(f, ms);

  const speak = (text) => {
    announced = Date.now();
    byID("live").textContent = text;
  };

  // show shows a view with one of the messages of the page.
  const show = (view, key = view) => {
    const message = byID("messages").content.querySelector(`[data-key="${CSS.escape(key)}"]`);
    if (!message || room.dataset.view === view) return;
    room.dataset.view = view;
    byID("headline").textContent = message.children[0].textContent;
    byID("detail").textContent = message.children[1].textContent;
    byID("place").hidden = view !== "waiting";
    byID("leave").hidden = !["waiting", "admitted"].includes(view);
    byID("goon").hidden = view !== "admitted" || !byID("goon").getAttribute("href");
    byID("again").hidden = !["left", "gone", "removed", "replaced"].includes(view);
    if (view !== "waiting") byID("paused").hidden = true;
    document.title = `${message.children[0].textContent} · ${eventName}`;
    speak(`${message.children[0].textContent}. ${message.children[1].textContent}`);
  };

  const number = (n) => (n === null || n === undefined ? "–" : n.toLocaleString(lang));

  const eta = (seconds) => {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 60) return room.dataset.soon;
    return room.dataset.minutes.replace("%d", number(Math.ceil(seconds / 60)));
  };

  const showPlace = (place) => {
    show("waiting");
    byID("position").textContent = number(place.position);
    byID("total").textContent = number(place.total);
    byID("eta").textContent = eta(place.eta_seconds);
    if (place.position) {
      document.title = `${number(place.position)} · ${byID("headline").textContent} · ${eventName}`;
      if (Date.now() - announced > announceEvery) {
        speak(`${byID("position").previousElementSibling.textContent}: ${number(place.position)}`);
      }
    }
  };

  // admitted fetches the token as a cookie of the service behind the room, and goes there.
  const admitted = async (returnURL) => {
    if (going) return;
    going = true;
    show("admitted", returnURL ? "admitted" : "no_link");
    try {
      const answer = await fetch(token, { method: "POST" });
      if (answer.ok) {
        // "Back" in the shop leads to where the visitor came from, not to the waiting page.
        if (returnURL) location.replace(returnURL);
        return;
      }
      if (answer.status < 500 && answer.status !== 429) {
        location.replace(page); // the turn is over: the page tells why
        return;
      }
    } catch {
      // The network is away.
    }
    going = false;
    later(() => admitted(returnURL), 2000);
  };

  const ended = (reason) => {
    if (source) source.close();
    show(reason);
  };

  // poll asks for the place without a stream. After a while it tries the stream again.
  const poll = async (until) => {
    let wait = 5000;
    try {
      const answer = await fetch(ticket, { method: "POST" });
      if (answer.ok) {
        const t = await answer.json();
        if (t.state !== "IN_ENTRY") {
          location.replace(page); // the answer goes on to return_url
          return;
        }
        showPlace(t);
        if (window.EventSource && Date.now() > until) {
          follow();
          return;
        }
        wait = t.poll_after_ms;
      } else if (answer.status === 410) {
        return ended("sold_out");
      } else if (answer.status === 409) {
        return ended("closed");
      } else if (answer.status === 404) {
        return ended("unknown_event");
      } else {
        show("later");
        wait = 1000 * (Number(answer.headers.get("Retry-After")) || 5);
      }
    } catch {
      show("later");
    }
    later(() => poll(until), wait);
  };
  const pollForAWhile = () => poll(Date.now() + pollFor);

  const follow = () => {
    if (!window.EventSource) {
      pollForAWhile();
      return;
    }
    source = new EventSource(stream);
    const on = (name, f) => source.addEventListener(name, (e) => f(JSON.parse(e.data)));
    on("state", (s) => {
      if (s.state === "IN_ENTRY") {
        going = false;
        show("waiting");
      }
      byID("paused").hidden = s.mode !== "paused";
    });
    on("position", showPlace);
    on("admitted", (a) => admitted(a.return_url));
    on("ended", (e) => ended(e.reason));
    on("reconnect", () => {
      if (room.dataset.view === "start") show("later");
    });
    source.onerror = () => {
      // The browser connects again by itself, unless the answer was final.
      const final = ["left", "replaced", "closed", "sold_out", "removed", "gone"].includes(room.dataset.view);
      if (source.readyState === EventSource.CLOSED && !going && !final) pollForAWhile();
    };
  };

  const begin = () => {
    switch (room.dataset.view) {
      case "waiting":
      case "start":
        follow();
        break;
      case "admitted": // the visitor decides when to go on; the stream tells when the turn is over
        going = true;
        follow();
        break;
      case "later":
        later(() => location.assign(page), 1000 * (Number(room.dataset.refresh) || 5));
    }
  };

  // The stream must not enter a visitor again who leaves.
  byID("leave").addEventListener("submit", () => {
    going = true;
    if (source) source.close();
  });
  // A page that is loaded in advance must not enter its visitor.
  if (document.prerendering) document.addEventListener("prerenderingchange", begin, { once: true });
  else begin();
  // A page that the browser kept shows an old place.
  addEventListener("pageshow", (e) => {
    if (e.persisted) location.reload();
  });
})();
