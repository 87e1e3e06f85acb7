// The lines of the timeline: which requests its page shows, how a reader turns to others, and where they are in the map.
(function () {
  "use strict";
  const MOST_LINES = 25;
  const place = (name) => document.getElementById(name);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  // Requests from the top of the timeline down.
  const order = (at, facts) => at.lost ? facts.by_losses : [...facts.requests.keys()];

  // [first, end] of the places that the page shows: the page that was turned to, else the one with the chosen request.
  function page(at, facts) {
    const count = facts.requests.length, chosen = clamp(at.top ?? order(at, facts).indexOf(at.request), 0, count - 1);
    const top = MOST_LINES * Math.floor(chosen / MOST_LINES);
    return [top, Math.min(top + MOST_LINES, count)];
  }

  // Turns so many pages on; nothing else is chosen.
  function turn(at, by, facts) {
    const last = MOST_LINES * Math.floor((facts.requests.length - 1) / MOST_LINES);
    at.top = clamp(page(at, facts)[0] + by * MOST_LINES, 0, last);
  }

  // The request so many lines or pages on, or the first or the last one.
  function neighbour(at, {by, pages, to}, facts) {
    const listed = order(at, facts), end = listed.length - 1, here = listed.indexOf(at.request);
    return listed[{first: 0, last: end}[to] ?? clamp(here + (pages ? pages * MOST_LINES : by), 0, end)];
  }

  function show(at, facts) {
    const count = facts ? facts.requests.length : 0, [top] = facts ? page(at, facts) : [0];
    const pages = Math.ceil(count / MOST_LINES), says = `page ${top / MOST_LINES + 1} of ${pages}`;
    place("timeline-map").hidden = place("timeline-lost").hidden = count < 2;
    place("timeline-lost").setAttribute("aria-pressed", !!at.lost);
    place("timeline-page").parentNode.hidden = pages < 2;
    if (place("timeline-page").textContent !== says) place("timeline-page").textContent = says;
    for (const button of document.querySelectorAll("#timeline-map [data-by]")) {
      button.disabled = button.dataset.by < 0 ? !top : top + MOST_LINES >= count;
    }
  }

  // The requests and steps of the timeline, framed in the map. first, last: steps.
  function frame(first, last) {
    const map = document.querySelector("#map-view svg"), said = place("timeline-view").dataset.answer;
    if (!map || !said) return;
    const {start, perPart} = map.dataset, {requests: [top, end]} = JSON.parse(said);
    const box = {x: (first - start) / perPart, width: (last + 1 - first) / perPart, y: top, height: end - top};
    for (const [name, value] of Object.entries(box)) map.querySelector(".shown").setAttribute(name, value);
  }

  // What a click on the map chooses: the request and the step there. shown: at, and the facts of the run.
  function chosen(map, {clientX, clientY}, [at, facts]) {
    const {left, top, width, height} = map.getBoundingClientRect(), box = map.viewBox.baseVal;
    const part = Math.floor(box.width * (clientX - left) / width), line = Math.floor(box.height * (clientY - top) / height);
    const request = order(at, facts)[clamp(line, 0, facts.requests.length - 1)];
    return {intent: "pick", request, step: Number(map.dataset.start) + part * map.dataset.perPart};
  }

  function start(change, shown) {
    place("map-view").addEventListener("click", (event) => {
      const map = event.target.closest("svg");
      if (map) change(chosen(map, event, shown()));
    });
  }

  window.cacheprobe = {...window.cacheprobe, lines: {frame, neighbour, order, page, show, start, turn}};
})();
