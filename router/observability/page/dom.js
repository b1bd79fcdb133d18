// Elements made from data. Text is only ever set as text, so nothing in it can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes; `class`, `text` and on-handlers are as they sound. */
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

/** Sets text only where it differs: a selection in it stays, and nothing is laid out again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Makes the children of `parent` those of `items`, in their order. `make(item)` gives a node for an item whose `key`
 * was not there, `update(node, item)` brings it up to date.
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
