// The chat box: asks the endpoint's own API. The colour of a text is that of the server that computed most of it.
import { byId, make, post } from "./elements.js";

// Degrees between the hues of servers: the golden angle keeps any number of them apart.
const HUES = 137.5;
const [form, answer, legend] = [byId("message").form, byId("answer"), byId("answer-servers")];
// The servers that computed any text: they keep their colours.
const servers = [];
let [page, running] = [{}, null];

// Tells the chat the newest snapshot.
export function chat(_, snapshot) {
  page = snapshot;
}

form.onsubmit = (event) => {
  event.preventDefault();
  if (!running) stream(byId("message").value.trim());
};
byId("cancel").onclick = () => running?.abort();

function run(controller) {
  running = controller;
  byId("send").ariaDisabled = String(running !== null);
  byId("cancel").ariaDisabled = String(running === null);
}

async function stream(text) {
  run(new AbortController());
  answer.replaceChildren();
  legend.replaceChildren();
  const body = {
    model: page.model,
    max_tokens: byId("max-tokens").valueAsNumber,
    stream: true,
    ...(page.has_chat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
    ...(page.names_servers && { stream_options: { include_servers: true } }),
  };
  try {
    const path = page.has_chat ? "v1/chat/completions" : "v1/completions";
    const got = await post(path, body, running.signal);
    // Pairs by server: of the answer, and since its last text, because a token may have none.
    const [all, since] = [new Map(), new Map()];
    for await (const event of events(got)) {
      if (event.error) throw new Error(event.error.message ?? event.error);
      for (const [server, count] of Object.entries(event.servers ?? {}))
        for (const pairs of [all, since]) pairs.set(server, (pairs.get(server) ?? 0) + count);
      const piece = event.choices.map((choice) => choice.delta?.content ?? choice.text ?? "").join("");
      if (!piece) continue;
      append(piece, since, all);
      since.clear();
    }
  } catch (error) {
    const failed = make("span", { className: "bad" }, ` The answer failed: ${error.message}`);
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

function append(text, pairs, all) {
  if (!pairs.size) return answer.append(text);
  const [most] = [...pairs].reduce((a, b) => (b[1] > a[1] ? b : a));
  const span = coloured("span", most, text);
  span.dataset.servers = [...pairs.keys()].join(" ");
  span.title = `computed by ${shares(pairs).map(([, share]) => share).join(", ")}`;
  answer.append(span);
  const entry = ([server, share]) => make("span", {}, coloured("i", server), make("bdi", {}, share));
  legend.replaceChildren(...shares(all).map(entry));
}

function coloured(tag, server, ...children) {
  if (!servers.includes(server)) servers.push(server);
  const element = make(tag, { className: "of" }, ...children);
  element.style.setProperty("--hue", HUES * servers.indexOf(server));
  return element;
}

function shares(pairs) {
  const total = [...pairs.values()].reduce((sum, count) => sum + count, 0);
  return [...pairs].map(([server, count]) => [server, `${server} ${Math.round((100 * count) / total)}%`]);
}
