// Elements of the page. Text is set as text alone.
const DOUBLE_CLICK_MS = 400;

export const byId = (id) => document.getElementById(id);
export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
// A number times a factor; a dash for null, which is an unknown value.
export const figure = (value, digits = 2, unit = "", factor = 1) =>
  value == null ? "—" : (value * factor).toFixed(digits) + unit;

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

export function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Gives an element a child for each item, made by a tag or a function. A child stays while its key is there, and
// with it the focus, an open question and what is unfolded. The key is the index, unless a function makes it.
export function fill(parent, items, create, show, key = (_, i) => i) {
  const old = new Map([...parent.children].map((child) => [child.key, child]));
  items.forEach((item, i) => {
    const name = key(item, i);
    const made = () => (typeof create === "string" ? make(create) : create(item, i));
    const child = old.get(name) ?? Object.assign(made(), { key: name });
    old.delete(name);
    if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] ?? null);
    show(child, item, i);
  });
  for (const child of old.values()) child.remove();
}

// Fills the table in an element, and returns its rows. The first cell identifies a row; null leaves a cell alone.
export function table(place, lists) {
  const columns = [...place.querySelectorAll("thead th")];
  const cell = ({ className }, i) => make(i ? "td" : "th", { className, scope: i ? "" : "row" });
  const body = place.querySelector("tbody");
  const state = columns.findIndex((column) => column.textContent === "State");
  const show = (row, texts) => {
    texts.forEach((text, i) => text !== null && set(row.cells[i], text));
    if (state > 0) row.cells[state].className = `state ${texts[state].toLowerCase()}`;
  };
  fill(body, lists, () => make("tr", {}, ...columns.map(cell)), show, ([name]) => name);
  return body.rows;
}

// Asks for a confirmation in the page's dialog, which opens with the focus on its first button, Cancel. A double
// click on what opened it confirms nothing.
export function ask(what, then) {
  const [dialog, openedAt] = [byId("confirm"), performance.now()];
  const [question, , confirm] = dialog.firstElementChild.children;
  set(question, `${what}?`);
  set(confirm, what);
  dialog.returnValue = "";
  dialog.onclose = () => dialog.returnValue && performance.now() - openedAt > DOUBLE_CLICK_MS && then();
  dialog.showModal();
}
