// The rules of the page's one state, `at`: what a click, a key or a menu makes of it, its link, and what it asks.
(function () {
  "use strict";
  const LINKED = ["run", "request", "step", "position", "row", "layer", "tab", "site", "lens", "colour", "rows",
    "against", "result", "theme", "facet", "follow", "find", "sort", "among", "page", "table", "order", "filter", "gave",
    "measure", "until", "lost", "feature", "flip", "zoom", "drafter", "flips", "margin", "tokens", "top"];
  const NUMBERS = new Set(["run", "request", "step", "position", "row", "layer", "against", "result", "page", "table",
    "until", "feature", "flip", "top"]);
  const NUMBER = /-?(?:\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})(?:e[+-]?\d{1,2})?/.source;
  const FORMS = {  // of the filters of the rejected drafts, and of the timeline's range of steps
    zoom: [/^\d{1,9}-\d{1,9}$/, "FIRST-LAST"], drafter: [/^(\d{1,9}|none)$/, "a layer or none"],
    flips: [/^(none|\d{0,9}:\d{0,9})$/, "LOWEST:HIGHEST or none"],
    margin: [new RegExp(`^(${NUMBER})?:(${NUMBER})?$`), "LEAST:MOST"],
  };
  const FILTERS = ["drafter", "flips", "margin"];
  const SHELVED = ["patching", "surgery", "probes", "sweep", "results"];  // tabs of stored results, each of one kind
  const SORTS = ["drafted", "committed", "request", "step", "position", "drafter", "flip", "margin"];
  const MOST_LETTERS = 200;  // of a searched text
  const WORDS = {
    tab: ["replay", "overview", "rejected", "thoughts", "compare", ...SHELVED], site: ["S", "T", "C"],
    colour: ["logprob", "entropy", "rank"],
    rows: ["committed", "all"], theme: ["light", "dark"], follow: ["newest"],
    lost: ["first"], measure: ["verdict", "depth", "entropy", "logprob", "feature", "difference"], among: ["request"], gave: ["true"],
    sort: SORTS.flatMap((name) => [name, "-" + name]),
  };
  const REQUESTS_A_PAGE = 8;  // of the grid of tokens
  const {lines} = window.cacheprobe, {inside, range_of} = lines;
  const LISTED = JSON.parse(document.body.dataset.listed);

  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  function parse(search) {
    const at = {
      tab: null, site: "S", lens: "recorded", colour: "logprob", rows: "all", measure: "verdict", said: [],
    };
    for (const [name, text] of new URLSearchParams(search)) {
      if (!LINKED.includes(name)) {
        at.said.push(`the link names ${name.slice(0, 40)}, which this page does not know`);
        continue;
      }
      if (NUMBERS.has(name)) {
        if (/^\d{1,9}$/.test(text)) at[name] = Number(text);
        else at.said.push(`the link's ${name} is not a number`);
      } else if (FORMS[name]) {
        if (FORMS[name][0].test(text)) at[name] = text;
        else at.said.push(`the link's ${name} is not ${FORMS[name][1]}`);
      } else if (!WORDS[name] || WORDS[name].includes(text)) at[name] = text;
      else at.said.push(`the link's ${name} is none of ${WORDS[name].join(", ")}`);
    }
    for (const name of ["find", "order", "filter"]) if (at[name]) at[name] = at[name].slice(0, MOST_LETTERS);
    if (at.tokens) at.tokens = at.tokens.slice(0, 10 * MOST_LETTERS);
    at.themed = "theme" in at;
    at.theme = at.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    return at;
  }

  // Whether a link names something else than a run, the colours and the table of all tokens.
  const names_place = (search) => [...new URLSearchParams(search).keys()].some((name) =>
    LINKED.includes(name) && !["run", "theme", "tokens"].includes(name));

  function link(at) {
    const query = new URLSearchParams();
    for (const name of LINKED) {
      if (at[name] === undefined || at[name] === null || (name === "theme" && !at.themed)) continue;
      query.set(name, at[name]);
    }
    return "?" + query;
  }

  // What a change of one thing makes of the others: a step or a request leads to another position.
  const CHANGES = {
    run: (at) => {
      at.request = at.step = at.position = at.row = at.layer = at.gave = at.follow = at.page = at.walk = at.until = null;
      at.flip = at.zoom = at.drafter = at.flips = at.margin = at.top = null;
      if (at.against === at.run) at.against = null;
      at.feature = at.tokens = null;
    },
    request: (at) => { at.position = at.row = at.until = at.top = null; },
    step: (at) => { at.position = at.row = at.follow = at.until = null; },
    site: (at) => { if (at.site !== "S" && at.lens === "recorded") at.lens = "logit"; },
    lens: (at) => { if (at.lens !== "logit") at.site = "S"; },
  };

  function set(at, name, value) {
    if (at[name] === value) return;
    at[name] = value;
    if (CHANGES[name]) CHANGES[name](at);
  }

  // What a press on the head of a column makes of the order: rising, falling, and as it was.
  const turned = (now, key) => now === key ? "-" + key : now === "-" + key ? null : key;

  // The search, filters, order and page of the table of all tokens are one text, such as "verdict=rejected&sort=-times".
  function with_part(text, name, value) {
    const query = new URLSearchParams(text || "");
    if (!value || value === ":") query.delete(name);
    else query.set(name, value);
    if (name !== "page") query.delete("page");
    return query.toString() || null;
  }

  const part_of = (text, name) => new URLSearchParams(text || "").get(name);

  const INTENTS = {
    set: (at, what) => set(at, what.name, what.value),
    step: (at, what, facts) => {
      if (!mine(at, facts) || at.step === null) return;
      set(at, "step", clamp(at.step + Number(what.by), facts.first, facts.last));
    },
    tab: (at, what) => {
      if (at.tab !== what.tab) at.result = at.table = at.order = at.filter = at.facet = null;
      at.tab = what.tab;
    },
    theme: (at) => { at.theme = at.theme === "dark" ? "light" : "dark"; at.themed = true; },
    result: (at, what) => {
      at.result = Number(what.result);
      at.table = at.order = at.filter = at.facet = null;
    },
    table: (at, what) => {  // another table of the same file
      at.table = Number(what.table);
      at.order = at.filter = null;
    },
    order: (at, what) => { at.order = turned(at.order, what.order); },
    tokens: (at, {name, value, toggle}) => {
      at.tokens = with_part(at.tokens, name, toggle && part_of(at.tokens, name) === value ? null : value);
    },
    arrange: (at, what) => {
      at.tokens = with_part(at.tokens, "sort", turned(part_of(at.tokens, "sort"), what.arrange));
    },
    every: (at) => { at.tokens = with_part(null, "sort", part_of(at.tokens, "sort")); },
    open: (at, what) => {
      set(at, "run", Number(what.run));
      INTENTS.tab(at, {tab: "replay"});
    },
    follow: (at) => { at.follow = at.follow ? null : "newest"; },
    find: (at, what) => { at.find = what.find || null; at.page = null; },
    lost: (at) => {
      at.lost = at.lost ? null : "first";
      at.top = 0;
    },
    turn: (at, what, facts) => { if (mine(at, facts)) lines.turn(at, Number(what.by), facts); },
    neighbour: (at, what, facts) => { if (mine(at, facts)) set(at, "request", lines.neighbour(at, what, facts)); },
    filter: (at, what) => {  // of the rejected drafts
      if (!what.value || what.value === ":") at[what.name] = null;
      else if (FORMS[what.name][0].test(what.value)) at[what.name] = what.value;
      else at.said = [`${what.name} is ${FORMS[what.name][1]}, not ${what.value}`];
      at.page = null;
    },
    unfiltered: (at) => { at.find = at.among = at.drafter = at.flips = at.margin = at.page = null; },
    flip: (at, what) => { at.flip = Number(what.step); },
    zoom: (at, what, facts) => { if (mine(at, facts)) lines.zoom(at, what, facts); },
    among: (at) => { at.among = at.among ? null : "request"; at.page = null; },
    page: (at, what) => { at.page = Number(what.page); },
    sort: (at, what) => {
      at.sort = turned(at.sort, what.sort);
      at.page = null;
    },
    draft: (at, what) => {
      set(at, "request", Number(what.request));
      set(at, "step", Number(what.step));
      at.position = Number(what.position);
      at.row = at.follow = at.until = null;
      if (what.page !== undefined) at.page = Number(what.page);
      if (at.tab !== "rejected" || what.page === undefined) INTENTS.tab(at, {tab: "replay"});
    },
    walk: (at, what, facts) => { if (mine(at, facts)) at.walk = (at.walk || 0) + what.by; },
    layer: (at, what, facts) => {
      if (!mine(at, facts)) return;
      const next = facts.layers.indexOf(at.layer) + what.by;
      if (facts.layers[next] !== undefined) at.layer = facts.layers[next];
    },
    position: (at, what, facts, story) => {
      if (!known(at, story)) return;
      const [low, high] = ends(story);
      const to = clamp(what.to === "first" ? low : what.to === "last" ? high : at.position + what.by, low, high);
      const committed = story.steps.find((step) => step[3] > to + 1 - story.prompt);  // the step of the token it predicts
      if (committed) set(at, "step", committed[0]);
      at.position = to;
      at.row = at.follow = at.until = null;
    },
    until: (at, what) => {
      at.until = Number(what.position);
      at.follow = null;
    },
    feature: (at, what) => {  // colours the text
      at.feature = Number(what.feature);
      at.measure = "feature";
    },
    gave: (at) => { at.gave = at.gave ? null : true; },
    pick: (at, what) => {
      if (what.request !== undefined) set(at, "request", Number(what.request));
      const step = what.step ?? what.born;  // of a column: the step that computed its row
      if (step !== undefined) set(at, "step", Number(step));
      if (what.layer !== undefined) at.layer = Number(what.layer);
      if (what.position !== undefined) {
        at.position = Number(what.position);
        at.row = what.row === undefined ? null : Number(what.row);
        at.follow = at.until = null;
      }
      if (what.place !== undefined) {
        at.row = at.position = at.follow = at.until = null;
        at.place = Number(what.place);
      }
    },
  };

  const mine = (at, facts) => facts && !facts.error && facts.run === at.run;

  const known = (at, story) => story && !story.error && story.run === at.run && story.request === at.request;

  // What was said stands until something is chosen.
  function act(at, what, facts, story) {
    const {said, ...before} = at;
    INTENTS[what.intent](at, what, facts, story);
    const place = ({run, request, position, row}) => [run, request, position, row];
    if (!same(place(before), place(at)) && before.flip === at.flip) at.flip = null;  // it is of another token
    if (at.zoom && before.step !== at.step) {
      const [first, last] = range_of(at.zoom), half = Math.floor((last - first) / 2);
      if (at.step < first || at.step > last) at.zoom = inside(at.step - half, at.step - half + last - first, facts);
    }
    const {said: _, ...after} = at;
    at.said = same(before, after) ? said : [];
  }

  function settle(at, facts, runs) {
    const count = facts.requests.length;
    if (at.request === undefined || at.request === null) at.request = facts.opening.request;
    else if (at.request >= count) {
      at.said.push(`there is no request ${at.request} in this run, it has 0 to ${count - 1}`);
      at.request = facts.opening.request;
    }
    if (at.step === undefined || at.step === null) at.step = facts.opening.step;
    if (at.follow && at.step !== facts.last) {  // the newest step, and the place where it is about
      at.step = facts.last;
      at.position = at.row = at.until = null;
    }
    const step = clamp(at.step, facts.first, facts.last);
    if (step !== at.step) at.said.push(`there is no step ${at.step} in this run, it has ${facts.first} to ${facts.last}`);
    at.step = step;
    if (at.zoom && range_of(at.zoom)[0] > facts.last) at.said.push(`there are no steps ${at.zoom} in this run, it has ${facts.first} to ${facts.last}`);
    if (at.zoom) at.zoom = inside(...range_of(at.zoom), facts);
    if (at.top >= facts.requests.length) {
      at.said.push(`there is no place ${at.top} in the timeline, it has 0 to ${facts.requests.length - 1}`);
      at.top = null;
    }
    if (at.layer === undefined || at.layer === null) at.layer = facts.layers[facts.layers.length - 1];
    if (!facts.layers.includes(at.layer)) {
      at.said.push(`layer ${at.layer} was not kept, this run has ${facts.layers[0]} to ${facts.layers.at(-1)}`);
      at.layer = facts.layers.at(-1);
    }
    if (!facts.sites.includes(at.site)) {
      at.said.push(`site ${at.site} was not kept, this run has ${facts.sites.join(", ")}`);
      at.site = "S";
    }
    if (!facts.lenses.some((one) => one.value === at.lens)) {
      at.said.push(`there is no lens ${at.lens.slice(0, 40)}, there are ${facts.lenses.map((one) => one.value).join(", ")}`);
      at.lens = "recorded";
    }
    if (!facts.has_readings && at.lens === "recorded" && !facts.why_not) at.lens = "logit";
    const others = runs.filter((run) => !run.disabled && run.value !== at.run).map((run) => run.value);
    if (others.includes(at.against)) return;
    const is_chosen = at.against !== undefined && at.against !== null;
    if (is_chosen) at.said.push(`run ${at.against} cannot be compared with run ${at.run}`);
    at.against = others.length ? others[0] : null;
  }

  // A tab of results shows the first of its kind; one that is chosen leads to its own tab.
  function shelve(at, kinds) {
    if (!SHELVED.includes(at.tab)) return;
    const is_chosen = at.result !== undefined && at.result !== null;
    if (is_chosen && kinds[at.result] !== undefined) {
      at.tab = kinds[at.result];
      return;
    }
    if (is_chosen) at.said.push(`there is no result ${at.result}, there are ${kinds.length}`);
    at.result = kinds.includes(at.tab) ? kinds.indexOf(at.tab) : null;
  }

  const is_range = (at) => Number.isInteger(at.position) && Number.isInteger(at.until) && at.until !== at.position;

  // Tabs that have nothing to show, with the reason; "" until it is known.
  function absent(facts) {
    const not_known = {rejected: "", thoughts: "", compare: ""};
    return {...(facts && !facts.error ? facts.absent : not_known), ...LISTED.absent};
  }

  // A tab that has nothing to show is left for the first one that has, and the reason is said.
  function leave(at, facts) {
    const empty = absent(facts), reason = empty[at.tab], other = WORDS.tab.find((tab) => !(tab in empty));
    if (!reason || !other) return;
    at.said.push(reason);
    INTENTS.tab(at, {tab: other});
    shelve(at, LISTED.results);
  }

  // Positions of the first and the last row that predicts a token of the request.
  function ends(story) {
    const low = story.prompt - 1;
    return [low, Math.max(low, story.prompt + story.tokens - 2)];
  }

  // Without a position of its own, the state is where the request's newest step is about.
  function follow(at, story) {
    const [low, high] = ends(story), is_row = at.row !== null && at.row !== undefined;
    if (at.tab === "replay" && !is_row && at.position !== null && (at.position < low || at.position > high)) {
      at.said.push(`request ${at.request} predicts no token from position ${at.position}, it does from ${low} to ${high}`);
      at.position = null;
    }
    if (at.place !== undefined) {
      at.position = clamp(story.prompt - 1 + at.place, low, high);
      delete at.place;
    }
    if (at.position === undefined || at.position === null) {
      const before = story.steps.filter((step) => step[0] <= at.step);
      at.position = clamp(before.length ? before.at(-1)[2] : low, low, high);
    }
  }

  // Moved to the end: what a model must read may take a while.
  function last(wanted, name) {
    const question = wanted[name];
    delete wanted[name];
    wanted[name] = question;
  }

  // Questions by view, the first to be answered first. width: of a card, in pixels; nothing is drawn before there are
  // cards. drawn: the lens grid that is there, {for: its question, first, last: its positions}; it serves for every
  // position that it holds. A question of a run that grows names the version of the facts, and is asked again with the
  // next one.
  function questions(at, facts, story, width, drawn) {
    const {run, request, step, position, row = null, site, lens, theme} = at, wanted = {}, version = facts?.version;
    const is_told = story && story.run === run && story.request === request && story.version === version;
    if (width && at.tab === "overview" && run !== null) {  // needs no facts
      wanted.summary = {run, version};
      wanted.tokens = {...Object.fromEntries(new URLSearchParams(at.tokens || "")), run, version};
    }
    if (run !== null && (facts === null || facts.run !== run)) {
      if (!known(at, story)) wanted.story = {run, request: request ?? null};  // of no request: of the one to show first
      wanted.facts = {run};
    }
    else if (mine(at, facts) && facts.newest !== version) wanted.facts = {run, version: facts.newest};
    else if (mine(at, facts) && !is_told) wanted.story = {run, request, version};
    if (width && SHELVED.includes(at.tab) && at.result !== null) {
      const {facet, table, order, filter} = at;
      wanted.result = {result: at.result, theme, ...Object.fromEntries(
        Object.entries({facet, table, order, filter}).filter(([, value]) => value !== null && value !== undefined && value !== ""))};
    }
    if (!width || !mine(at, facts) || !known(at, story) || facts.is_empty) return wanted;
    const {find = "", sort = "", among} = at, list = {find: find || "", sort: sort || "", version};
    for (const name of FILTERS) if (at[name]) list[name] = at[name];
    if (at.walk) wanted.walk = {run, request, step, position, by: at.walk, among: among ? request : null, ...list};
    if (at.tab === "rejected") wanted.rejected = {run, request: among ? request : null, page: at.page || 0, ...list};
    if (["overview", "rejected"].includes(at.tab)) wanted.notes = {run};  // for the dialog of a note
    if (at.tab === "compare") wanted.compare = {run, against: at.against, request, theme, version};
    if (at.tab === "thoughts") wanted.thoughts = {run, request, position, step, version};
    if (at.tab !== "replay") return wanted;
    const wide = width("timeline", facts.layers.length), steps = clamp(Math.floor((wide - 92) / 18), 8, 80);
    const tokens = clamp(Math.floor((width("decode") - 92) / 56), 3, 40), place = position + 1 - story.prompt;
    const first = facts.first + steps * Math.floor((step - facts.first) / steps);
    const shown = at.zoom ? range_of(at.zoom) : [first, Math.min(first + steps - 1, facts.last)];
    const left = tokens * Math.floor(Math.max(place, 0) / tokens), order = at.lost ? "losses" : "";
    const top = REQUESTS_A_PAGE * Math.floor(request / REQUESTS_A_PAGE);
    const requests = [top, Math.min(top + REQUESTS_A_PAGE, facts.requests.length)];
    wanted.insight = {run, request, position, row, site, lens, version};
    wanted.text = {run, request, measure: at.measure, place: 2000 * Math.floor(Math.max(place, 0) / 2000), version};
    if (at.measure === "feature") wanted.text.feature = at.feature ?? null;
    if (is_range(at)) wanted.range = {run, request, position, until: at.until, version};
    wanted.overview = {run, version};
    wanted.timeline = {run, requests: lines.page(at, facts), order, steps: [shown[0], shown[1] + 1], width: wide, version};
    if (at.zoom) wanted.timeline.zoomed = true;
    if (facts.requests.length > 1) wanted.map = {run, order, version};
    wanted.cache = {run, request, step, version};
    wanted.card = {run, request, position, row, site, lens, version};
    wanted.decode = {run, request, requests, places: [left, left + tokens], place, step, version};
    const grid = {run, request, site, lens, colour: at.colour, rows: at.rows, width: width("lens"), position, version};
    const holds = drawn && drawn.first <= position && position <= drawn.last;
    wanted.grid = holds && same({...drawn.for, position}, grid) ? drawn.for : grid;
    wanted.window = {run, request, step, version};
    wanted.notes = {run};
    if (at.gave) wanted.gave = {run, request, position, row, theme};
    if (lens !== "recorded") ["insight", "card", "grid"].forEach((name) => last(wanted, name));
    return wanted;
  }

  const rules = {FILTERS, SHELVED, is_range, names_place, parse, part_of, link, act, mine, known, settle, shelve, leave, absent, follow, questions};
  window.cacheprobe = {...window.cacheprobe, ...rules};
})();
