// Elements and texts. Data becomes text nodes and attributes only, never markup.

/** An element with properties (class, text, attributes) and children. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Sets a text only if it changed, so that selections and screen readers aren't disturbed. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 12345 -> 12,345; 0.25 -> 0.3 */
export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 10 && !Number.isInteger(value)) return value.toFixed(1);
  return WHOLE.format(value);
}

export function percent(share) {
  return share === null || Number.isNaN(share) ? "–" : `${Math.round(100 * share)} %`;
}

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 10_000) return `${Math.round(ms / 1000)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return `${count(ms)} ms`;
}

export function age(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}
