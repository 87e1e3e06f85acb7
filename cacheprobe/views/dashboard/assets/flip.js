// "What would have changed it?": starts the search for edits of a rejected draft, follows it, and shows its figure. The
// address holds the step that judged the draft (flip), so a link leads to the figure, or to a button that starts it.
(function () {
  "use strict";
  const WAIT = 400;  // milliseconds between two questions
  const place = (name) => document.getElementById(name);
  let shown = null;  // {run, request, step} of the draft whose answer is shown, as text
  let last = "";  // the html that is shown
  let turn = 0;  // number of the newest loop that follows a search; an older one ends
  let change = null, begins = false;

  async function ask(what) {
    const question = {...JSON.parse(shown), do: what, theme: document.documentElement.dataset.theme};
    const body = JSON.stringify({flip: question}), headers = {"Content-Type": "application/json"};
    const reply = await fetch("ask", {method: "POST", headers, body});
    if (!reply.ok) throw new Error(await reply.text());
    return JSON.parse(await reply.text());
  }

  // Markup comes from the server, which escapes every text of a run.
  function draw({html, graphs, more}) {
    if (shown !== null) place("flip-view").dataset.answer = shown;
    if (html !== last) place("flip-view").innerHTML = last = html;
    place("flip-place").hidden = !graphs;
    if (graphs) window.dash_clientside.set_props("flip-place", {children: graphs});
    place("flip-more").innerHTML = more || "";
    place("flip-box").hidden = false;
  }

  async function follow(what) {
    const own = ++turn;
    try {
      for (;;) {
        const answer = await ask(what);
        if (own !== turn) return;
        draw(answer);
        if (!answer.goes_on) return;
        what = "look";
        await new Promise((next) => setTimeout(next, WAIT));
        if (own !== turn) return;
      }
    } catch (error) {
      if (own !== turn) return;
      draw({html: ""});
      place("flip-view").textContent = last = `The server does not answer (${error.message}).`;
    }
  }

  function hide() {
    shown = null;
    turn++;
    last = "";
    place("flip-box").hidden = true;
  }

  // What is shown is what the page's state says: of the draft at its place, judged in its step `flip`.
  function state({run, request, flip}) {
    const is_chosen = flip !== null && flip !== undefined, wanted = is_chosen ? JSON.stringify({run, request, step: flip}) : null;
    if (wanted === null && shown !== null) hide();
    if (wanted === null || (wanted === shown && !begins)) return;
    shown = wanted;
    follow(begins ? "start" : "open");
    begins = false;
  }

  document.addEventListener("click", ({target}) => {
    const button = target.closest("[data-flip]"), act = target.closest("[data-flip-do]");
    if (button) {
      begins = true;
      change({intent: "flip", step: JSON.parse(button.dataset.flip).step});
    } else if (act && shown !== null) follow(act.dataset.flipDo);
  });

  function start(changes) {
    change = changes;
    new MutationObserver(() => { if (shown !== null) follow("open"); })
      .observe(document.documentElement, {attributeFilter: ["data-theme"]});
  }

  window.cacheprobe = {...window.cacheprobe, flip: {start, state}};
})();
