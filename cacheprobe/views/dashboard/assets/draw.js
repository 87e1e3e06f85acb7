// What the state looks like: markup put in its place, frames moved, the link kept; keys and clicks heard.
(function () {
  "use strict";
  const place = (name) => document.getElementById(name);
  const CARDS = {grid: "lens", gave: "card"};
  const TOLD = "grid text cache timeline decode window".split(" ").map((name) => name + "-view");  // hover texts at once
  const LISTED = JSON.parse(document.body.dataset.listed);
  let current = null, playing = null, change = null;

  // Pixels for the picture of a card. Before Dash has drawn the page they follow from the rules of page.css, so that the
  // first questions need not wait for it; a wrong guess is asked again.
  const width = (name, layers) => {
    const card = place(name + "-card");
    if (card) return card.clientWidth - 36;
    const page = document.documentElement.clientWidth, main = Math.min(page, 1480) - (page > 640 ? 48 : 28);
    const is_narrow = page > 1100 && (name === "lens" || (name === "timeline" && layers <= FEW_LAYERS));
    return main - (is_narrow ? 372 + 16 : 0) - 2 - 36;
  };

  // A lens grid of few layers is low: the timeline then stands below it, beside the card and the cache.
  const FEW_LAYERS = 36;

  function arrange({layers}) {
    const grid = document.querySelector("#panel-replay > .grid"), card = place("timeline-card");
    const is_beside = layers.length <= FEW_LAYERS && document.documentElement.clientWidth > 1100;
    if (is_beside === (card.parentNode === grid.firstElementChild)) return;
    if (is_beside) grid.firstElementChild.append(card);
    else grid.after(card);
  }

  const drawn = {};  // by id of its place: the server's markup {html, content}; content is parsed when it is first needed

  // Makes `live` what the newer markup says, and touches only what differs from the markup before: what is scrolled to,
  // hovered or marked stays as it is. before, after: the two markups of `live`.
  function mend(live, before, after) {
    if (before.isEqualNode(after)) return;
    if (before.nodeName !== after.nodeName) {
      live.replaceWith(after.cloneNode(true));
      return;
    }
    if (after.nodeType === Node.TEXT_NODE) {
      let same = 0;  // characters at the beginning; a mark in these stays
      while (same < before.length && before.data[same] === after.data[same]) same++;
      live.replaceData(same, before.length - same, after.data.slice(same));
      return;
    }
    for (const {name, value} of after.attributes || []) {
      if (before.getAttribute(name) !== value) live.setAttribute(name, value);
    }
    for (const {name} of before.attributes || []) if (!after.hasAttribute(name)) live.removeAttribute(name);
    mend_children(live, before, after);
  }

  // Children that stay are kept in their order; between them one that differs is mended, inserted or removed.
  function mend_children(live, before, after) {
    const [lives, olds, news] = [live, before, after].map((node) => [...node.childNodes]);
    const is_kept = (old, node) => old.isEqualNode(node);
    while (olds.length && news.length && is_kept(olds.at(-1), news.at(-1))) [olds, news].forEach((nodes) => nodes.pop());
    let next = 0;
    news.forEach((node, i) => {
      const same = olds.findIndex((old, k) => k >= next && is_kept(old, node));
      const is_new = next === olds.length || olds[next].nodeName !== node.nodeName;
      if (same >= 0) {
        lives.slice(next, same).forEach((one) => one.remove());
        next = same + 1;
      } else if (is_new || news.some((later, k) => k > i && is_kept(olds[next], later))) {
        live.insertBefore(node.cloneNode(true), lives[next] || null);
      } else mend(lives[next], olds[next++], node);
    });
    lives.slice(next, olds.length).forEach((one) => one.remove());
  }

  // Markup comes from the server, which escapes every text of a run.
  function answer(name, question, {html, graphs, more}) {
    const view = place(name + "-view");
    put(view, html);
    view.dataset.answer = JSON.stringify(question);
    const figure = place(name + "-place");
    if (figure) {
      figure.hidden = !graphs;
      if (graphs) window.dash_clientside.set_props(name + "-place", {children: graphs});
      put(place(name + "-more"), more || "");
    }
    if (current && FRAMES[name]) FRAMES[name](current);
  }

  function put(view, html) {
    const before = drawn[view.id], parsed = (text) => {
      const {content} = Object.assign(document.createElement("template"), {innerHTML: text});
      if (TOLD.includes(view.id)) content.querySelectorAll("svg g > title").forEach((title) => {
        title.parentNode.dataset.says = title.textContent;
        title.remove();
      });
      return content;
    };
    if (before?.html === html) return;
    const after = before && parsed(html);
    if (before) mend(view, before.content || parsed(before.html), after);
    else view.replaceChildren(parsed(html));
    drawn[view.id] = {html, content: after};
  }

  function waiting(names, at) {
    window.cacheprobe.busy(names);
    const cards = new Set(names.map((name) => (CARDS[name] || name) + "-card"));
    document.querySelectorAll(".card[id]").forEach((card) => card.classList.toggle("asking", cards.has(card.id)));
    for (const name of ["grid", "card"]) {  // numbers of another lens or site are not shown below the chosen one
      const view = place(name + "-view"), {lens, site} = view.dataset.answer ? JSON.parse(view.dataset.answer) : at;
      view.classList.toggle("other-lens", names.includes(name) && (lens !== at.lens || site !== at.site));
    }
    place("gave-box").hidden = !at.gave || names.includes("gave");
    document.querySelector('[data-intent="gave"]').setAttribute("aria-busy", !!at.gave && names.includes("gave"));
  }

  function write(id, text) {
    if (place(id).textContent !== text) place(id).textContent = text;
  }

  // How far a run is that is recorded meanwhile.
  function growth(at, now) {
    const box = place("growth"), follow = box.querySelector("button");
    box.hidden = !now;
    if (!now) return;
    box.dataset.state = now.state;
    write("growth-says", now.says);
    write("growth-command", now.command);
    place("growth-share").style.width = 100 * now.share + "%";
    follow.hidden = now.state !== "growing";
    follow.setAttribute("aria-pressed", !!at.follow);
  }

  function state(at, facts, story, trouble, grown) {
    const {SHELVED, visits, mine, known, absent} = window.cacheprobe, empty = absent(facts);
    current = at;
    if (document.documentElement.dataset.theme !== at.theme) document.documentElement.dataset.theme = at.theme;
    visits.write(at);
    const panel = "panel-" + (SHELVED.includes(at.tab) ? "results" : at.tab);
    document.querySelectorAll(".tab").forEach((tab) => {
      tab.setAttribute("aria-selected", tab.dataset.tab === at.tab);
      tab.hidden = tab.dataset.tab in empty && tab.dataset.tab !== at.tab;
    });
    document.querySelectorAll(".tabpanel").forEach((one) => { one.hidden = one.id !== panel; });
    document.querySelectorAll("[data-kind]").forEach((one) => { one.hidden = one.dataset.kind !== at.tab; });
    document.querySelectorAll("#result-list button").forEach((button) =>
      button.classList.toggle("chosen", Number(button.dataset.result) === at.result));
    const stepless = ["overview", "compare", "rejected", ...SHELVED];  // tabs where nothing has a step
    place("transport").hidden = stepless.includes(at.tab);
    place("jumps").hidden = at.tab !== "replay";
    place("insight-view").hidden = at.tab !== "replay";  // it is of the token chosen there
    place("result-card").hidden = at.result === null || at.result === undefined;
    const said = [...at.said, trouble, facts?.run === at.run && facts.error, story?.run === at.run && story.error];
    notice(said.filter(Boolean));
    if (mine(at, facts)) {
      write("says", facts.says);
      arrange(facts);
      place("page").dataset.last = facts.last;
      const why = place("lens-why");
      why.hidden = !facts.why_not;
      why.textContent = facts.why_not ? `Only what was recorded can be shown: ${facts.why_not}.` : "";
    }
    if (mine(at, facts) && known(at, story)) {
      now(at, facts, story);
      window.cacheprobe.flip.state(at);
    }
    Object.values(FRAMES).forEach((frame) => frame(at));
    window.cacheprobe.lines.show(at, mine(at, facts) ? facts : null);
    place("timeline-whole").hidden = !at.zoom;
    const is_read_now = at.lens !== "recorded" && mine(at, facts) && facts.has_readings;
    place("text-lens").hidden = !is_read_now;  // the text is coloured by what was recorded
    if (is_read_now) write("text-lens", `The numbers in the text are those of the run: ${facts.lenses[0].label}, of ${LISTED.sites.S}.`);
    growth(at, grown);
    place("page").dataset.at = JSON.stringify(at);
    const tabs = `${at.tab} ${innerWidth} ${Object.keys(empty)}`;
    if (tabs !== revealed) reveal(place("tab-" + at.tab));
    revealed = tabs;
  }

  let revealed = "";  // the chosen tab and what else decides where it is

  // A narrow page shows some of the tabs; the chosen one is among them.
  function reveal(tab) {
    const row = tab.parentNode, left = tab.offsetLeft - row.offsetLeft, right = left + tab.offsetWidth;
    if (left < row.scrollLeft) row.scrollLeft = left - 20;
    else if (right > row.scrollLeft + row.clientWidth) row.scrollLeft = right - row.clientWidth + 20;
  }

  function notice(said) {
    const box = place("notice");
    box.hidden = !said.length;
    box.replaceChildren(...said.map((line) => {
      const shown = document.createElement("p");
      shown.textContent = line[0].toUpperCase() + line.slice(1) + ".";
      return shown;
    }));
  }

  function now(at, facts, story) {
    const step = story.steps.find((one) => one[0] === at.step), words = step ? step[1] : "another request's pass";
    const number = document.createElement("b"), about = document.createElement("span");
    number.textContent = `step ${at.step}`;
    about.textContent = `request ${at.request}: ${words}`;
    const said = [number, ` of ${facts.last} `, about], text = said.map((one) => one.textContent ?? one).join("");
    if (place("now").textContent !== text) place("now").replaceChildren(...said);
  }

  // What is chosen is framed in pictures that stay as they are.
  function timeline(at) {
    const timeline = document.querySelector("#timeline-view svg[data-first]");
    if (timeline) {
      const {first, last, pitch, left} = timeline.dataset, frame = timeline.querySelector(".cursor");
      timeline.setAttribute("tabindex", "0");
      window.cacheprobe.lines.frame(Number(first), Number(last));
      timeline.querySelectorAll(".pick:not([data-step])").forEach((name) =>
        name.classList.toggle("named", Number(name.dataset.request) === at.request));
      const inside = at.step >= Number(first) && at.step <= Number(last);
      frame.style.display = inside ? "" : "none";
      const shown = document.querySelector("#overview-view .shown");  // the steps that the timeline has
      if (shown) shown.setAttribute("x", shown.dataset.first = first);
      if (shown) shown.setAttribute("width", last - first + 1);
      if (inside) frame.setAttribute("x", Number(left) + (at.step - Number(first)) * Number(pitch) - 2);
    }
  }

  function cell(at) {
    const grid = document.querySelector("#grid-view svg.readings");
    if (grid) {
      grid.setAttribute("tabindex", "0");
      const where = at.row === null || at.row === undefined ? `position="${at.position}"` : `row="${at.row}"`;
      const column = grid.querySelector(`.column[data-${where}]`);
      const layer = JSON.parse(grid.dataset.layers).indexOf(at.layer);
      const frame = grid.querySelector(".cursor");
      frame.style.display = column && layer >= 0 ? "" : "none";
      if (column) frame.setAttribute("x", column.dataset.x);
      frame.setAttribute("y", Number(grid.dataset.low) - layer * Number(grid.dataset.rowHeight));
      grid.querySelectorAll(".column").forEach((one) =>
        one.classList.toggle("now", Number(one.dataset.born) === at.step));
    }
  }

  function layer(at) {
    const ladder = document.querySelector("#card-view .ladder");
    if (ladder) {
      const chosen = ladder.querySelector("tr.chosen"), line = ladder.querySelector(`tr[data-layer="${at.layer}"]`);
      if (chosen !== line) {
        if (chosen) chosen.classList.remove("chosen");
        if (line) line.classList.add("chosen");
        if (line) ladder.scrollTop = line.offsetTop - ladder.clientHeight / 2;
      }
    }
  }

  // The chosen token of the text, and those of the chosen range. One that was chosen elsewhere is scrolled to.
  function text(at) {
    const view = place("text-view"), box = view.querySelector(".prose"), is_range = window.cacheprobe.is_range(at);
    const from = Math.min(at.position, at.until), to = Math.max(at.position, at.until);
    place("range-view").hidden = !is_range;
    window.cacheprobe.notes.mark(at);
    let here = null;
    for (const token of view.querySelectorAll("span[data-position]")) {
      const position = Number(token.dataset.position);
      if (position === at.position) here = token;
      token.classList.toggle("here", position === at.position);
      token.classList.toggle("ranged", is_range && from <= position && position <= to);
    }
    const where = `${view.dataset.answer} ${at.position}`;
    if (!here || read === where) return;
    read = where;
    const [{top, bottom}, around] = [here, box].map((one) => one.getBoundingClientRect());
    if (top < around.top || bottom > around.bottom) box.scrollTop += top - around.top - box.clientHeight / 2;
  }

  // A list of tokens: the chosen line, the line that Tab leads to, and what is searched for.
  function list(at) {
    const view = place(at.tab === "overview" ? "tokens-view" : "rejected-view"), search = place("rejected-search");
    const lines = [...view.querySelectorAll("tr[data-intent]")];
    const chosen = lines.find(({dataset}) =>
      Number(dataset.request) === at.request && Number(dataset.position) === at.position);
    for (const line of lines) {
      line.classList.toggle("chosen", line === chosen);
      line.tabIndex = line === (chosen || lines[0]) ? 0 : -1;
    }
    if (search && search !== document.activeElement) search.value = at.find || "";
    for (const box of document.querySelectorAll("#rejected-view [data-filter]")) {
      const [name, end] = box.dataset.filter.split(" "), text = at[name] || "";
      const ends = text.includes(":") ? text.split(":") : [];  // "none" has no ends
      if (box !== document.activeElement) box.value = end ? ends[Number(end)] || "" : text;
    }
    for (const box of document.querySelectorAll("[data-tokens]")) {
      const [name, end] = box.dataset.tokens.split(" "), text = window.cacheprobe.part_of(at.tokens, name) || "";
      const part = end ? text.split(":")[Number(end)] || "" : text;
      if (box !== document.activeElement) box.value = end && isNaN(part) ? "" : part;
    }
    const filter = place("result-filter");
    if (filter && filter !== document.activeElement) filter.value = at.filter || "";
    const where = chosen && `${chosen.dataset.request} ${chosen.dataset.position}`;
    if (chosen && at.tab === "rejected" && where !== seen) {
      if (document.activeElement.closest("#rejected-view tr")) chosen.focus({preventScroll: true});
      chosen.scrollIntoView({block: "nearest"});
    }
    if (at.tab === "rejected") seen = where;
  }

  // By view: what frames the choice in it.
  const FRAMES = {timeline, map: timeline, overview: timeline, rejected: list, tokens: list, result: list, text, notes: text,
    grid: cell, card: layer};

  let seen = null, read = null;  // the chosen line, and the chosen token with its text, that were scrolled to

  // The lens grid that is drawn: its question, and the first and last position of its page.
  function grid() {
    const page = document.querySelector("#grid-view [data-first]");
    if (!page) return null;
    const {first, last} = page.dataset;
    return {for: JSON.parse(place("grid-view").dataset.answer), first: Number(first), last: Number(last)};
  }

  function play() {
    const step = () => {
      if (playing !== null && current.step >= Number(place("page").dataset.last)) play();
      else change({intent: "step", by: 1});
    };
    if (playing !== null) {
      clearInterval(playing);
      playing = null;
    } else {
      step();
      playing = setInterval(step, 650);
    }
    const button = place("play");
    button.textContent = playing === null ? "▶" : "❚❚";
    button.title = playing === null ? "play" : "pause";
  }

  function tell(event) {
    const cell = event.target.closest("[data-says]"), box = place("tip");
    box.hidden = !cell;
    if (!cell) return;
    const column = cell.parentNode.closest("[data-says]");
    box.textContent = (column ? column.dataset.says + "\n" : "") + cell.dataset.says;
    if (cell.dataset.note) box.textContent += "\nnote: " + cell.dataset.note;
    const {left, right, top} = cell.getBoundingClientRect(), {offsetWidth, offsetHeight} = box;
    box.style.left = (right + 8 + offsetWidth < innerWidth ? right + 8 : Math.max(left - 8 - offsetWidth, 4)) + "px";
    box.style.top = Math.max(Math.min(top, innerHeight - offsetHeight - 8), 4) + "px";
  }

  function start(changes, resized) {
    change = changes;
    document.addEventListener("click", (event) => {
      const jump = event.target.closest("[data-jump]");
      if (jump) place(jump.dataset.jump).scrollIntoView({block: "start"});
      const button = event.target.closest("[data-intent]"), picked = event.target.closest(".pick,[data-layer]");
      if (button && button.dataset.intent === "play") play();
      else if (button) change({...button.dataset});
      else if (picked && event.shiftKey && picked.closest("#text-view")) {
        getSelection().removeAllRanges();
        change({intent: "until", position: picked.dataset.position});
      }
      else if (picked && picked.closest("#page")) {
        change({...picked.parentNode.closest(".column")?.dataset, ...picked.dataset, intent: "pick"});
      }
    });
    const hush = () => { place("tip").hidden = true; };
    for (const view of TOLD.map(place)) {
      view.addEventListener("pointerover", tell);
      view.addEventListener("pointerleave", hush);
    }
    document.addEventListener("keydown", hush);  // the picture below the pointer may move
    let resizing = null;
    addEventListener("resize", () => {
      clearTimeout(resizing);
      resizing = setTimeout(resized, 200);
    });
  }

  window.cacheprobe = {...window.cacheprobe, draw: {answer, grid, start, state, waiting, width}};
})();
