// "What would have changed it?": starts the background process of a rejected draft, follows it, and shows its figure.
(function () {
  "use strict";
  const WAIT = 400;  // milliseconds between two questions
  const place = (name) => document.getElementById(name);
  let shown = null;  // the data-flip of the button whose answer is shown, as text
  let last = "";  // the html that is shown
  let turn = 0;  // number of the newest loop that follows a process; an older one ends

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

  // What is shown belongs to the card above it.
  function left() {
    const buttons = [...document.querySelectorAll("#card-view [data-flip]")];
    if (shown !== null && !buttons.some((button) => button.dataset.flip === shown)) hide();
  }

  document.addEventListener("click", ({target}) => {
    const button = target.closest("[data-flip]"), act = target.closest("[data-flip-do]");
    if (button) {
      shown = button.dataset.flip;
      follow("start");
    } else if (act && shown !== null) follow(act.dataset.flipDo);
  });

  const began = setInterval(() => {  // Dash draws the page later than it loads this
    if (!place("card-view")) return;
    clearInterval(began);
    new MutationObserver(left).observe(place("card-view"), {childList: true, subtree: true, attributes: true});
    new MutationObserver(() => { if (shown !== null) follow("look"); })
      .observe(document.documentElement, {attributeFilter: ["data-theme"]});
  }, 100);
})();
