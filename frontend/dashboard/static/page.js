// The dashboard: asks the endpoint for a snapshot of the cluster, again and again, and shows it. Text of
// members becomes text nodes and values of attributes; the page's policy lets nothing parse it.
import { chat } from "./chat.js";
import { ask, byId, fill, figure, make, plural, post, set, table } from "./elements.js";
import { curves, load, milliseconds, placement } from "./pictures.js";

const PATIENCE_MS = 15_000;
// What shows a snapshot, by the id of its place.
const PARTS = { summary, members, load, placement, curves, events, decisions, chat };
const dismissed = new Set();
let [data, lost] = [{ alerts: [] }, null];

async function poll() {
  try {
    const asked = { signal: AbortSignal.timeout(PATIENCE_MS) };
    const answer = await fetch(`eaas/v1/snapshot?layer=${byId("layer").value}`, asked);
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    [data, lost] = [await answer.json(), null];
  } catch (error) {
    const since = lost?.since ?? new Date().toLocaleTimeString();
    const line = `The endpoint has not answered since ${since} (${error.message}).`;
    lost = { key: "lost", level: "bad", lines: [`${line} The data below is of that time.`], since };
  }
  setTimeout(poll, 1000 * (data.period_s ?? 1));
  alerts();
  if (!lost) draw();
}

function draw() {
  set(byId("model"), data.model);
  document.body.classList.toggle("buttons", data.is_operator === true);
  byId("read-only").hidden = data.is_operator !== false;
  for (const [id, show] of Object.entries(PARTS)) show(byId(id), data);
  // The default is the current number of servers: pressing the button then changes nothing.
  byId("servers").value ||= living() || "";
}

const isServer = (m) => m.role === "expert-server";
const isClient = (m) => m.role === "attention-client";
const isGone = (m) => m.state === "DEAD" || m.state === "LEFT";
const living = () => data.members.filter((m) => isServer(m) && !isGone(m)).length;

const allAlerts = () => (lost ? [lost, ...data.alerts] : data.alerts);

function alerts() {
  const all = allAlerts();
  // A dismissed alert returns only after it has ended.
  for (const key of dismissed) if (!all.some((alert) => alert.key === key)) dismissed.delete(key);
  const shown = all.filter((alert) => !dismissed.has(alert.key));
  const show = (element, { level, lines }) => {
    element.className = `alert ${level}`;
    fill(element, lines, "p", set);
  };
  fill(byId("alerts"), shown, "div", show, (alert) => alert.key);
  const isBad = all.some((alert) => alert.level === "bad");
  byId("verdict").className = isBad ? "bad" : all.length ? "mild" : "serving";
  set(byId("verdict"), all.length ? plural(all.length, "alert") : data.model ? "all is well" : "");
}

function summary(place, { members, epoch, coverage, rates, balance }) {
  const serving = (role) => {
    const all = members.filter(role);
    const found = all.filter((m) => m.state === "SERVING");
    return all.length ? `${found.length} of ${all.length} serving` : "—";
  };
  const covered = coverage && `≥ ${coverage.min_replicas}, on ${plural(coverage.min_nodes, "node")}`;
  const tiles = [
    ["Expert servers", serving(isServer)],
    ["Attention clients", serving(isClient)],
    ["Live replicas", coverage?.uncovered.length ? `${coverage.uncovered.length} uncovered` : (covered ?? "—")],
    ["Epoch", coverage ? `${epoch}` : "—"],
    ["PAR", figure(balance.par)],
    ["Bound", figure(balance.bound)],
    ["Gap", figure(balance.gap)],
    ["Tokens/s", figure(rates.tokens_per_s, 1)],
    ["TTFT", milliseconds(rates.ttft_s)],
    ["ITL", milliseconds(rates.itl_s)],
  ];
  const create = (_, i) => make(i ? "dd" : "dt");
  fill(place, tiles, "div", (tile, texts) => fill(tile, texts, create, set));
}

function members(place, { members: all }) {
  const cells = (m) => {
    const gone = isGone(m);
    return [
      m.id, m.state, null, `${m.incarnation}`,
      isServer(m) ? `${m.experts}` : "—", gone ? "—" : `${m.in_flight}`, figure(m.utilisation, 0, "%", 100),
      gone ? "—" : figure(m.lease_age_s, 1, " s"), `${m.pid}`, m.address,
    ];
  };
  const rows = table(place, all.map(cells));
  all.forEach((m, i) => (isServer(m) || m.is_engine) && buttons(rows[i].cells[2], m));
  const loads = all.filter((m) => m.loading).map((m) => `${m.id} loads ${m.loading.text}`);
  fill(byId("loading"), loads, "p", set);
}

function buttons(cell, m) {
  const [alive, paused] = [!isGone(m), data.paused.includes(m.id)];
  // A paused process becomes DEAD and can still be resumed.
  const [verb, enabled] = [paused ? "Resume" : "Pause", paused || alive];
  const kinds = [["Kill", "danger", alive, true], [verb, "", enabled, !paused]];
  if (!cell.firstChild) cell.append(make("div", { className: "actions" }));
  fill(cell.firstChild, kinds, "button", (button, [name, className, isEnabled, asks]) => {
    const order = { action: name.toLowerCase(), member: m.id, incarnation: m.incarnation };
    // Not `disabled`: the button keeps the focus and stays readable.
    const aria = { ariaLabel: `${name} ${m.id}`, ariaDisabled: String(!isEnabled) };
    Object.assign(button, { className, ...aria, asks, order: () => order });
    set(button, name);
  });
}

function events(place, { events: found }) {
  set(place.querySelector(".note"), found.length ? "" : "No events since the first viewer opened this page.");
  const create = () => make("li", {}, make("time"), " ", make("bdi"), " ", make("bdi"));
  fill(place.querySelector("ol"), found.slice(0, 60), create, (item, { kind, ago_s, subject, text }) => {
    const ago = ago_s < 120 ? figure(ago_s, 0, " s ago") : figure(ago_s, 0, " min ago", 1 / 60);
    item.className = kind;
    [ago, subject, text].forEach((each, i) => set(item.children[i], each));
  });
}

function decisions(place, { decisions: found }) {
  const none = `The balancer ${found ? "has made no decisions." : "has not told its decisions yet."}`;
  set(place.querySelector(".note"), found?.length ? "" : none);
  const cells = (d) => [
    `${d.number}`, d.trigger, d.policy || "—", d.verdict,
    d.par_now ? `${figure(d.par_now)} → ${figure(d.par_then || null)}` : "—",
    d.is_counted ? `${d.transit}` : "—", d.reason + (d.given_up && ` Given up: ${d.given_up}`),
  ];
  table(place, (found ?? []).map(cells));
}

// Asks for an action of a button, and shows what comes of it.
async function act(what, order) {
  const status = byId("operate-status");
  set(status, `${what} …`);
  try {
    const answer = await post("eaas/v1/actions", order);
    set(status, answer.ok ? (await answer.json()).message : await answer.text());
  } catch (error) {
    set(status, `${what}: the endpoint does not answer (${error.message}).`);
  }
}

byId("start").order = () => ({ action: "scale", servers: living() + 1 });
byId("scale").order = () => ({ action: "scale", servers: byId("servers").valueAsNumber });
byId("rebalance").order = () => ({ action: "rebalance" });
document.body.onclick = ({ target, detail }) => {
  // A double click counts as one press.
  if (!target.order || target.ariaDisabled === "true" || detail > 1) return;
  const [what, order] = [target.ariaLabel ?? target.textContent, target.order()];
  if (target.asks) ask(what, () => act(what, order));
  else act(what, order);
};
byId("dismiss").onclick = () => {
  for (const alert of allAlerts()) dismissed.add(alert.key);
  alerts();
};
const isWide = matchMedia("(min-width: 621px)").matches;
for (const section of document.querySelectorAll(".card > details")) section.open = isWide;
poll();
