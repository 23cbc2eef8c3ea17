// A conversation about a text file. The page keeps both only while it is open.
const at = (id) => document.getElementById(id);
const [NAME, SIZE] = [at("name").textContent, at("size").textContent];
const TOO_LONG = "context_length_exceeded", SHORTEST = 2000;  // characters of a part
let given = null, isSent = false;  // the document {name, text}, and whether the conversation has it already
let messages = [], running = null;

function element(name, className, ...content) {
  const made = Object.assign(document.createElement(name), { className });
  made.append(...content);
  return made;
}

// Markdown -> nodes, without trust: texts become text nodes, links lead to http(s) alone, and nothing is loaded.
const INLINE = /`(?<code>[^`]{1,1000})`|\*\*(?<strong>[^*]{1,600})\*\*|\*(?<em>[^*\s][^*]{0,600})\*|\[(?<label>[^[\]]{1,300})\]\((?<target>https?:[^\s()]{1,1000})\)/g;

function inline(text) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    const { code, strong, em, label, target } = match.groups;
    nodes.push(text.slice(from, match.index));
    from = match.index + match[0].length;
    if (code) nodes.push(element("code", "", code));
    else if (label) nodes.push(Object.assign(element("a", "", label), { href: target, rel: "noopener noreferrer" }));
    else nodes.push(element(strong ? "strong" : "em", "", strong || em));
  }
  return [...nodes, text.slice(from)];
}

function markdown(text) {
  return text.split(/(^```[^]*?(?:^```[^\n]*$|$(?![^])))/m).flatMap((part) => {
    if (part.startsWith("```")) return [element("pre", "", element("code", "", part.replace(/^```.*\n?|\n?```.*$/g, "")))];
    return part.split(/\n\s*\n/).filter((block) => block.trim()).map((block) => {
      const heading = /^#{1,6}\s+([^\n]*)$/.exec(block.trim());
      return heading ? element("h3", "", ...inline(heading[1])) : element("p", "", ...inline(block.replace(/^\n+|\n+$/g, "")));
    });
  });
}

function say(message, isError = false) {
  if (at("status").textContent !== message) at("status").textContent = message;  // else it would be read out again
  at("status").classList.toggle("error", isError);
}

async function send(path, options = {}) {
  const key = at("key").value.trim();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const found = await response.json().catch(() => null);
  const message = found?.error?.message || `the server answers with status ${response.status}`;
  throw Object.assign(new Error(message), { code: found?.error?.code });
}

// Yields what a stream says: {read: [done, total]} while the prompt is read, else chunks of the API. Throws its error.
async function* chat(body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await send("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection to the server was lost before the answer's end");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith(": prefill ")) yield { read: line.split(" ").slice(3).map(Number), choices: [] };
      if (!line.startsWith("data: ")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Notes on a text that exceeds the context, on parts of it where those fit, as `triforce summarize` takes them.
async function notes(text, question, body, signal) {
  const asked = `Write down everything in the text above that helps to answer this question: ${question}`;
  const messages = [{ role: "user", content: `A part of a longer document:\n\n${text}\n\n---\n\n${asked}` }];
  try {
    let noted = "";
    for await (const { read, choices: [choice] } of chat({ ...body, messages }, signal)) {
      if (read) at("progress").value = read[0] / read[1];
      noted += choice?.delta.content || "";
    }
    return noted.trim();
  } catch (error) {
    if (error.code !== TOO_LONG || text.length < SHORTEST) throw error;
  }
  const middle = text.indexOf("\n\n", text.length / 2), cut = middle < 0 ? Math.ceil(text.length / 2) : middle;
  const found = [];
  for (const part of [text.slice(0, cut), text.slice(cut)]) found.push(await notes(part, question, body, signal));
  return found.filter(Boolean).join("\n\n");
}

// Yields the answer's events; a document that exceeds the context is read in parts first, for this question alone.
async function* answered(body, source, question, signal) {
  try {
    yield* chat(body, signal);
    return;
  } catch (error) {
    if (error.code !== TOO_LONG || !source) throw error;
  }
  say("the document exceeds the context: reading it in parts");
  const found = await notes(source.text, question, body, signal);
  const content = `Notes on the parts of a document, in their order:\n\n${found}\n\n---\n\n${question}`;
  yield { inParts: true, choices: [] };
  yield* chat({ ...body, messages: [{ role: "user", content }] }, signal);
}

async function ask(signal) {
  const question = at("question").value, source = given && !isSent ? given : null, started = performance.now();
  const content = source ? `${source.text}\n\n${question}` : question, temperature = at("temperature").value;
  const asked = [...messages, { role: "user", content }];
  const body = { messages: asked, max_tokens: Number(at("tokens").value) || 512, stream: true };
  body.stream_options = { include_usage: true };
  if (temperature !== "") body.temperature = Number(temperature);
  const answer = element("div", "answer"), thought = element("p", ""), facts = element("small", "facts");
  const thinking = Object.assign(element("details", "", element("summary", "", "Thinking"), thought), { hidden: true });
  const shown = [...(source ? [element("span", "source", source.name)] : []), question];
  const turn = element("article", "turn", element("div", "question", ...shown), thinking, answer, facts);
  at("thread").append(turn);
  at("question").value = "";
  let text = "", usage = {}, reason = "stopped", first = null, isWhole = true;
  try {
    for await (const { read, inParts, choices: [choice], usage: counted } of answered(body, source, question, signal)) {
      if (inParts) isWhole = false;
      if (read) at("progress").value = read[0] / read[1];
      usage = counted || usage;
      reason = choice?.finish_reason || reason;
      thought.textContent += choice?.delta.reasoning_content || "";
      thinking.hidden = !thought.textContent;
      if (!choice?.delta.content) continue;
      first ??= performance.now();
      at("progress").hidden = true;
      say("answering");
      text += choice.delta.content;
      answer.replaceChildren(...markdown(text));
    }
    say(text ? "" : "there is no text in the answer", !text);
  } finally {
    const { completion_tokens: count, prompt_tokens: prompt, prompt_tokens_details: more } = usage;
    const rate = count > 1 && first ? `${(1000 * (count - 1) / (performance.now() - first)).toFixed(1)} a second` : "";
    const read = first ? `first word after ${((first - started) / 1000).toFixed(1)} s` : "";
    const counts = count ? [`${count} tokens`, rate, read, `prompt ${prompt}, of them ${more.cached_tokens} cached`] : [];
    facts.textContent = [...counts, reason === "stop" ? "" : reason].filter(Boolean).join(" · ");
    if (text && isWhole) {  // also an answer that was stopped is the context of the next question
      messages = [...asked, { role: "assistant", content: text }];
      isSent ||= Boolean(source);
    } else if (!text) {
      turn.remove();
      at("question").value ||= question;
    }
  }
}

// Runs what takes a while: one thing at a time, which Stop ends.
async function run() {
  if (running) return;
  running = new AbortController();
  for (const id of ["ask", "new", "file", "remove"]) at(id).disabled = true;
  at("stop").disabled = at("progress").hidden = false;
  at("progress").removeAttribute("value");
  say("reading");
  try {
    await ask(running.signal);
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  }
  running = null;
  at("progress").hidden = at("stop").disabled = true;
  for (const id of ["ask", "file", "remove"]) at(id).disabled = false;
  at("new").disabled = !messages.length;
  at("question").focus();
}

function show(found) {
  given = found;
  isSent = false;
  at("name").textContent = found ? found.name : NAME;
  at("size").textContent = found ? `${found.text.length.toLocaleString()} characters` : SIZE;
  at("remove").hidden = !found;
}

async function take([file]) {
  if (!file || running) return;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    show({ name: file.name, text });
    say("");
  } catch {
    say(`${file.name} is not text in UTF-8`, true);
  }
}

async function name() {
  const found = await send("v1/models").then((response) => response.json()).catch(() => null);
  const model = found?.data[0];
  at("model").textContent = model ? `${model.id}, up to ${model.max_model_len.toLocaleString()} tokens` : "";
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
at("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) at("form").requestSubmit();
});
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", () => {
  messages = [];
  isSent = false;
  at("thread").replaceChildren();
  at("new").disabled = true;
  say("");
});
at("remove").addEventListener("click", () => show(null));
at("key").addEventListener("change", name);
at("file").addEventListener("change", (event) => {
  take(event.target.files);
  event.target.value = "";  // so that the same file can be chosen again
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {  // beside the frame too, where a browser would leave the page
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    at("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files);
  });
}
name();
