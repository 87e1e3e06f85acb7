// Exports a view: copies its link, saves it as SVG or PNG, saves its table as CSV, and shows its code.
(function () {
  "use strict";
  const place = (name) => document.getElementById(name);
  const SAID = 1600;  // milliseconds for which a button says that it is done
  const listed = JSON.parse(document.body.dataset.listed);

  // The element that a bar belongs to: the view's card, or the box below another card.
  const whole = (button) => button.closest("[id$=-box], .card");

  // Name of a saved file: what the view shows, as the question that it answered says.
  function file_name(view, question) {
    const {run, result} = question, parts = ["cacheprobe"];
    const label = listed.runs.find((one) => one.value === run)?.label;
    if (run !== undefined && run !== null) parts.push(label?.replace(/ \([^)]*\)$/, "") || `run ${run}`);
    if (result !== undefined) parts.push(document.querySelector(`#result-list [data-result="${result}"]`).textContent);
    else parts.push(view);
    for (const name of ["request", "step", "position"]) {
      if (question[name] !== undefined && question[name] !== null) parts.push(`${name} ${question[name]}`);
    }
    return parts.join(" ").replace(/[^\p{L}\p{N}._-]+/gu, "-");
  }

  function save(name, blob) {
    const link = document.createElement("a"), url = URL.createObjectURL(blob);
    [link.href, link.download] = [url, name];
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  function show(title, text, can_copy = true) {
    place("exports-title").textContent = title;
    place("exports-text").textContent = text;
    place("exports-copy").hidden = !can_copy;
    place("exports").showModal();
  }

  // A browser lets a page copy only from this machine, or from a server with https.
  async function copy(text) {
    if (!navigator.clipboard) return false;
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch (error) {
      if (error.name !== "NotAllowedError") throw error;
      return false;
    }
  }

  function done(button, says) {
    const before = button.dataset.name ||= button.textContent;
    button.textContent = says;
    setTimeout(() => { button.textContent = before; }, SAID);
  }

  async function asked(view, way, question) {
    const body = JSON.stringify({export: {view, way, question}}), headers = {"Content-Type": "application/json"};
    const reply = await fetch("ask", {method: "POST", headers, body});
    if (!reply.ok) throw new Error(await reply.text());
    const answer = JSON.parse(await reply.text());
    if (answer.error) throw new Error(answer.error);
    return answer;
  }

  async function png({markup, width, height}) {
    const image = new Image(), canvas = document.createElement("canvas");
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(markup);
    await image.decode();
    const scale = Math.min(2, 16000 / Math.max(width, height));  // browsers draw no larger canvas
    [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((drawn, failed) => canvas.toBlob((blob) =>
      blob ? drawn(blob) : failed(new Error("the browser drew no image of this size")), "image/png"));
  }

  const WAYS = {
    link: async (button) => {
      const url = location.href.split("#")[0] + "#" + whole(button).id;
      if (await copy(url)) done(button, "copied ✓");
      else show("Copy this link", url, false);
    },
    svg: (button, name) => {
      const {markup} = window.cacheprobe.picture(whole(button));
      save(name + ".svg", new Blob([markup], {type: "image/svg+xml"}));
    },
    png: async (button, name) => save(name + ".png", await png(window.cacheprobe.picture(whole(button)))),
    csv: async (button, name, view, question) => {
      const {csv, recorded} = await asked(view, "csv", question), type = "text/csv;charset=utf-8";
      save((recorded ? `${name}-${recorded.replaceAll(" ", "-")}` : name) + ".csv", new Blob([csv], {type}));
      if (recorded) done(button, "CSV so far");
      button.title = recorded ? `${listed.ways.csv[1]}, ${recorded}` : listed.ways.csv[1];
    },
    code: async (button, name, view, question) => show("In a notebook", (await asked(view, "code", question)).code),
  };

  async function take(button) {
    const {export: way, view} = button.dataset, answer = place(view + "-view").dataset.answer;
    const slow = setTimeout(() => button.setAttribute("aria-busy", true), 300);
    try {
      if (!answer) throw new Error("the view is not drawn yet");
      const question = JSON.parse(answer);
      await WAYS[way](button, file_name(view, question), view, question);
    } catch (error) {
      show("This cannot be exported", error.message, false);
    } finally {
      clearTimeout(slow);
      button.removeAttribute("aria-busy");
    }
  }

  // A link that was copied at a view leads to that view, as soon as all above it is drawn, unless the reader moves on.
  function go_to(name) {
    const moves = ["wheel", "pointerdown", "keydown"], end = performance.now() + 20000;
    const stop = () => {
      clearInterval(looking);
      moves.forEach((move) => removeEventListener(move, stop, true));
    };
    const looking = setInterval(() => {
      const card = place(name), views = [...document.querySelectorAll("[id$=-view]")].filter((one) => one.checkVisibility());
      if (performance.now() > end) stop();
      if (!card || !card.checkVisibility() || document.querySelector(".asking")) return;
      if (!views.length || views.some((one) => one.closest(".card") && !one.closest(".gave") && !one.dataset.answer)) return;
      stop();
      card.scrollIntoView({block: "start"});
    }, 100);
    moves.forEach((move) => addEventListener(move, stop, true));
  }

  // Dash would take longer for so many buttons than for the rest of the page.
  function start() {
    for (const bar of document.querySelectorAll("[data-ways]")) {
      bar.replaceChildren(...bar.dataset.ways.split(" ").map((way) => {
        const button = document.createElement("button");
        [button.textContent, button.title] = listed.ways[way];
        [button.dataset.export, button.dataset.view] = [way, bar.dataset.of];
        return button;
      }));
    }
  }

  document.addEventListener("click", async ({target}) => {
    const button = target.closest("[data-export]");
    if (button) take(button);
    else if (target.id === "exports-copy") {
      if (await copy(place("exports-text").textContent)) done(target, "Copied ✓");
      else done(target, "Select the text and copy it");
    } else if (target.matches("#exports, #exports .plain")) place("exports").close();
  });
  window.cacheprobe = {...window.cacheprobe, exports: {start}};
  if (/^#[\w-]+-(card|box)$/.test(location.hash)) go_to(location.hash.slice(1));
})();
