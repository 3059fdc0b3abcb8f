// Elements of the page. Text is set as text alone.
const [DOUBLE_CLICK_MS, ASKING_MS] = [400, 5000];

export const byId = (id) => document.getElementById(id);
export const part = (name) => document.querySelector(`[data-part="${name}"]`);
export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
// A number times a factor; a dash for null, which is an unknown value.
export const figure = (value, digits = 2, unit = "", factor = 1) =>
  value == null ? "—" : (value * factor).toFixed(digits) + unit;

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
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

// A button of a server's row. If it asks, the first press turns it into a question for some seconds, in the
// same place and size; a second press confirms. A double click counts as one press.
export class Press {
  constructor(subject, kind, act) {
    const mark = make("span", { className: "mark" });
    this.button = make("button", { type: "button", className: `press ${kind}` }, "", mark);
    this.button.onclick = (event) => this.press(event);
    Object.assign(this, { subject, act, pressedAt: -Infinity });
  }

  show(verb, asks, enabled, incarnation) {
    const now = [verb, asks, enabled, incarnation].join();
    if (now === this.shown) return;
    // A change withdraws the question.
    Object.assign(this, { shown: now, verb, asks, enabled, incarnation });
    this.button.firstChild.data = verb;
    this.button.title = `${verb} ${this.subject}`;
    // Not `disabled`: the button keeps the focus and stays readable.
    this.button.ariaDisabled = String(!enabled);
    this.ask(false);
  }

  ask(asking) {
    clearTimeout(this.timer);
    if (asking) this.timer = setTimeout(() => this.ask(false), ASKING_MS);
    this.asking = asking;
    this.button.classList.toggle("asking", asking);
    set(this.button.lastChild, asking ? "?" : "");
    this.button.ariaLabel = `${this.button.title}${asking ? "?" : ""}`;
    this.button.ariaDescription = asking ? "Press again to confirm" : null;
  }

  press(event) {
    const doubled = event.detail > 1 || event.timeStamp - this.pressedAt < DOUBLE_CLICK_MS;
    this.pressedAt = event.timeStamp;
    if (doubled || !this.enabled) return;
    const confirmed = this.asking || !this.asks;
    this.ask(!confirmed);
    const order = { action: this.verb.toLowerCase(), server: this.subject, incarnation: this.incarnation };
    if (confirmed) this.act(this.button.title, order);
  }
}
