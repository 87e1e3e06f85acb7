// Says what the server computes, wherever the page is scrolled to, if it takes longer than a moment.
(function () {
  "use strict";
  const PATIENCE = 300;  // milliseconds
  const NAMES = {facts: "run", story: "request", walk: "next rejected draft", grid: "layers", card: "token",
    decode: "tokens", tokens: "table of tokens", summary: "overview", insight: "sentence", overview: "strip of the run", map: "map of the run", gave: "logit"};
  let timer = null, computed = [];

  function show() {
    const box = document.getElementById("busy"), some = computed.slice(0, 3).map((name) => NAMES[name] || name);
    const more = computed.length > some.length ? `, and ${computed.length - some.length} more` : "";
    box.textContent = computed.length ? `computing: ${some.join(", ")}${more} …` : "";
    box.hidden = !computed.length;
  }

  // names: of the views that are not answered yet.
  function busy(names) {
    computed = names;
    if (!names.length) {
      clearTimeout(timer);
      timer = null;
      show();
    } else if (timer === null) timer = setTimeout(show, PATIENCE);
    else if (!document.getElementById("busy").hidden) show();
  }

  window.cacheprobe = {...window.cacheprobe, busy};
})();
