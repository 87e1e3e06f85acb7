// Zooms the timeline: a drag over its steps, or over the strip of the whole run, shows these; a double click shows the steps as before.
(function () {
  "use strict";
  const LEAST = 5;  // pixels of a drag; less is a click
  const place = (name) => document.getElementById(name);
  const PICTURE = "#timeline-view svg[data-first]", STRIP = "#overview-view svg";
  let change = null, drag = null;

  // Steps under two places across the timeline or the strip.
  function steps_of(svg, from, to) {
    const {left, width} = svg.getBoundingClientRect(), ends = [Math.min(from, to), Math.max(from, to)];
    if (svg.matches(STRIP)) {
      const [first, , count] = svg.getAttribute("viewBox").split(" ").map(Number);
      return ends.map((x) => Math.floor(first + count * Math.min(Math.max((x - left) / width, 0), 0.999999)));
    }
    const {first, last, pitch, left: margin} = svg.dataset, scale = svg.viewBox.baseVal.width / width;
    return ends.map((x) => Number(first) + Math.floor(((x - left) * scale - margin) / pitch))
      .map((step) => Math.min(Math.max(step, Number(first)), Number(last)));
  }

  function mark(svg, from, to) {
    const {top, height} = svg.getBoundingClientRect(), box = place("zoom-mark");
    Object.assign(box.style, {left: Math.min(from, to) + "px", width: Math.abs(to - from) + "px", top: top + "px", height: height + "px"});
    box.hidden = false;
  }

  function end() {
    drag = null;
    place("zoom-mark").hidden = true;
  }

  // The steps that are drawn, {first, last}; null without a timeline.
  function shown() {
    const svg = document.querySelector(PICTURE);
    return svg && {first: svg.dataset.first, last: svg.dataset.last};
  }

  function start(changes) {
    change = changes;
    let was_drag = false;
    document.addEventListener("pointerdown", (event) => {
      const svg = event.target.closest(`${PICTURE},${STRIP}`);
      was_drag = false;
      if (svg && event.button === 0 && event.pointerType !== "touch") drag = {svg, from: event.clientX};
    });
    document.addEventListener("pointermove", (event) => {
      if (!drag || Math.abs(event.clientX - drag.from) < LEAST) return;
      event.preventDefault();
      getSelection().removeAllRanges();
      was_drag = true;
      mark(drag.svg, drag.from, event.clientX);
    });
    document.addEventListener("pointerup", (event) => {
      if (!drag) return;
      const {svg, from} = drag, [first, last] = steps_of(svg, from, event.clientX);
      end();
      if (was_drag) change({intent: "zoom", first, last});
      else if (svg.matches(STRIP)) change({intent: "set", name: "step", value: first});
    });
    document.addEventListener("pointercancel", end);
    addEventListener("click", (event) => {  // a drag ends with one, which chooses nothing
      if (was_drag) event.stopPropagation();
      was_drag = false;
    }, true);
    place("timeline-view").addEventListener("dblclick", () => change({intent: "zoom"}));
    document.addEventListener("click", ({target}) => {
      const button = target.closest("[data-zoom]");
      if (button) by(Number(button.dataset.zoom));
    });
  }

  // Zooms in (1), out (-1), or leaves the zoom (0). Returns whether there is a timeline.
  function by(direction) {
    const steps = shown();
    if (steps) change({intent: "zoom", ...(direction ? {...steps, by: direction} : {})});
    return !!steps;
  }

  window.cacheprobe = {...window.cacheprobe, zoom: {by, start}};
})();
