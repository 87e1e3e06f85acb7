// What the state looks like: markup put in its place, the frame moved, the link kept, keys and clicks heard.
(function () {
  "use strict";
  const place = (name) => document.getElementById(name);
  const keep = () => window.dash_clientside.no_update;
  const TAKES_ARROWS = "input:not(.dash-dropdown-focus-target),textarea,[role=slider],[role=listbox],[role=option]";
  let count = 0, playing = null;
  const chosen = {at: null, about: null}, intents = [];

  // Two that come at once are one change of the store's value to Dash: what was meant is kept here until it is taken.
  function send(what) {
    intents.push(what);
    window.dash_clientside.set_props("intent", {data: ++count});
  }
  const meant = () => intents.splice(0);

  function escaped(text) {
    const box = document.createElement("span");
    box.textContent = text;
    return box.innerHTML;
  }

  // Markup comes from the server, which escapes every text of a run.
  function draw(answer, id) {
    const view = place(id);
    if (!answer || !view) return keep();
    const side = view.querySelector(".scroll,.ladder,.wide"), left = side ? side.scrollLeft : 0;
    view.innerHTML = answer.html;
    view.dataset.answer = JSON.stringify(answer.for);
    view.closest(".card").classList.remove("asking");
    if (id === "timeline-view" && chosen.at) moveFrame(chosen.at);
    const again = view.querySelector(".scroll,.ladder,.wide");
    if (again) again.scrollLeft = left;
    const line = view.querySelector("tr.chosen"), ladder = view.querySelector(".ladder");
    if (line && ladder) ladder.scrollTop = line.offsetTop - ladder.clientHeight / 2;
    return String(++count);
  }

  function caption(about, id) {
    const name = id.replace("-head", ""), head = place(id), figure = place(name + "-place");
    if (!about || !head) return keep();
    const title = about.title ? `<h2>${about.title}</h2>` : "", note = about.note ? `<p class="note">${about.note}</p>` : "";
    head.innerHTML = title + note + (about.html || "");
    head.dataset.answer = JSON.stringify(about.for);
    figure.hidden = about.is_empty;
    if (about.height) figure.style.height = about.height + "px";
    if (!about.is_empty) setTimeout(() => fit(figure), 30);
    head.closest(".card").classList.remove("asking");
    if (name === "grid") {
      chosen.about = about;
      for (const wait of [30, 100, 300, 1000, 3000]) setTimeout(mark, wait);  // plotly draws when it gets to it
    }
    return String(++count);
  }

  function click(data) {
    if (data && data.points && data.points.length) send({intent: "cell", x: data.points[0].x, y: data.points[0].y});
    return keep();
  }

  function fit(box) {
    box.querySelectorAll(".js-plotly-plot").forEach((figure) => window.Plotly && window.Plotly.Plots.resize(figure));
  }

  function waiting(name) {
    const card = place((name === "grid" || name === "gave" ? "lens" : name) + "-card");
    if (card) card.classList.add("asking");
  }

  function point(at, story, facts) {
    if (!at) return keep();
    const {link, mine, known} = window.cacheprobe;
    document.documentElement.dataset.theme = at.theme;
    const wanted = link(at);
    if (wanted !== location.search) history.replaceState(null, "", location.pathname + wanted);
    for (const tab of document.querySelectorAll(".tab")) {
      tab.setAttribute("aria-selected", String(tab.dataset.tab === at.tab));
      const panel = place("panel-" + tab.dataset.tab);
      if (panel.hidden === (tab.dataset.tab === at.tab)) {
        panel.hidden = !panel.hidden;
        if (!panel.hidden) { fit(panel); setTimeout(() => send({intent: "resize"}), 0); }
      }
    }
    document.querySelectorAll("#result-list button").forEach((button) =>
      button.classList.toggle("chosen", Number(button.dataset.result) === at.result));
    notice(at, facts, story);
    if (mine(at, facts)) {
      place("says").textContent = facts.says;
      place("page").dataset.last = facts.last;
      const why = place("lens-why");
      why.hidden = !facts.why_not;
      why.textContent = facts.why_not ? `Only what was recorded can be shown: ${facts.why_not}.` : "";
    }
    if (mine(at, facts) && known(at, story)) now(at, facts, story);
    moveFrame(at);
    chosen.at = at;
    mark();
    if (!at.gave) { place("gave-place").hidden = true; place("gave-head").innerHTML = ""; }
    return JSON.stringify(at);
  }

  function notice(at, facts, story) {
    const box = place("notice");
    const said = [...(at.said || [])];
    if (facts && facts.error && facts.run === at.run) said.push(facts.error);
    if (story && story.error && story.run === at.run) said.push(story.error);
    box.hidden = !said.length;
    box.innerHTML = said.map((line) => `<p>${escaped(line[0].toUpperCase() + line.slice(1))}.</p>`).join("");
  }

  function now(at, facts, story) {
    const step = story.steps.find((one) => one[0] === at.step);
    const words = step ? step[1] : "another request's pass";
    const said = `request ${at.request}: ${escaped(words)}`;
    place("now").innerHTML = `<b>step ${at.step}</b> of ${facts.last} <span>${said}</span>`;
  }

  function moveFrame(at) {
    const picture = document.querySelector("#timeline-view svg[data-first]");
    if (!picture) return;
    const {first, last, pitch, left} = picture.dataset, frame = picture.querySelector(".cursor");
    picture.querySelectorAll(".pick:not([data-step])").forEach((name) =>
      name.classList.toggle("named", Number(name.dataset.request) === at.request));
    const inside = at.step >= Number(first) && at.step <= Number(last);
    frame.style.display = inside ? "" : "none";
    if (inside) frame.setAttribute("x", Number(left) + (at.step - Number(first)) * Number(pitch) - 2);
  }

  // The chosen cell is framed, and columns that were computed in the chosen step are underlined.
  function mark() {
    const figure = document.querySelector("#grid .js-plotly-plot");
    const is_drawn = window.Plotly && figure && figure._fullLayout && figure.layout.meta;
    if (!is_drawn || !chosen.at || !chosen.about || !chosen.about.rows) return;
    const {at, about} = chosen;
    if (JSON.stringify(figure.layout.meta.rows) !== JSON.stringify(about.rows)) return;
    if (!figure.dataset.heard) {
      figure.dataset.heard = "yes";
      figure.on("plotly_afterplot", () => setTimeout(mark, 0));
    }
    const ink = getComputedStyle(place("page")).getPropertyValue("--ink").trim(), shapes = [];
    const has_row = at.row !== null && at.row !== undefined;
    const column = has_row ? about.rows.indexOf(at.row) : about.positions.indexOf(at.position);
    const layer = about.layers.indexOf(at.layer);
    if (column >= 0 && layer >= 0) {
      shapes.push({type: "rect", x0: column - 0.5, x1: column + 0.5, y0: layer - 0.5, y1: layer + 0.5,
        line: {color: ink, width: 3}});
    }
    about.steps.forEach((step, i) => {
      if (step === at.step) {
        shapes.push({type: "line", x0: i - 0.42, x1: i + 0.42, yref: "paper", y0: 0, y1: 0, line: {color: ink, width: 5}});
      }
    });
    const wanted = JSON.stringify(shapes);
    if (figure.dataset.marks === wanted && (figure.layout.shapes || []).length === shapes.length) return;
    figure.dataset.marks = wanted;
    window.Plotly.relayout(figure, {shapes});
  }

  function play() {
    if (playing !== null) {
      clearInterval(playing);
      playing = null;
    } else {
      send({intent: "step", by: 1});
      playing = setInterval(() => {
        const at = JSON.parse(place("page").dataset.at || "{}"), last = place("page").dataset.last;
        if (last && at.step >= Number(last)) play();
        else send({intent: "step", by: 1});
      }, 650);
    }
    const button = place("play");
    button.textContent = playing === null ? "▶" : "❚❚";
    button.title = playing === null ? "play" : "pause";
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-intent]");
    if (button) {
      if (button.dataset.intent === "play") play();
      else send({...button.dataset});
      return;
    }
    const picked = event.target.closest(".pick,[data-layer]");
    if (picked && picked.closest("#page")) send({intent: "pick", ...picked.dataset});
  });

  document.addEventListener("keydown", (event) => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.target.closest(TAKES_ARROWS)) return;
    event.preventDefault();
    send({intent: "step", by});
  });

  let resizing = null;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => send({intent: "resize"}), 200);
  });

  const width = (name) => {
    const card = place(name);
    return (card && card.clientWidth ? card.clientWidth : Math.min(innerWidth, 1400)) - 36;
  };
  const first = () => Number(place("page").dataset.first || 0);

  window.cacheprobe = Object.assign(window.cacheprobe || {}, {width, waiting, first, meant});
  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.cacheprobe = Object.assign(window.dash_clientside.cacheprobe || {}, {draw, caption, point, click});
})();
