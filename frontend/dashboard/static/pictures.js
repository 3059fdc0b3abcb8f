// The page's heat maps and curves, each with its figures in text or a table.
import { byId, figure, fill, make, plural, set, table } from "./elements.js";

// Longer names, together, do not fit below a heat map.
const NAMED_CHARACTERS = 40;
// Least length of the time axis, and height of a chart.
const [LEAST_S, HEIGHT] = [60, 150];

// From blue (no load) through transparent (the mean) to orange (twice the mean or more).
const balance = (v) => (v < 1 ? [37, 99, 235, 230 - 215 * v] : [234, 88, 12, 15 + 240 * (v - 1)]);
// From transparent (no replica) to solid (the whole share).
const share = (v) => [13, 148, 136, v && 64 + 191 * v];
const sum = (values) => values.reduce((total, value) => total + value, 0);
export const milliseconds = (seconds) => figure(seconds, 0, " ms", 1e3);

// Shows a heat map of one pixel a value, which the browser enlarges, with its table; without values the text alone.
function heatmap(place, text, values, colour, label, rows) {
  set(place.querySelector(".note"), text);
  place.classList.toggle("unknown", !values);
  if (!values) return;
  const canvas = place.querySelector("canvas");
  [canvas.width, canvas.height] = [values[0].length, values.length];
  canvas.style.height = `${Math.max(48, Math.min(420, values.length * 16))}px`;
  const pixels = new Uint8ClampedArray(values.flat().flatMap(colour));
  canvas.getContext("2d").putImageData(new ImageData(pixels, canvas.width), 0, 0);
  canvas.ariaLabel = label;
  table(place, rows);
}

export function load(place, { load: found }) {
  if (!found) return heatmap(place, "The load is not known yet.");
  const { tokens, speeds, servers, par } = found;
  const nothing = "No expert has computed anything in the balancer's window.";
  if (!tokens.flat().some(Boolean)) return heatmap(place, nothing);
  // Time of each server over the layer's mean; 1 in an idle layer.
  const relative = tokens.map((layer) => {
    const times = layer.map((pairs, s) => pairs / speeds[s]);
    const mean = sum(times) / times.length;
    return times.map((time) => (mean ? time / mean : 1));
  });
  const text =
    `Rows: MoE layers 0 to ${tokens.length - 1}. Columns: expert servers. Value: (token, expert) pairs divided ` +
    `by speed, relative to the layer's mean, in the last ${figure(found.window_s, 0)} s with load.`;
  const worst = par.indexOf(Math.max(...par));
  const label =
    `Heatmap of ${tokens.length} MoE layers by ${servers.length} expert servers. Layer ${worst} is the most ` +
    `uneven, with a PAR of ${figure(par[worst])}. The table has the sums by server.`;
  const of = (rows, s) => sum(rows.map((row) => row[s]));
  const cells = (name, s) => [
    name, of(tokens, s).toLocaleString("en"), figure(of(relative, s) / relative.length), figure(speeds[s]),
  ];
  heatmap(place, text, relative, balance, label, servers.map(cells));
  const short = servers.map((name) => name.replace(/^expert-server-/, ""));
  const fits = short.length * Math.max(...short.map((name) => name.length)) <= NAMED_CHARACTERS;
  const axis = fits ? short : [`${servers.length} servers: ${servers[0]} … ${servers.at(-1)}`];
  fill(place.querySelector(".axis"), axis, "bdi", set);
}

export function placement(place, { placement: found, members }) {
  if (!found) return heatmap(place, "The placement is not known yet.");
  const { layer, layers, experts, servers } = found;
  fill(byId("layer"), Array.from({ length: layers }, (_, i) => `${i}`), "option", set);
  const counts = found.live_replicas.map(([count, left]) => `${count} with ${plural(left, "live replica")}`);
  const text =
    `Rows: servers (empty: the server is gone). Columns: experts 0 to ${experts - 1}. A darker cell takes a ` +
    `larger share of the expert's tokens. ${counts.join(", ")}.`;
  const size = `${experts} experts by ${servers.length} servers`;
  const label = `Layer ${layer}: ${size}; ${counts.join(", ")}. The table lists them.`;
  // A replica with share 0 is still shown; a replica on a dead server is not.
  const shares = servers.map((server) => {
    const row = Array(experts).fill(0);
    server.experts.forEach((e, i) => server.is_live && (row[e] = Math.max(server.shares[i], 0.04)));
    return row;
  });
  const states = new Map(members.map((m) => [m.id, m.state]));
  const live = ({ is_live, experts }) => `${is_live ? experts.length : 0}`;
  const cells = (s) => [s.id, states.get(s.id) ?? "DEAD", live(s), ranges(s.experts)];
  heatmap(place, text, shares, share, label, servers.map(cells));
}

// Ascending numbers, with runs as "3-7".
function ranges(numbers) {
  const runs = [];
  for (const n of numbers) {
    if (runs.at(-1)?.[1] === n - 1) runs.at(-1)[1] = n;
    else runs.push([n, n]);
  }
  return runs.map(([first, last]) => (first === last ? first : `${first}-${last}`)).join(", ");
}

// Title, columns of the curve, their factor, start and unit of the scale.
const CHARTS = [
  ["PAR", [1, 2], 1, 1, ""],
  ["Tokens/s", [3], 1, 0, ""],
  ["Time to first token", [4], 1e3, 0, " ms"],
  ["Inter-token latency", [5], 1e3, 0, " ms"],
];

export function curves(place, { curve, requests, rates, balance: now }) {
  const { running, waiting, migrations } = requests;
  const moved = migrations ? `, ${migrations} moved to another attention client` : "";
  const queue = running === null ? "" : `Requests: ${running} running, ${waiting} waiting${moved}. `;
  set(
    place.querySelector(".note"),
    `${queue}PAR: peak-to-average ratio of the servers' loads, 1 is balanced. Bound: the least PAR of any ` +
      "placement with these slots. Gap: PAR / bound. Rates are means of the last 10 s.",
  );
  const par = `${figure(now.par)}, bound (dashed) ${figure(now.bound)}, gap ${figure(now.gap)}`;
  const delays = [rates.ttft_s, rates.itl_s].map(milliseconds);
  const texts = [par, figure(rates.tokens_per_s, 1), ...delays];
  const ages = curve[0] ?? [];
  const create = () => make("figure", {}, make("figcaption"), make("div", { role: "img" }));
  const span = figure(Math.max(LEAST_S, -ages[0] || 0), 0);
  fill(place.querySelector(".figures"), CHARTS, create, (element, [title, columns, factor, ...scale], i) => {
    const [caption, plot] = element.children;
    set(caption, `${title}: ${texts[i]}`);
    plot.ariaLabel = `${title} over the last ${span} s. Now: ${texts[i]}.`;
    plot.chart ??= chart(plot, columns, ...scale);
    plot.chart.setSize({ width: Math.max(plot.clientWidth, 100), height: HEIGHT });
    const values = (c) => (curve[c] ?? []).map((value) => value && value * factor);
    plot.chart.setData([ages, ...columns.map(values)]);
  });
}

function chart(plot, columns, least, unit) {
  // Read at each drawing, because the theme may change.
  const css = (name) => () => getComputedStyle(plot)[name];
  const off = { show: false };
  const axis = { stroke: css("color"), grid: { stroke: css("fill"), width: 1 }, ticks: off };
  const line = (_, i) => ({ stroke: css(i ? "color" : "stroke"), dash: i ? [4, 3] : [], points: off });
  const options = {
    width: 100,
    height: HEIGHT,
    legend: off,
    cursor: off,
    scales: {
      x: { time: false, range: (_, from) => [Math.min(from, -LEAST_S), 0] },
      y: { range: (_, from, to) => [least, Math.max(to, least + 0.1)] },
    },
    axes: [
      { ...axis, size: 26, space: 70, values: (_, all) => all.map((age) => (age ? `${-age} s ago` : "now")) },
      { ...axis, size: 62, space: 34, values: (_, all) => all.map((value) => `${value}${unit}`) },
    ],
    series: [{}, ...columns.map(line)],
  };
  return new uPlot(options, [[], ...columns.map(() => [])], plot);
}
