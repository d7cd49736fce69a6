// Small makers of elements. Text always goes in as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.setAttribute("class", value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function panel(id, title, why, ...content) {
  // A card: a heading, a sentence or two that explain it, and what it shows.
  return el(
    "section",
    { class: "panel", id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    why && el("p", { class: "why" }, why),
    ...content,
  );
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
