// Notes: the dialog that writes one on the chosen token or request, the list's buttons, and the marks in the text.
(function () {
  "use strict";
  const place = (name) => document.getElementById(name);
  let current = null;

  function element(name, about, ...content) {
    const made = Object.assign(document.createElement(name), about);
    made.append(...content);
    return made;
  }

  // The lines of the list that are about a request, by the position of the row that predicts the token; "" for a note on
  // the request.
  function noted(request) {
    const lines = [...document.querySelectorAll("#notes-view [data-noted]")];
    return new Map(lines.filter(({dataset}) => Number(dataset.noted) === request).map((line) => [line.dataset.at, line]));
  }

  // Marks the tokens of the text that have a note.
  function mark({request}) {
    const lines = noted(request);
    for (const token of document.querySelectorAll("#text-view span[data-position]")) {
      const line = lines.get(token.dataset.position);
      token.classList.toggle("noted", !!line);
      if (line) token.dataset.note = line.dataset.text;
      else delete token.dataset.note;
    }
  }

  // Sends a note, or what to remove, and draws the list that the server answers. Returns what went wrong, or "".
  async function send(note) {
    const {run} = current(), body = JSON.stringify({note: {run, ...note}});
    let answer = null;
    try {
      const reply = await fetch("note", {method: "POST", headers: {"Content-Type": "application/json"}, body});
      if (!reply.ok) return await reply.text();
      answer = await reply.json();
    } catch (error) {
      return `the server does not answer (${error.message})`;
    }
    if (answer.error) return answer.error;
    if (run === current().run) window.cacheprobe.draw.answer("notes", {run}, answer);
    return "";
  }

  function tell(error) {
    const shown = error && error[0].toUpperCase() + error.slice(1).trim();
    place("note-error").textContent = shown;
    return !error;
  }

  function is_of_token() {
    return document.querySelector("#note input:checked").value === "token";
  }

  // Shows the text of the note that the chosen place has.
  function fill() {
    const {request, position} = current(), line = noted(request).get(is_of_token() ? String(position) : "");
    place("note-text").value = line ? line.dataset.text : "";
  }

  function open() {
    const {run, request, position} = current(), dialog = place("note");
    if (dialog.open || run === null || !Number.isInteger(position)) return;
    const token = document.querySelector(`#text-view span[data-position="${position}"]`);
    place("note-title").textContent = `Note on request ${request}, position ${position + 1}`;
    place("note-token").textContent = token ? ` the token “${token.textContent}”` : " the token";
    dialog.querySelector("input").checked = true;
    fill();
    tell("");
    dialog.showModal();
    place("note-text").focus();
  }

  async function save() {
    const {request, position} = current(), text = place("note-text").value;
    if (tell(await send({request, position: is_of_token() ? position : null, text}))) place("note").close();
  }

  async function remove(button) {
    const error = await send({remove: button.dataset.remove});
    if (error) button.after(element("small", {role: "alert"}, ` ${error}`));
  }

  function fill_dialog() {
    const choice = (value, id, text) => element("label", {}, element("input", {type: "radio", name: "note-about", value}),
      element("span", {id}, text));
    const area = element("textarea", {id: "note-text", rows: 4, maxLength: place("note").dataset.most,
      placeholder: "without a text, the place is pinned"});
    area.setAttribute("aria-label", "text of the note");
    const buttons = [["note-save", "Save"], ["note-close", "Close"]];
    const bar = element("div", {className: "verdicts"}, ...buttons.map(([id, text]) =>
      element("button", {id, className: "plain"}, text)));
    place("note").replaceChildren(element("h2", {id: "note-title"}), choice("token", "note-token", ""),
      choice("request", "note-request", " the whole request"), area, element("p", {id: "note-error", role: "alert"}), bar);
  }

  function start(at) {
    current = at;
    fill_dialog();
    place("note-open").addEventListener("click", open);
    place("note").addEventListener("change", ({target}) => { if (target.type === "radio") fill(); });
    place("note").addEventListener("keydown", ({key, ctrlKey, metaKey}) => {
      if (key === "Enter" && (ctrlKey || metaKey)) save();
    });
    place("note-save").addEventListener("click", save);
    place("note-close").addEventListener("click", () => place("note").close());
    place("notes-view").addEventListener("click", ({target}) => {
      const button = target.closest("[data-remove]");
      if (button) remove(button);
    });
  }

  window.cacheprobe = {...window.cacheprobe, notes: {mark, open, start}};
})();
