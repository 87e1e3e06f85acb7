// The page's one state, `at`: every control, click and key becomes a change of it, and it becomes questions and a link.
(function () {
  "use strict";
  const LINKED = ["run", "request", "step", "position", "row", "layer", "tab", "site", "lens", "colour", "rows", "against",
    "result", "theme"];
  const NUMBERS = new Set(["run", "request", "step", "position", "row", "layer", "against", "result"]);
  const WORDS = {
    tab: ["replay", "thoughts", "compare", "results"], site: ["S", "T", "C"], colour: ["logprob", "entropy", "rank"],
    rows: ["committed", "all"], theme: ["light", "dark"],
  };
  const CONTROLS = ["run", "request", "step", "site", "lens", "colour", "rows", "against"];
  const VIEWS = ["timeline", "decode", "cache", "window", "card", "thoughts", "compare", "prompt", "grid", "gave", "result",
    "facts", "story"];
  const REQUESTS_A_PAGE = 8;

  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const keep = () => window.dash_clientside.no_update;

  function parse(search) {
    const at = {tab: "replay", site: "S", lens: "recorded", colour: "logprob", rows: "all", said: []};
    for (const [name, text] of new URLSearchParams(search || "")) {
      if (!LINKED.includes(name)) continue;
      if (NUMBERS.has(name)) {
        if (/^\d{1,9}$/.test(text)) at[name] = Number(text);
        else at.said.push(`the link's ${name} is not a number`);
      } else if (!WORDS[name] || WORDS[name].includes(text)) at[name] = text;
      else at.said.push(`the link's ${name} is none of ${WORDS[name].join(", ")}`);
    }
    at.themed = "theme" in at;
    at.theme = at.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    at.width = innerWidth;
    return at;
  }

  function link(at) {
    const query = new URLSearchParams();
    for (const name of LINKED) {
      if (at[name] === undefined || at[name] === null || (name === "theme" && !at.themed)) continue;
      if (name === "row" && at.row === null) continue;
      query.set(name, at[name]);
    }
    return "?" + query;
  }

  // What a change of one thing makes of the others: a step or a request leads to another position.
  const CHANGES = {
    run: (at) => { at.request = at.step = at.position = at.row = at.layer = at.gave = null; },
    request: (at) => { at.position = at.row = at.gave = null; },
    step: (at) => { at.position = at.row = at.gave = null; },
    site: (at) => { if (at.site !== "S" && at.lens === "recorded") at.lens = "logit"; },
    lens: (at) => { if (at.lens === "recorded" || at.lens.startsWith("tuned")) at.site = "S"; },
  };

  function set(at, name, value) {
    if (at[name] === value) return;
    at[name] = value;
    if (CHANGES[name]) CHANGES[name](at);
  }

  const INTENTS = {
    step: (at, what, facts) => {
      if (facts && at.step !== null) set(at, "step", clamp(at.step + Number(what.by), facts.first, facts.last));
    },
    tab: (at, what) => { at.tab = what.tab; },
    theme: (at) => { at.theme = at.theme === "dark" ? "light" : "dark"; at.themed = true; },
    result: (at, what) => { at.result = Number(what.result); },
    gave: (at) => { at.gave = at.gave ? null : true; },
    resize: (at) => { at.width = innerWidth; },
    cell: (at, what, facts, about) => {
      if (!about || !about.rows || about.rows[what.x] === undefined || about.layers[what.y] === undefined) return;
      at.layer = about.layers[what.y];
      at.row = about.rows[what.x];
      at.position = about.positions[what.x];
      at.gave = null;
    },
    pick: (at, what) => {
      if (what.request !== undefined) set(at, "request", Number(what.request));
      if (what.step !== undefined) set(at, "step", Number(what.step));
      if (what.layer !== undefined) at.layer = Number(what.layer);
      if (what.position !== undefined) { at.position = Number(what.position); at.row = null; at.gave = null; }
      if (what.place !== undefined) { at.row = null; at.gave = null; at.place = Number(what.place); at.position = null; }
    },
  };

  function settle(at, facts) {
    const count = facts.requests.length;
    if (at.request === undefined || at.request === null) at.request = facts.opening.request;
    else if (at.request >= count) {
      at.said.push(`there is no request ${at.request} in this run, it has 0 to ${count - 1}`);
      at.request = facts.opening.request;
    }
    if (at.step === undefined || at.step === null) at.step = facts.opening.step;
    at.step = clamp(at.step, facts.first, facts.last);
    if (at.layer === undefined || at.layer === null) at.layer = facts.layers[facts.layers.length - 1];
    if (!facts.layers.includes(at.layer)) {
      at.said.push(`layer ${at.layer} was not kept, this run has ${facts.layers[0]} to ${facts.layers.at(-1)}`);
      at.layer = facts.layers.at(-1);
    }
    if (!facts.sites.includes(at.site)) at.site = "S";
    if (!facts.has_readings && at.lens === "recorded" && !facts.why_not) at.lens = "logit";
    if (at.against === undefined || at.against === null) at.against = at.run === 0 ? 1 : 0;
  }

  // Without a position of its own, the state is where the request's newest step is about.
  function follow(at, story) {
    const low = story.prompt - 1, high = Math.max(low, story.prompt + story.tokens - 2);
    if (at.place !== undefined) {
      at.position = clamp(story.prompt - 1 + at.place, low, high);
      delete at.place;
    }
    if (at.position === undefined || at.position === null) {
      const before = story.steps.filter((step) => step[0] <= at.step);
      at.position = clamp(before.length ? before.at(-1)[2] : low, low, high);
    }
  }

  const mine = (at, facts) => facts && !facts.error && facts.run === at.run;

  const known = (at, story) => story && !story.error && story.run === at.run && story.request === at.request;

  // Dash drops what a callback returns when it is to be run again, so the newest state is held here, not in the store.
  let held = null;

  function reduce(search, facts, story, intent, ...rest) {
    const values = rest.slice(0, CONTROLS.length), stored = rest[CONTROLS.length], about = rest[CONTROLS.length + 1];
    const before = held;
    const fired = new Set((window.dash_clientside.callback_context.triggered || []).map((one) => one.prop_id));
    const at = before ? {...before, said: []} : parse(search);
    if (at.run === undefined || at.run === null) at.run = window.cacheprobe.first();
    if (before) {
      CONTROLS.forEach((name, i) => {
        if (fired.has(name + ".value") && values[i] !== null && values[i] !== undefined) set(at, name, values[i]);
      });
      for (const what of window.cacheprobe.meant()) INTENTS[what.intent](at, what, facts, about);
      // what was said stands until something is chosen; controls that are set to what is chosen choose nothing
      const chosen = ({said, width, ...rest}) => rest;
      at.said = same(chosen(at), chosen(before)) ? [...before.said] : [];
    }
    if (mine(at, facts)) settle(at, facts);
    if (mine(at, facts) && known(at, story)) follow(at, story);
    const options = mine(at, facts) ? [
      facts.requests.map((label, value) => ({label, value})),
      [["S", "stream"], ["T", "attention"], ["C", "MLP"]].map(([value, word]) => ({
        value, label: `${value} · ${word}`, disabled: !facts.sites.includes(value) || (value !== "S" && !!facts.why_not),
      })),
      facts.lenses, facts.first, facts.last,
    ] : Array(5).fill(keep());
    const shown = CONTROLS.map((name, i) => (at[name] === undefined || at[name] === null || at[name] === values[i]
      ? keep() : at[name]));
    held = at;
    return [stored && same(at, stored) ? keep() : at, ...shown, ...options];
  }

  function pages(at, facts, story) {
    const wide = window.cacheprobe.width("timeline-card"), half = window.cacheprobe.width("decode-card");
    const steps = clamp(Math.floor((wide - 92) / 18), 8, 80), tokens = clamp(Math.floor((half - 92) / 56), 3, 40);
    const first = facts.first + steps * Math.floor((at.step - facts.first) / steps);
    const request = REQUESTS_A_PAGE * Math.floor(at.request / REQUESTS_A_PAGE);
    const place = at.position + 1 - story.prompt, token = tokens * Math.floor(Math.max(place, 0) / tokens);
    return {
      steps: [first, Math.min(first + steps, facts.last + 1)],
      requests: [request, Math.min(request + REQUESTS_A_PAGE, facts.requests.length)],
      width: wide, places: [token, token + tokens], place,
      columns: clamp(Math.floor((window.cacheprobe.width("lens-card") - 110) / 50), 4, 40),
    };
  }

  // Whether the grid that is drawn, and no other is on its way, has the position that is asked for.
  function holds(about, question, asked) {
    if (!about || about.is_empty || !about.for || !same(about.for, asked)) return false;
    const inside = about.first <= question.position && question.position <= about.last;
    return inside && same({...about.for, position: 0}, {...question, position: 0});
  }

  function ask(at, facts, story, about, ...asked) {
    const wanted = {facts: {run: at.run}};
    if (mine(at, facts)) {
      const {run, request, step, position, row, layer, site, lens, theme} = at;
      wanted.story = {run, request};
      if (known(at, story)) {
        const page = pages(at, facts, story);
        if (at.tab === "replay") {
          wanted.timeline = {run, requests: page.requests, steps: page.steps, width: page.width};
          wanted.decode = {run, request, requests: page.requests, places: page.places, place: page.place, step};
          wanted.cache = wanted.window = {run, request, step};
          wanted.prompt = {run, request};
          wanted.card = {run, request, position, row: row ?? null, layer, site, lens};
          const grid = {run, request, site, lens, colour: at.colour, rows: at.rows, theme, columns: page.columns, position};
          if (!holds(about, grid, asked[VIEWS.indexOf("grid")])) wanted.grid = grid;
          if (at.gave) wanted.gave = {run, request, position, row: row ?? null, theme};
        }
        if (at.tab === "thoughts") wanted.thoughts = {run, request, position, step};
        if (at.tab === "compare") wanted.compare = {run, against: at.against, request};
      }
    }
    if (at.tab === "results" && at.result !== undefined && at.result !== null) {
      wanted.result = {result: at.result, theme: at.theme};
    }
    return VIEWS.map((name, i) => {
      if (!wanted[name] || same(wanted[name], asked[i])) return keep();
      window.cacheprobe.waiting(name);
      return wanted[name];
    });
  }

  function hear(told, name) {
    window.dash_clientside.set_props(name, {data: told});
    return keep();
  }

  window.cacheprobe = Object.assign(window.cacheprobe || {}, {link, mine, known});
  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.cacheprobe = Object.assign(window.dash_clientside.cacheprobe || {}, {reduce, ask, hear});
})();
