"""The contrast of every text that a page shows, as a reader sees it: WCAG's ratio of its colour and its ground."""

from typing import TypedDict

from playwright.sync_api import Page

LEAST = 4.5
"""Smallest ratio of a text's luminance to its ground's, after WCAG 2.1, 1.4.3 (AA)."""


class Faint(TypedDict):
    """A text below `LEAST`: colours are red, green and blue, 0 to 255."""

    text: str
    element: str
    ratio: float
    ink: list[float]
    ground: list[float]


_FAINT = """(least) => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const known = new Map();
  function rgba(colour) {  // any CSS colour, drawn: color-mix and variables are resolved already
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = "#000";
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(colour, [r, g, b, a / 255]);
    }
    return known.get(colour);
  }
  const over = (top, below, opacity = 1) => {
    const a = top[3] * opacity;
    return [0, 1, 2].map((i) => top[i] * a + below[i] * (1 - a)).concat(1);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((c) => (c /= 255, c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  // What is painted below a point, from the lowest element up to `self`, which is left out where it is SVG text.
  function ground(self, x, y) {
    const is_self = (one) => one === self || self.contains(one) || one.contains(self);
    const stack = document.elementsFromPoint(x, y), here = stack.findIndex(is_self);
    const is_through = getComputedStyle(self).pointerEvents === "none";  // no point tells of it: all is below it
    if (here < 0 && !is_through) return null;
    let colour = rgba(getComputedStyle(document.getElementById("page") || document.body).backgroundColor);
    const own = [];  // those of it that no point tells of
    const is_free = (one) => here < 0 && getComputedStyle(one).pointerEvents === "none";
    for (let one = self; is_free(one); one = one.parentNode) own.push(one);
    for (const one of [...own, ...stack.slice(Math.max(here, 0))].reverse()) {
      const style = getComputedStyle(one);
      if (one instanceof SVGElement && !(one instanceof SVGSVGElement)) {
        if (!["rect", "path", "circle", "ellipse", "polygon"].includes(one.localName)) continue;
        if (style.fill.startsWith("url") || style.fill === "none") continue;
        colour = over(rgba(style.fill), colour, style.fillOpacity * style.opacity);
      } else colour = over(rgba(style.backgroundColor), colour);
    }
    return colour;
  }
  const opacity = (one) => {
    let all = 1;
    for (; one && one.nodeType === 1; one = one.parentNode) all *= getComputedStyle(one).opacity;
    return all;
  };
  const root = document.querySelector("dialog[open]") || document.body;  // nothing else can be reached
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), range = document.createRange(), faint = [];
  let count = 0;
  function judge(text, element, ink, x, y) {
    const below = ground(element, x, y);
    if (!below) return;
    count++;
    const seen = over(ink, below, opacity(element)), found = ratio(seen, below);
    const names = [element, element.parentNode];
    const name_of = (one) => `${one.localName}#${one.id}.${one.getAttribute("class")}`;
    if (found < least) faint.push({text: text.trim().slice(0, 30), ratio: Math.round(found * 100) / 100,
      element: names.map(name_of).join(" < "),
      ink: seen.slice(0, 3).map(Math.round), ground: below.slice(0, 3).map(Math.round)});
  }
  for (let node; (node = walker.nextNode());) {
    const element = node.parentNode;
    if (!node.data.trim() || element.closest("script,style,title,option,[disabled]")) continue;
    const style = getComputedStyle(element);
    if (style.visibility === "hidden" || !element.checkVisibility()) continue;
    range.selectNodeContents(node);
    const box = [...range.getClientRects()].find((one) => one.width > 1 && one.height > 1);
    if (!box) continue;
    const is_svg = element instanceof SVGElement, ink = rgba(is_svg ? style.fill : style.color);
    judge(node.data, element, ink, box.left + box.width / 2, box.top + box.height / 2);
  }
  for (const input of root.querySelectorAll("input[placeholder]")) {
    if (input.value || !input.checkVisibility()) continue;
    const box = input.getBoundingClientRect();
    const {color} = getComputedStyle(input, "::placeholder");
    judge(input.placeholder, input, rgba(color), box.left + 20, box.top + box.height / 2);
  }
  return {count, faint};
}"""


def faint_texts(page: Page) -> tuple[int, list[Faint]]:
    """Returns (number of texts that were judged, those whose contrast is below `LEAST`). Makes the window as high as
    the page meanwhile: a browser tells what is under a point only inside of its window."""
    before = page.viewport_size or {"width": 1280, "height": 900}
    height = int(page.evaluate("document.documentElement.scrollHeight"))
    page.set_viewport_size({"width": before["width"], "height": height + 50})
    page.wait_for_timeout(400)
    found = page.evaluate(_FAINT, LEAST)
    page.set_viewport_size(before)
    return found["count"], found["faint"]
