"use strict";
// Reads a file in the browser, sends it with the question, and shows the answer as it comes. Keeps nothing.
const at = (id) => document.getElementById(id);
let text = "", running = null;

function headers() {
  const key = at("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function say(message, isError = false) {
  at("status").textContent = message;
  at("status").classList.toggle("error", isError);
}

async function take(file) {
  if (!file) return;
  text = await file.text();
  at("name").textContent = file.name;
  at("size").textContent = `${text.length.toLocaleString()} characters`;
}

function show(statistics) {
  const rows = Object.entries(statistics.acceptance).map(([pair, rate]) => {
    const row = document.createElement("tr"), meter = document.createElement("meter");
    meter.value = rate;
    const cells = [pair, `${Math.round(100 * rate)} %`, meter].map((content) => {
      const cell = document.createElement("td");
      cell.append(content);
      return cell;
    });
    row.append(...cells);
    return row;
  });
  at("rates").hidden = !rows.length;
  at("rates").tBodies[0].replaceChildren(...rows);
  const rate = statistics.tokens_per_s, each = statistics.tokens_per_verification;
  say([
    `${statistics.new_tokens} tokens`,
    rate ? `${rate.toFixed(1)} a second` : "",
    each ? `${each.toFixed(1)} a verification` : "",
  ].filter(Boolean).join(" · "));
}

function observe(line) {
  if (line.startsWith(": prefill ")) {
    const [, , , done, total] = line.split(" ");
    at("progress").hidden = done === total;
    at("progress").value = done / total;
    say(`reading: ${Number(done).toLocaleString()} of ${Number(total).toLocaleString()} tokens`);
  } else if (line.startsWith("data: {")) {
    const event = JSON.parse(line.slice(6));
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    if (choice && choice.delta.reasoning_content) at("thought").append(choice.delta.reasoning_content);
    if (choice && choice.delta.content) at("answer").append(choice.delta.content);
    at("thinking").hidden = !at("thought").textContent;
    if (event.statistics && event.statistics.new_tokens) show(event.statistics);
  }
}

async function read(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    lines.forEach(observe);
  }
}

async function ask() {
  const question = at("question").value, temperature = at("temperature").value;
  const body = {
    messages: [{ role: "user", content: text ? `${text}\n\n${question}` : question }],
    max_tokens: Number(at("tokens").value) || 512,
    stream: true,
    stream_options: { include_statistics: true },
    ...(temperature === "" ? {} : { temperature: Number(temperature) }),
  };
  running = new AbortController();
  const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal };
  const response = await fetch("v1/chat/completions", options);
  if (!response.ok) throw new Error((await response.json()).error.message);
  await read(response);
}

async function submit(event) {
  event.preventDefault();
  at("answer").replaceChildren();
  at("thought").replaceChildren();
  at("thinking").hidden = true;
  at("rates").hidden = true;
  at("ask").disabled = true;
  at("stop").disabled = false;
  say("waiting");
  try {
    await ask();
  } catch (error) {
    const isStopped = error.name === "AbortError";
    say(isStopped ? "stopped" : error.message, !isStopped);
  }
  at("progress").hidden = true;
  at("ask").disabled = false;
  at("stop").disabled = true;
}

async function name() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) return;
  const [model] = (await response.json()).data;
  at("model").textContent = `${model.id}, up to ${model.max_model_len.toLocaleString()} tokens`;
}

at("form").addEventListener("submit", submit);
at("stop").addEventListener("click", () => running && running.abort());
at("key").addEventListener("change", name);
at("file").addEventListener("change", (event) => take(event.target.files[0]));
for (const kind of ["dragover", "dragleave", "drop"]) {
  at("drop").addEventListener(kind, (event) => {
    event.preventDefault();
    at("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files[0]);
  });
}
name();
