// The page's keys. The dialog that "?" shows lists what each does, and the words that not every reader knows.
(function () {
  "use strict";
  const place = (name) => document.getElementById(name);
  const TYPES = "input:not(.dash-dropdown-focus-target),textarea,select,[role=listbox],[role=option],[role=menu]";
  const SLIDES = "[role=slider]";  // takes arrows, Home and End
  const LINES = ":is(#rejected-view, #tokens-view) tr[data-intent]", GRID = "#grid-view svg.readings",
    TIMELINE = "#timeline-view svg[data-first]";
  const ARROWS = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1]};
  const KEYS = [
    ["← →", "one step back, one step on"],
    ["n, p", "next, previous rejected draft, in the order of their list"],
    ["Enter", "in a list: open the token"],
    ["↑ ↓", "in a list: the line above, the line below"],
    ["/", "search all tokens of the overview, or the rejected drafts"],
    ["g", "go to the lens grid"],
    ["m", "pin the chosen token, or write a note on it or its request; Ctrl Enter saves it"],
    ["← → ↑ ↓", "in the lens grid: another row, another layer"],
    ["t", "go to the timeline"],
    ["↑ ↓ PageUp PageDown", "in the timeline: the request above or below, or a page away; Home, End: the first, the last"],
    ["+, -, 0", "zoom the timeline in, out, back; or drag over its steps"],
    ["Home, End", "first, last token of the request; in the list: first, last line"],
    ["Tab, Enter", "reach a button or a menu, and press it"],
    ["?", "show or hide this list"],
  ];
  const WORDS = [
    ["S, T, C", "residual stream, attention output, MLP output of a layer"],
    ["row", "one token that one pass read: every layer has states of it, and predicts the next token"],
    ["accepted, rejected", "what the verifying pass said of a drafted token"],
    ["rolled back", "removed again: a rejected draft, and the drafts behind it"],
    ["recovered, bonus", "the verifier's own token: in place of a rejected draft, or after a wholly accepted one"],
    ["superseded", "computed for a draft, and computed again by the pass that verified it"],
    ["prediction depth", "first layer from which the first choice stays the last layer's"],
    ["margin", "log-probability of the committed token minus that of the drafted one, in nats, in the last layer"],
    ["strip under the slider", "all steps, one after the other: up and green accepted, down and red rolled back"],
    ["map under the timeline", "all requests and steps: full accepted, strong rolled back, faint other passes; framed, what the timeline shows"],
    ["T₀, T₁′, T₁", "newest committed token, first drafted token, the verifier's own token there"],
  ];
  const LISTS = {rejected: "rejected-search", overview: "tokens-search"};  // by tab: the search box of its list
  let change = null, current = null, searches = false;

  const lines_of = (view) => [...view.querySelectorAll("tr[data-intent]")];

  // Focuses the search box as soon as the list is drawn.
  function search() {
    searches = true;
    if (!LISTS[current().tab]) change({intent: "tab", tab: "rejected"});
    focus_search();
  }

  function focus_search() {
    const box = place(LISTS[current().tab]);
    if (!LISTS[current().tab]) searches = false;
    if (!searches || !box || !box.checkVisibility()) return;
    searches = false;
    box.focus();
    box.select();
  }

  function help() {
    const dialog = place("keys");
    if (dialog.open) dialog.close();
    else {
      dialog.showModal();
      dialog.scrollTop = 0;  // the focus is on its last line
    }
  }

  // Focuses the chosen line of the list, or its first one. Returns whether the key is one that leads there.
  function to_list(key) {
    if (current().tab !== "rejected" || !["ArrowUp", "ArrowDown"].includes(key)) return false;
    const lines = lines_of(place("rejected-view")), line = lines.find((one) => one.matches(".chosen")) || lines[0];
    if (line) line.focus();
    return !!line;
  }

  // Moves the focus among the lines of the list. Returns whether the key is one of the list's.
  function in_list(line, key) {
    const lines = lines_of(line.closest("[id$=-view]")), here = lines.indexOf(line);
    const to = {ArrowUp: here - 1, ArrowDown: here + 1, Home: 0, End: lines.length - 1}[key];
    if (key === "Enter") change({...line.dataset});
    else if (to === undefined) return false;
    else if (lines[to]) lines[to].focus();
    else if (to < 0) place(LISTS[current().tab]).focus();
    return true;
  }

  // Moves the chosen cell of the lens grid: across the rows that are drawn, on to the next page, or to another layer.
  function in_grid(grid, [across, up]) {
    if (up) change({intent: "layer", by: up});
    if (!across) return;
    const {position, row} = current(), columns = [...grid.querySelectorAll(".column")];
    const is_chosen = ({dataset}) => row === null || row === undefined
      ? Number(dataset.position) === position : Number(dataset.row) === row;
    const here = columns.findIndex(is_chosen), next = here < 0 ? null : columns[here + across];
    if (!next) {
      change({intent: "position", by: across});
      return;
    }
    change({...next.dataset, intent: "pick"});
    const scroll = grid.closest(".scroll"), [{left, right}, box] = [next, scroll].map((one) => one.getBoundingClientRect());
    if (left < box.left || right > box.right) scroll.scrollLeft += left - box.left - box.width / 2;
  }

  // Chooses another request of the timeline. Returns whether the key is one that does.
  function in_timeline_lines(key) {
    const to = {Home: "first", End: "last"}[key], by = {ArrowUp: -1, ArrowDown: 1}[key], pages = {PageUp: -1, PageDown: 1}[key];
    if (to || by || pages) change({intent: "neighbour", to, by, pages});
    return !!(to || by || pages);
  }

  // Focuses a picture of the replay. card: the name of its card.
  function go_to(picture, card) {
    const found = document.querySelector(picture);
    if (current().tab !== "replay") change({intent: "tab", tab: "replay"});
    if (!found) return;
    found.focus({preventScroll: true});
    place(card).scrollIntoView({block: "start"});
  }

  function note() {
    if (["overview", "replay", "rejected"].includes(current().tab)) window.cacheprobe.notes.open();
  }

  // Keys that do the same wherever the focus is. Returns whether the key is one of them.
  function anywhere(key) {
    const acts = {n: () => change({intent: "walk", by: 1}), p: () => change({intent: "walk", by: -1}), "/": search,
      "?": help, g: () => go_to(GRID, "lens-card"), t: () => go_to(TIMELINE, "timeline-card"), m: note};
    if (acts[key]) acts[key]();
    return !!acts[key];
  }

  // Keys that zoom the timeline, where it is shown. Returns whether the key is one of them.
  function in_timeline(key) {
    const by = {"+": 1, "-": -1, 0: 0}[key];
    return by !== undefined && current().tab === "replay" && window.cacheprobe.zoom.by(by);
  }

  // Keys that move the step or the chosen token, where these are shown. Returns whether the key is one of them.
  function in_request(key, is_shifted) {
    if (is_shifted || place("transport").hidden) return false;
    const to = {Home: "first", End: "last"}[key], by = (ARROWS[key] || [0])[0];
    if (to) change({intent: "position", to});
    else if (by) change({intent: "step", by});
    return !!(to || by);
  }

  function takes(event) {
    const {key, target, shiftKey} = event, line = target.closest(LINES), grid = target.closest(GRID);
    if (target.id === LISTS[current().tab] && ["Enter", "ArrowDown"].includes(key)) {
      const [first] = lines_of(target.closest("[id$=-view]"));
      if (first) first.focus();
      return true;
    }
    if (target.closest(TYPES)) return false;
    if (place("exports").open || place("note").open) return false;
    if (place("keys").open) return key === "?" && anywhere(key);
    if (line && in_list(line, key)) return true;
    if (grid && ARROWS[key] && !shiftKey) {
      in_grid(grid, ARROWS[key]);
      return true;
    }
    if (target.closest(TIMELINE) && !shiftKey && in_timeline_lines(key)) return true;
    return anywhere(key) || in_timeline(key) || to_list(key) || (!target.closest(SLIDES) && in_request(key, shiftKey));
  }

  // {name, value} of a filter: the value of a menu, or LOW:HIGH of two boxes. kind: of the filter's data-attribute.
  function filter_of(box, kind) {
    const [name, end] = box.dataset[kind].split(" ");
    if (!end) return {name, value: box.value};
    const ends = [0, 1].map((i) => document.querySelector(`[data-${kind}="${name} ${i}"]`).value.trim());
    return {name, value: ends.join(":")};
  }

  function list_keys() {
    const element = (name, ...content) => {
      const made = document.createElement(name);
      made.append(...content);
      return made;
    };
    const table = (lines, name) => element("table", element("tbody", ...lines.map(([first, what]) =>
      element("tr", element("th", element(name, first)), element("td", what)))));
    const close = element("button", "Close");
    close.className = "plain";
    place("keys").replaceChildren(element("h2", "Keys"), table(KEYS, "kbd"), element("h2", "Words"), table(WORDS, "b"), close);
  }

  function start(changes, at) {
    [change, current] = [changes, at];
    list_keys();
    document.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.isComposing) return;
      if (takes(event)) event.preventDefault();
    });
    document.addEventListener("input", ({target}) => {
      if (target.id === "rejected-search") change({intent: "find", find: target.value});
      if (target.dataset.filter) change({intent: "filter", ...filter_of(target, "filter")});
      if (target.dataset.tokens) change({intent: "tokens", ...filter_of(target, "tokens")});
      if (target.id === "result-filter") change({intent: "set", name: "filter", value: target.value || null});
    });
    place("keys-open").addEventListener("click", help);
    place("keys").addEventListener("click", ({target}) => { if (target.matches("button,dialog")) place("keys").close(); });
    for (const view of ["rejected-view", "tokens-view"]) {
      new MutationObserver(focus_search).observe(place(view), {childList: true, subtree: true});
    }
  }

  window.cacheprobe = {...window.cacheprobe, keys: {start}};
})();
