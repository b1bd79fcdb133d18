// Creates elements from data. Text is always set as text, so it cannot become markup.

const SVG = "http://www.w3.org/2000/svg";

/** Creates an element. Attributes include `class`, `text` and event handlers such as `onclick`. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Sets text only if it differs, which keeps a selection in it and avoids a new layout. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Matches the children of `parent` to `items`, in the order of `items`. `make(item)` creates the
 * node of an item with a new `key`; `update(node, item)` updates a node.
 */
export function keyed(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  const taken = new Set();
  let next = parent.firstElementChild;
  for (const item of items) {
    let name = String(key(item));
    while (taken.has(name)) name += "+";
    taken.add(name);
    let node = old.get(name);
    old.delete(name);
    if (!node) {
      node = make(item);
      node.dataset.key = name;
    }
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
    update(node, item);
  }
  for (const node of old.values()) node.remove();
}
