// Keeps the state, asks the server for what it lacks, and hears the menus. One request at a time, the newest next.
(function () {
  "use strict";
  const {exports, draw, flip, keys, lines, notes, visits, zoom, names_place, parse, act, mine, known, settle, shelve, leave,
    follow, questions} = window.cacheprobe;
  const CONTROLS = ["run", "request", "step", "site", "lens", "colour", "rows", "against", "measure"];
  const FREE = ["run", "colour", "rows", "measure"];
  const IDLE = 400;  // milliseconds without a question until what may be clicked next is asked for
  const AHEAD = 8;  // requests that are asked for ahead
  const PATIENCE = 150;  // milliseconds until an outdated request is abandoned: a slider that is drawn along is followed

  const listed = JSON.parse(document.body.dataset.listed), at = parse(location.search);
  let facts = null, story = null, is_ready = false, trouble = "";
  const have = {};  // by view: the question that was answered, as text
  const stories = new Map();  // by request, of the run that is shown
  let flight = null, later = null, ahead = null;

  function change(what) {
    visits.did(what);
    act(at, what, facts, story);
    settled();
    if (what.intent === "draft") scrollTo(0, 0);  // it was opened from its list
  }

  // The rejected draft that a key asked for. A press that came meanwhile is asked for from there.
  function walked({error, says, story: next, ...place}, question) {
    const {run, version} = question, {request} = place;
    delete have.walk;
    if (next && mine(at, facts) && run === at.run && facts.version === version) {
      stories.set(request, {...next, run, request, version});
    }
    if (["run", "request", "step", "position"].some((name) => question[name] !== at[name])) return;
    at.walk = error || says ? null : at.walk - question.by;
    if (error || says) at.said = [error || says];
    else act(at, {intent: "draft", ...place}, facts, story);
  }

  // Completes a state that an address gave.
  function opened() {
    if (!listed.runs.length) at.run = null;
    else if (at.run === undefined) at.run = listed.first;
    // Home of a run with several requests is the overview; a link that names a place leads to the replay.
    if (!at.tab) at.tab = listed.sizes[at.run] > 1 && !names_place(location.search) ? "overview" : "replay";
    if (!listed.runs.length && at.tab === "replay") at.tab = listed.results[0];
    settled();
  }

  function settled() {
    if (mine(at, facts)) settle(at, facts, listed.runs);
    shelve(at, listed.results);
    if (at.run === null || mine(at, facts)) leave(at, facts);
    if (!known(at, story) && stories.has(at.request)) story = stories.get(at.request);
    if (mine(at, facts) && known(at, story)) follow(at, story);
    if (is_ready) draw.state(at, facts, story, trouble, growths.get(at.run));
    const lacking = ask();
    if (!is_ready) return;
    draw.waiting(lacking, at);
    show();
  }

  // A run that is recorded meanwhile: every second the page asks how far it is, and for new facts if it has a new part.
  const growths = new Map();  // by run
  const WATCH = 1000;  // milliseconds

  async function watch() {
    let goes_on = true;
    if (!document.hidden) {
      const {run} = at;
      try {
        await lines_of(JSON.stringify({growth: {run}}), null, ({now, labels, ...answer}) => {
          if (answer.error) return;
          goes_on = answer.goes_on;
          if (now) growths.set(run, now);
          relabel(labels);
          if (run !== at.run || !now || !mine(at, facts)) return;
          facts.newest = now.version;
          settled();
        });
        if (is_lost) trouble = "";
        is_lost = false;
      } catch (error) {
        is_lost = true;
        trouble = `the server does not answer (${error.message})`;
      }
      if (is_ready) draw.state(at, facts, story, trouble, growths.get(at.run));
    }
    if (goes_on) setTimeout(watch, WATCH);
  }

  let is_lost = false;

  function relabel(labels) {
    const by_run = new Map(labels), label_of = ({value, label}) => by_run.get(value) || label;
    if (listed.runs.every((one) => one.label === label_of(one))) return;
    listed.runs = listed.runs.map((one) => ({...one, label: label_of(one)}));
    for (const name of ["run", "against"]) offer(name, options(name));
  }

  const told = {
    facts: (answer, {run}) => {
      facts = {...answer, run, newest: answer.version};
      stories.clear();
      if (known(at, story)) stories.set(story.request, story);
    },
    story: (answer, {run, request: asked, version}) => {
      const request = answer.request ?? asked;
      story = {...answer, run, request, version};
      if (!answer.error) stories.set(request, story);
      if (at.follow) at.position = at.row = at.until = null;
    },
    walk: walked,
  };

  // A question without what grows with the run: a view that is asked for the same of a newer part is not waited for.
  const same_place = (question) => (question || "").replace(/,"version":"[^"]*"|(?<="steps":\[\d+),\d+/g, "");

  // Sends what is not yet answered. Returns the names of those views that show something else until then.
  function ask() {
    const wanted = questions(at, facts, story, draw.width, draw.grid());
    const lacking = Object.keys(wanted).filter((name) => have[name] !== JSON.stringify(wanted[name]));
    const missing = lacking.filter((name) => same_place(have[name]) !== same_place(JSON.stringify(wanted[name])));
    const on_its_way = (name) => flight && flight.asked[name] === JSON.stringify(wanted[name]);
    clearTimeout(later);
    if (ahead) ahead.abort();
    ahead = null;
    if (is_ready && !lacking.length && !flight) later = setTimeout(look_ahead, IDLE);
    if (lacking.length && lacking.every(on_its_way)) return missing;
    const age = flight && lacking.length ? performance.now() - flight.began : PATIENCE;
    if (age < PATIENCE) {
      later = setTimeout(settled, PATIENCE - age);
      return missing;
    }
    if (flight) flight.abort.abort();
    flight = null;
    if (!lacking.length) return missing;
    flight = {abort: new AbortController(), began: performance.now(), asked: {}};
    for (const name of lacking) flight.asked[name] = JSON.stringify(wanted[name]);
    fly(flight);
    return missing;
  }

  // Stories of the nearest requests in the timeline, one after the other: a click on one of those is then answered without
  // a question before its questions. With each goes what the server reads a request's tables for; it keeps them.
  async function look_ahead() {
    const {timeline} = questions(at, facts, story, draw.width, draw.grid());
    if (!timeline || facts.version) return;  // of a run that grows they would be old at the next part
    const {run, requests: [first, end]} = timeline, own = ahead = new AbortController();
    const order = lines.order(at, facts), here = order.indexOf(at.request), away = (one) => Math.abs(order.indexOf(one) - here);
    for (const request of order.slice(first, end).sort((a, b) => away(a) - away(b)).slice(0, AHEAD)) {
      if (stories.has(request)) continue;
      const asked = {story: {run, request}, insight: {run, request, position: 0, row: null, site: "S", lens: "recorded"}, window: {run, request, step: at.step}};
      const heard = ({view, ...answer}) => {
        if (own === ahead && view === "story" && !answer.error) stories.set(request, {...answer, run, request});
      };
      try {
        await lines_of(JSON.stringify(asked), own.signal, heard);
      } catch {
        return;  // who clicks there will hear why
      }
      if (own !== ahead) return;
    }
  }

  async function lines_of(body, signal, hear) {
    const answers = await fetch("ask", {method: "POST", headers: {"Content-Type": "application/json"}, body, signal});
    if (!answers.ok) throw new Error(await answers.text());
    const reader = answers.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "";;) {
      const {done, value} = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      lines.forEach((line) => hear(JSON.parse(line)));
    }
  }

  async function fly(own) {
    const body = "{" + Object.entries(own.asked).map(([name, ask]) => `"${name}":${ask}`).join(",") + "}";
    try {
      await lines_of(body, own.abort.signal, (line) => hear(own, line));
      if (own === flight) throw new Error("it broke off");
    } catch (error) {
      if (own !== flight) return;
      flight = null;
      trouble = error.cause ? error.message : `the server does not answer (${error.message})`;
      if (!is_ready) return;
      draw.state(at, facts, story, trouble, growths.get(at.run));
      draw.waiting([], at);
    }
  }

  function hear(own, {view, ...answer}) {
    if (own !== flight) return;
    const question = own.asked[view];
    trouble = "";
    have[view] = question;
    delete own.asked[view];
    try {
      if (told[view]) told[view](answer, JSON.parse(question));
      else if (!is_ready) early.push([view, JSON.parse(question), answer]);
      else draw.answer(view, JSON.parse(question), answer);
    } catch (error) {
      throw new Error(`what the server answered of ${view} cannot be shown (${error.message})`, {cause: error});
    }
    if (!Object.keys(own.asked).length) flight = null;
    if (told[view] || flight === null) settled();
    else if (is_ready) draw.waiting(Object.keys(own.asked).filter((name) => same_place(have[name]) !== same_place(own.asked[name])), at);
  }

  const early = [];  // answers that came before Dash had drawn the page

  // Menus and slider are Dash's: they hear of the state, and what they say while that is on its way is an echo.
  const held = {}, echoes = {};
  let shown = null;

  // A cell that the menu of runs does not hold: its option comes with its facts, and the value with the option.
  const is_late = (run) => run !== null && !listed.runs.some((one) => one.value === run);

  function runs() {
    return {options: is_late(at.run) ? [...listed.runs, {value: at.run, label: facts.name}] : listed.runs};
  }

  function show() {
    const new_facts = mine(at, facts) && shown !== facts;
    for (const name of CONTROLS) {
      const props = new_facts ? options(name) : {};
      const is_free = FREE.includes(name) && !(name === "run" && is_late(at.run));
      const value = is_free || mine(at, facts) ? at[name] : null;  // none before there are options
      if (value !== undefined && value !== null && value !== held[name] && !(name in echoes)) {
        props.value = held[name] = echoes[name] = value;
      }
      offer(name, props);
    }
    if (new_facts) shown = facts;
  }

  // Sets properties of a menu, but no list of options that it has: that would draw it again.
  const offered = {run: JSON.stringify(listed.runs)};

  function offer(name, {options: list, ...props}) {
    const text = list && JSON.stringify(list);
    if (list && offered[name] !== text) props.options = list;
    if (list) offered[name] = text;
    if (Object.keys(props).length) window.dash_clientside.set_props(name, props);
  }

  function options(name) {
    if (name === "run") return runs();
    if (name === "request") return {options: facts.requests.map((label, value) => ({label, value}))};
    if (name === "lens") return {options: facts.lenses};
    if (name === "step") return {min: facts.first, max: facts.last};
    if (name === "against") return {options: listed.runs.filter((run) => run.value !== at.run)};
    if (name !== "site") return {};
    const sites = Object.entries(listed.sites).map(([value, label]) => ({
      value, label, disabled: !facts.sites.includes(value) || (value !== "S" && !!facts.why_not),
    }));
    return {options: sites};
  }

  function heard(...values) {
    if (!is_ready) {
      CONTROLS.forEach((name, i) => { held[name] = values[i]; });
      is_ready = true;
      early.splice(0).forEach((one) => draw.answer(...one));
      draw.start(change, settled);
      keys.start(change, () => at);
      exports.start();
      flip.start(change);
      notes.start(() => at);
      visits.start(at, opened);
      zoom.start(change);
      lines.start(change, () => [at, facts]);
      settled();
      if (listed.grows) watch();
      return;
    }
    const fired = window.dash_clientside.callback_context.triggered.map((one) => one.prop_id);
    CONTROLS.forEach((name, i) => {  // the others' values may be older than what they were set to since
      const value = values[i];
      if (!fired.includes(name + ".value") || value === null || value === undefined) return;
      const is_echo = value === echoes[name], is_new = value !== held[name];
      delete echoes[name];
      held[name] = value;
      if (is_new) change({intent: "set", name, value});
      else if (is_echo) show();
    });
  }

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.cacheprobe = {heard};
  opened();
})();
