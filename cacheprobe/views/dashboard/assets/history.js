// Keeps the address, and the browser's Back and Forward: a choice adds an entry to the history, a small move changes the newest one.
(function () {
  "use strict";
  const SMALL = ["step", "layer", "position", "until", "theme", "follow", "find", "filter", "tokens", "turn"];
  let is_new = false;  // whether the next address is one to come back to

  // Notes what a reader does. Keys that repeat, typing, and a slider that is drawn along are small moves.
  function did({intent, name}) {
    is_new = !SMALL.includes(intent) && !(intent === "set" && ["step", "filter"].includes(name));
  }

  // Writes the address of the state. What follows from a choice, such as its position, changes the same entry.
  function write(at) {
    const {link} = window.cacheprobe, address = location.pathname + link(at);
    if (link(at) === location.search) return;
    if (is_new) history.pushState(null, "", address);
    else history.replaceState(null, "", address);
    is_new = false;
  }

  // Calls `go` with the state of the entry that Back or Forward leads to. Light or dark stays as it is.
  function start(at, go) {
    addEventListener("popstate", () => {
      const {theme, themed} = at, next = {...window.cacheprobe.parse(location.search), theme, themed};
      for (const name of Object.keys(at)) delete at[name];
      is_new = false;
      go(Object.assign(at, next));
    });
  }

  window.cacheprobe = {...window.cacheprobe, visits: {did, start, write}};
})();
