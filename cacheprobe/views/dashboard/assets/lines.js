// What the timeline shows: a page of the requests and a range of steps, how a reader turns to others, and where in the map.
(function () {
  "use strict";
  const MOST_LINES = 25;
  const place = (name) => document.getElementById(name);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  const MOST_STEPS = 240;  // of a zoomed timeline

  const range_of = (text) => text.split("-").map(Number);

  // Shows a range of steps in the timeline: that of `what`, or half or twice of it around the chosen step; without
  // either the page of steps as before.
  function zoom(at, what, facts) {
    const before = at.zoom;
    at.zoom = null;
    if (what.first === undefined) return;
    // a second press can come before the first one's steps are drawn
    let [first, last] = what.by && before ? range_of(before) : [what.first, what.last].map(Number);
    if (what.by) {
      const middle = first <= at.step && at.step <= last ? at.step : (first + last) / 2, count = last - first + 1;
      const wanted = Number(what.by) > 0 ? Math.ceil(count / 2) : count * 2;
      first = Math.round(middle - wanted / 2 + 0.5);
      last = first + wanted - 1;
    }
    at.zoom = inside(first, last, facts);
  }

  // A range of 2 to MOST_STEPS steps of the run.
  function inside(first, last, facts) {
    const total = facts.last - facts.first + 1, count = clamp(last - first + 1, Math.min(2, total), Math.min(MOST_STEPS, total));
    const from = clamp(first, facts.first, facts.last - count + 1);
    return `${from}-${from + count - 1}`;
  }

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

  window.cacheprobe = {...window.cacheprobe, lines: {frame, inside, neighbour, order, page, range_of, show, start, turn, zoom}};
})();
