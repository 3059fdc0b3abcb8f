// The chat box: asks the endpoint's own API. The colour of a text is that of the server that computed most of it.
import { byId, fill, make, part, set } from "./elements.js";

const [COLOURS, MOST_TOKENS] = [8, 4096];
const [answer, legend] = [part("answer"), part("answer-servers")];
let [page, servers, running, pairs] = [{}, [], null, new Map()];

// Tells the chat the newest snapshot and the expert servers that live.
export function know(snapshot, living) {
  page = snapshot;
  // The colours stay while an answer is shown.
  servers = [...servers, ...living.filter((name) => !servers.includes(name))];
}

byId("message").form.onsubmit = (event) => {
  event.preventDefault();
  const text = byId("message").value.trim();
  if (text && !running) stream(text);
};
byId("cancel").onclick = () => running?.abort();

function run(controller) {
  running = controller;
  byId("send").ariaDisabled = String(running !== null);
  byId("cancel").ariaDisabled = String(running === null);
}

async function stream(text) {
  run(new AbortController());
  pairs = new Map();
  answer.replaceChildren();
  legend.replaceChildren();
  const body = {
    model: page.model,
    max_tokens: Math.min(Math.max(parseInt(byId("max-tokens").value) || 1, 1), MOST_TOKENS),
    stream: true,
    ...(page.has_chat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
    ...(page.names_servers && { stream_options: { include_servers: true } }),
  };
  try {
    const headers = { "content-type": "application/json" };
    const asked = { method: "POST", headers, body: JSON.stringify(body), signal: running.signal };
    const got = await fetch(page.has_chat ? "v1/chat/completions" : "v1/completions", asked);
    // Tokens without text yet belong to the next text.
    let served = new Map();
    for await (const event of events(got)) {
      if (event.error) throw new Error(event.error.message ?? event.error);
      add(served, Object.entries(event.servers ?? {}));
      const piece = event.choices.map((choice) => choice.delta?.content ?? choice.text ?? "").join("");
      if (!piece) continue;
      append(piece, [...served].sort());
      served = new Map();
    }
  } catch (error) {
    const failed = make("span", { className: "failed" }, ` The answer failed: ${error.message}`);
    if (error.name !== "AbortError") answer.append(failed);
  }
  run(null);
}

// The events of an answer: server-sent ones, or the one of a refusal.
async function* events(got) {
  const isJson = got.headers.get("content-type")?.startsWith("application/json");
  if (!got.ok) yield isJson ? await got.json() : { error: await got.text() };
  const reader = got.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const lines = (left + read.value).split("\n");
    left = lines.pop();
    const found = lines.filter((line) => line.startsWith("data: ") && !line.startsWith("data: [DONE]"));
    for (const line of found) yield JSON.parse(line.slice(6));
  }
}

function append(text, served) {
  const span = make("span", {}, text);
  answer.append(span);
  if (!served.length) return;
  const [most] = served.reduce((a, b) => (b[1] > a[1] ? b : a));
  span.className = `t ${colour(most)}`;
  span.dataset.servers = served.map(([server]) => server).join(" ");
  span.title = `computed by ${shares(served).join(", ")}`;
  add(pairs, served);
  const all = [...pairs].sort();
  const texts = shares(all);
  const key = (server) => make("i", { className: `key ${colour(server)}` });
  const create = ([server]) => make("span", {}, key(server), make("bdi"));
  fill(legend, all, create, (item, _, i) => set(item.lastChild, texts[i]), ([server]) => server);
}

function add(totals, counts) {
  for (const [name, count] of counts) totals.set(name, (totals.get(name) ?? 0) + count);
}

const colour = (server) => `t${servers.indexOf(server) % COLOURS}`;

function shares(counts) {
  const total = counts.reduce((all, [, count]) => all + count, 0);
  return counts.map(([server, count]) => `${server} ${Math.round((100 * count) / total)}%`);
}
