// What the page asks of its server. A key is a field of the page: it is kept nowhere.

function headers(key, type) {
  return { ...(type ? { "Content-Type": type } : {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer: is it still running?");
  }
  if (response.ok) return response;
  const found = await response.json().catch(() => null);
  throw new Error(found?.error?.message || `the server answers with status ${response.status}`);
}

export async function model(key) {
  const response = await send("v1/models", { headers: headers(key) });
  return (await response.json()).data[0];
}

// The text of a file, as the server reads it, its tokens, and warnings.
export async function document(file, key, signal) {
  const options = { method: "POST", headers: headers(key, "application/octet-stream"), body: file, signal };
  const response = await send(`documents?name=${encodeURIComponent(file.name)}`, options);
  return response.json();
}

// Yields what a stream says: {read: [done, total]} while the prompt is read, else chunks of the API. Throws its error.
export async function* chat(body, key, signal) {
  const options = { method: "POST", headers: headers(key, "application/json"), body: JSON.stringify(body), signal };
  const response = await send("v1/chat/completions", options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let isWhole = false;
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith(": prefill ")) yield { read: line.split(" ").slice(3).map(Number) };
      isWhole ||= line === "data: [DONE]";
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
  if (!isWhole) throw new Error("the connection to the server was lost before the answer's end");
}
