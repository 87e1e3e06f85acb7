// Draws an element of the page, text and pictures alike, as one SVG that needs neither the page nor its styles.
(function () {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg", PAD = 12;
  const SKIPPED = ".exports,.waiting,.menus,.finder,.filters,.ranges,.pages,.turns,.verdicts,.flips,.modebar,input,progress,button.plain:not(td *)";
  const INHERITED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap",
    "stroke-linejoin", "stroke-opacity", "font-family", "font-size", "font-weight", "font-style", "text-anchor",
    "paint-order", "visibility"];
  const OWN = {opacity: "1", "clip-path": "none", "stop-color": "rgb(0, 0, 0)", "stop-opacity": "1",
    "dominant-baseline": "auto", "image-rendering": "auto"};
  const UNDRAWN = new Set(["defs", "title", "desc", "style", "clipPath", "pattern", "linearGradient", "symbol", "mask"]);
  const CLEAR = ["rgba(0, 0, 0, 0)", "transparent"];
  const context = document.createElement("canvas").getContext("2d");

  function element(name, attributes, parent) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (parent) parent.append(made);
    return made;
  }

  // A copy of a drawn SVG element with the styles that the page gives it written out.
  function copy(root) {
    const made = root.cloneNode(true), gone = [], styles = new Map();
    const olds = [root, ...root.querySelectorAll("*")], news = [made, ...made.querySelectorAll("*")];
    olds.forEach((old, i) => {
      const style = getComputedStyle(old), one = news[i], above = i ? styles.get(old.parentNode) : null, own = {};
      styles.set(old, own);
      if (style.display === "none" && !UNDRAWN.has(old.localName)) gone.push(one);
      for (const name of INHERITED) {
        own[name] = style.getPropertyValue(name);
        if (!above || above[name] !== own[name] || one.hasAttribute(name)) one.setAttribute(name, own[name]);
      }
      for (const [name, plain] of Object.entries(OWN)) {
        const value = style.getPropertyValue(name);
        if (value !== plain) one.setAttribute(name, value);
      }
      for (const {name} of [...one.attributes]) {
        if (name.startsWith("data-") || ["class", "tabindex", "style"].includes(name)) one.removeAttribute(name);
      }
    });
    gone.forEach((one) => one.remove());
    return made;
  }

  // Patterns and clips that the copies point to and that other parts of the page define.
  function add_definitions(whole) {
    const defs = element("defs", {}), missing = () => {
      const text = new XMLSerializer().serializeToString(whole);
      const names = [...text.matchAll(/(?:url\((?:&quot;|["'])?#|href="#)([^)"'&]+)/g)].map((found) => found[1]);
      return [...new Set(names)].filter((name) => !whole.querySelector(`[id="${CSS.escape(name)}"]`) && place_of(name));
    };
    whole.prepend(defs);
    for (let names = missing(); names.length; names = missing()) {
      names.forEach((name) => defs.append(copy(place_of(name))));
    }
  }

  const place_of = (name) => document.getElementById(name);

  // Lines of a text as they are broken on the page: [{text, rect}].
  function lines_of(node) {
    const range = document.createRange(), found = [];
    range.selectNodeContents(node);
    const rects = [...range.getClientRects()].filter((rect) => rect.width > 0);
    if (rects.length < 2) return rects.map((rect) => ({text: node.data, rect}));
    let at = 0;
    for (const letter of node.data) {
      range.setStart(node, at);
      range.setEnd(node, at += letter.length);
      const rect = range.getClientRects()[0], last = found.at(-1);
      if (!rect || (last && Math.abs(rect.top - last.rect.top) < 3)) {
        if (last) last.text += letter;
      } else found.push({text: letter, rect});
    }
    return found;
  }

  const measured = new Map();  // by font

  function metrics(font) {
    if (!measured.has(font)) {
      context.font = font;
      measured.set(font, {ascent: context.measureText("x").fontBoundingBoxAscent, space: context.measureText(" ").width});
    }
    return measured.get(font);
  }

  function draw_text(node, page) {
    const style = getComputedStyle(node.parentNode), keeps_spaces = style.whiteSpace.startsWith("pre");
    if (!node.data.trim() && !keeps_spaces) return;
    const {ascent, space} = metrics(`${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`);
    const struck = node.parentNode.closest("del");
    for (const {text, rect} of lines_of(node)) {
      const shown = keeps_spaces ? text.replace(/\n/g, "") : text.replace(/\s+/g, " ").replace(/^ | $/g, "");
      if (!shown) continue;
      const starts_with_space = !keeps_spaces && /^\s/.test(text) && rect.left > page.left;
      const x = rect.left + (starts_with_space && range_keeps(node) ? space : 0);
      const made = element("text", {x: x - page.left, y: rect.top - page.top + ascent, fill: style.color,
        "font-family": style.fontFamily, "font-size": style.fontSize, "font-weight": style.fontWeight,
        "font-style": style.fontStyle, style: "white-space:pre"}, page.made);
      if (struck) made.setAttribute("text-decoration", "line-through");
      made.textContent = shown;
      page.reach(rect);
    }
  }

  // Whether a space at the beginning of a text is drawn: one after other words of its line.
  function range_keeps(node) {
    const before = node.previousSibling;
    return !!before && getComputedStyle(node.parentNode).display !== "flex" &&
      (before.nodeType === Node.TEXT_NODE || getComputedStyle(before).display.startsWith("inline"));
  }

  function draw_outline(box, style, radius, page) {
    const wide = parseFloat(style.outlineWidth), grown = parseFloat(style.outlineOffset) + wide / 2;
    page.frames.push(element("rect", {x: box.left - page.left - grown, y: box.top - page.top - grown,
      width: Math.max(box.width + 2 * grown, 0), height: Math.max(box.height + 2 * grown, 0), rx: radius, fill: "none",
      stroke: style.outlineColor, "stroke-width": wide}));
  }

  // A text that wraps has a box for each of its lines.
  function draw_boxes(node, style, page) {
    const boxes = style.display === "inline" ? [...node.getClientRects()] : [node.getBoundingClientRect()];
    for (const box of boxes) draw_box(box, style, page);
  }

  function draw_box(box, style, page) {
    const radius = parseFloat(style.borderTopLeftRadius) || 0;
    if (!box.width || !box.height) return;
    const sides = ["Top", "Right", "Bottom", "Left"].map((side) => ({
      width: style[`border${side}Style`] === "none" ? 0 : parseFloat(style[`border${side}Width`]),
      color: style[`border${side}Color`],
    }));
    if (style.outlineStyle === "solid" && parseFloat(style.outlineWidth)) draw_outline(box, style, radius, page);
    const is_framed = sides.every(({width}) => width > 0), has_ground = !CLEAR.includes(style.backgroundColor);
    const [x, y] = [box.left - page.left, box.top - page.top], half = is_framed ? sides[0].width / 2 : 0;
    if (is_framed || has_ground) {
      element("rect", {x: x + half, y: y + half, width: Math.max(box.width - 2 * half, 0),
        height: Math.max(box.height - 2 * half, 0), rx: radius, fill: has_ground ? style.backgroundColor : "none",
        ...(is_framed ? {stroke: sides[0].color, "stroke-width": sides[0].width} : {})}, page.made);
      page.reach(box);
    }
    if (is_framed) return;
    const [right, bottom] = [x + box.width, y + box.height];
    const ends = [[x, y, right, y], [right, y, right, bottom], [x, bottom, right, bottom], [x, y, x, bottom]];
    sides.forEach(({width, color}, i) => {
      if (!width || CLEAR.includes(color)) return;
      const [x1, y1, x2, y2] = ends[i];
      element("line", {x1, y1, x2, y2, stroke: color, "stroke-width": width}, page.made);
    });
  }

  function draw(node, page) {
    if (node.nodeType === Node.TEXT_NODE) return draw_text(node, page);
    if (node.nodeType !== Node.ELEMENT_NODE || node.matches(SKIPPED)) return;
    if (node !== page.root && node.matches("[id$=-box]")) return;  // a view of its own, below another
    const style = getComputedStyle(node);
    if (style.display === "none" || style.visibility === "hidden") return;
    if (node.localName === "svg") {
      const box = node.getBoundingClientRect(), made = copy(node);
      if (!box.width || !box.height) return;
      if (!made.hasAttribute("viewBox")) made.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
      const at = {x: box.left - page.left, y: box.top - page.top, width: box.width, height: box.height};
      Object.entries(at).forEach(([name, value]) => made.setAttribute(name, value));
      made.setAttribute("overflow", style.overflow === "hidden" ? "hidden" : "visible");
      page.made.append(made);
      return page.reach(box);
    }
    if (node !== page.root) draw_boxes(node, style, page);
    node.childNodes.forEach((child) => draw(child, page));
  }

  // What is scrolled in its box is drawn whole: the boxes are opened while it is measured, before the page is painted.
  function opened(root, act) {
    const boxes = [...root.querySelectorAll("*")].filter((one) => one.scrollTop || one.scrollLeft);
    const places = boxes.map((one) => [one, one.scrollTop, one.scrollLeft]);
    root.classList.add("taken");
    try {
      return act();
    } finally {
      root.classList.remove("taken");
      places.forEach(([one, top, left]) => Object.assign(one, {scrollTop: top, scrollLeft: left}));
    }
  }

  // {markup, width, height} of an element of the page.
  function picture(root) {
    return opened(root, () => {
      const {left, top} = root.getBoundingClientRect(), style = getComputedStyle(root);
      const page = {root, left: left - PAD + parseFloat(style.paddingLeft), top: top - PAD + parseFloat(style.paddingTop),
        made: element("svg", {}), frames: [], right: 0, bottom: 0};
      page.reach = (rect) => {
        page.right = Math.max(page.right, rect.right - page.left);
        page.bottom = Math.max(page.bottom, rect.bottom - page.top);
      };
      root.childNodes.forEach((child) => draw(child, page));
      page.made.append(...page.frames);  // above all, as the page has them
      const [width, height] = [Math.ceil(page.right) + PAD, Math.ceil(page.bottom) + PAD];
      const paper = getComputedStyle(place_of("page")).backgroundColor;
      page.made.prepend(element("rect", {width, height, fill: paper}));
      for (const [name, value] of Object.entries({width, height, viewBox: `0 0 ${width} ${height}`})) {
        page.made.setAttribute(name, value);
      }
      add_definitions(page.made);
      return {markup: new XMLSerializer().serializeToString(page.made) + "\n", width, height};
    });
  }

  window.cacheprobe = {...window.cacheprobe, picture};
})();
