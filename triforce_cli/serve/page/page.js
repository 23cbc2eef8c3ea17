// A conversation about a document: the server reads the file and answers; the page keeps both only while it is open.
import * as api from "./api.js";
import { Turn } from "./thread.js";

const at = (id) => document.getElementById(id);
const [NAME, SIZE] = [at("name").textContent, at("size").textContent];
let given = null, isSent = false;  // the document {name, text, tokens}, and whether the conversation has it already
let messages = [], running = null;

const number = (value) => value.toLocaleString();
const key = () => at("key").value.trim();

function say(message, isError = false) {
  if (at("status").textContent !== message) at("status").textContent = message;  // else it would be read out again
  at("status").classList.toggle("error", isError);
}

// Shows how much has been read; without numbers, that something is read.
function progress(done, total) {
  at("progress").hidden = done === total && total !== undefined;
  at("read").textContent = total && done < total ? `${number(done)} of ${number(total)} tokens` : "";
  if (total) at("progress").value = done / total;
  else at("progress").removeAttribute("value");
}

// Runs what takes a while: one thing at a time, which Stop ends. Errors of the last one are cleared.
async function run(message, work) {
  if (running) return;
  running = new AbortController();
  for (const id of ["ask", "new", "file", "remove"]) at(id).disabled = true;
  at("stop").disabled = false;
  say(message);
  progress();
  try {
    await work(running.signal);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    say(isStopped ? "stopped" : error.message, !isStopped);
  }
  running = null;
  progress(1, 1);
  for (const id of ["ask", "file", "remove"]) at(id).disabled = false;
  at("new").disabled = !messages.length;
  at("stop").disabled = true;
  if (document.activeElement === document.body) at("question").focus();  // its button has been disabled
}

function show(found) {
  given = found;
  isSent = false;
  at("name").textContent = found ? found.name : NAME;
  at("size").textContent = found ? `${number(found.text.length)} characters, ${number(found.tokens)} tokens` : SIZE;
  at("remove").hidden = !found;
}

function take(files) {
  const [file] = files;
  if (!file) return;
  if (files.length > 1) return say("one document at a time", true);
  run(`reading ${file.name}`, async (signal) => {
    const found = await api.document(file, key(), signal);
    show(found);
    say(found.warnings.join("; "));
  });
}

function facts(statistics, usage, reason, limit) {
  const rate = statistics.tokens_per_s, each = statistics.tokens_per_verification;
  const cached = usage.prompt_tokens_details?.cached_tokens;
  return [
    `${number(statistics.new_tokens || 0)} tokens`,
    rate ? `${rate.toFixed(1)} a second` : "",
    each ? `${each.toFixed(1)} a verification` : "",
    usage.prompt_tokens ? `prompt ${number(usage.prompt_tokens)}, of them ${number(cached)} cached` : "",
    reason === "length" ? `cut off: the limit is ${number(limit)}` : "",
    reason ? "" : "stopped",
  ].filter(Boolean).join(" · ");
}

function request(content) {
  const temperature = at("temperature").value;
  return {
    messages: [...messages, { role: "user", content }],
    max_tokens: Number(at("tokens").value) || 512,
    stream: true,
    stream_options: { include_statistics: true, include_usage: true },
    ...(temperature === "" ? {} : { temperature: Number(temperature) }),
  };
}

async function ask(signal) {
  const question = at("question").value, source = given && !isSent ? given : null;
  const body = request(source ? `${source.text}\n\n${question}` : question);
  const turn = new Turn(question, source && source.name, at("thread"));
  let statistics = {}, usage = {}, reason = null;
  at("question").value = "";
  try {
    for await (const event of api.chat(body, key(), signal)) {
      if (event.read) {
        progress(...event.read);
        say("reading");
        continue;
      }
      const [choice] = event.choices;
      if (choice?.delta.content || choice?.delta.reasoning_content) {
        turn.add(choice.delta);
        progress(1, 1);
        say("answering");
      }
      reason = choice?.finish_reason || reason;
      statistics = event.statistics || statistics;
      usage = event.usage || usage;
    }
    say(turn.text ? "" : "there is no text in the answer", !turn.text);
  } finally {
    turn.end(facts(statistics, usage, reason, body.max_tokens), statistics.acceptance || {});
    keep(turn, body, question, Boolean(source));
  }
}

// What has been answered, if only in part, is the context of the next question; what has not may be asked again.
function keep(turn, body, question, hadDocument) {
  if (turn.text) {
    messages = [...body.messages, { role: "assistant", content: turn.text }];
    isSent ||= hadDocument;
  } else {
    if (!turn.thought) turn.remove();
    at("question").value ||= question;
  }
}

function begin() {
  messages = [];
  isSent = false;
  at("thread").replaceChildren();
  at("new").disabled = true;
  say("");
  at("question").focus();
}

async function name() {
  const found = await api.model(key()).catch(() => null);
  at("model").textContent = found ? `${found.id}, up to ${number(found.max_model_len)} tokens` : "";
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run("waiting", ask);
});
at("question").addEventListener("keydown", (event) => {
  // 229: some browsers end a composition before they report the Enter that ended it
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  if (!running) at("form").requestSubmit();
});
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", begin);
at("remove").addEventListener("click", () => {
  show(null);
  at("file").focus();
});
at("key").addEventListener("change", name);
at("file").addEventListener("change", (event) => {
  take([...event.target.files]);
  event.target.value = "";  // so that the same file can be chosen again
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {  // beside the frame too, where a browser would leave the page
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    at("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") take([...event.dataTransfer.files]);
  });
}
name();
